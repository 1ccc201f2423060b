# SPDX-License-Identifier: Apache-2.0
"""Wrapping: an optimizer keeps its class, its state and its ways, and refuses wrong arguments."""

import copy
import pickle
from abc import ABC
from collections.abc import Callable
from typing import Generic, TypeVar

import pytest
import torch
from pool import run
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from training import assert_same_weights, joined_batches, loss_of, make_model, part, train

import torch_ring as hvd


class Heavy(SGD):
    """An optimizer of a user: another constructor, and a step that calls its base class's."""

    def __init__(self, model: nn.Module, *, weight: float) -> None:
        super().__init__(model.parameters(), lr=1.0 / weight, momentum=0.9)

    def step(self, closure=None):
        return super().step(closure)


def make_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_adam(model: nn.Module) -> Optimizer:
    return Adam([{"params": [parameter], "lr": 0.05} for parameter in model.parameters()])


def make_heavy(model: nn.Module) -> Optimizer:
    SGD(model.parameters(), lr=0.1)  # from now on, the base class's step also runs hooks
    return Heavy(model, weight=10)


def wrapping_keeps_everything() -> None:
    for make in (make_sgd, make_adam, make_heavy):
        model = make_model()
        optimizer = make(model)
        train(model, optimizer, joined_batches(steps=1))
        state, groups, cls = optimizer.state, optimizer.param_groups, type(optimizer)
        before = optimizer.state_dict()
        named = dict(model.named_parameters())
        wrapped = hvd.DistributedOptimizer(optimizer, named.items())
        assert list(wrapped._parameter_names.values()) == list(named)  # as in Horovod
        assert wrapped is optimizer
        assert isinstance(wrapped, cls)
        assert (type(wrapped).__name__, type(wrapped).__module__) == (cls.__name__, cls.__module__)
        assert wrapped.state is state
        assert wrapped.param_groups is groups
        assert pickle.dumps(wrapped.state_dict()) == pickle.dumps(
            before | {"torch_ring_ranks": hvd.size()}
        )


def state_dicts_are_interchangeable() -> None:
    """A checkpoint of a wrapped optimizer goes on in a plain one and the other way round."""
    for make in (make_sgd, make_adam, make_heavy):
        alone, together = make_model(), make_model()
        first, second = joined_batches(steps=4)[:2], joined_batches(steps=4)[2:]
        plain, wrapped = make(alone), hvd.DistributedOptimizer(make(together))
        train(alone, plain, first)
        train(together, wrapped, map(part, first))
        saved, plain_saved = wrapped.state_dict(), plain.state_dict()
        assert saved.keys() == plain_saved.keys() | {"torch_ring_ranks"}
        plain, wrapped = make(alone), hvd.DistributedOptimizer(make(together))
        plain.load_state_dict(copy.deepcopy(saved))
        wrapped.load_state_dict(plain_saved)
        train(alone, plain, second)
        train(together, wrapped, map(part, second))
        assert_same_weights(together, alone)


def copy_and_step(duplicate: Callable[[Optimizer], Optimizer]) -> None:
    model, alone = make_model(), make_model()
    wrapped, plain = hvd.DistributedOptimizer(make_sgd(model)), make_sgd(alone)
    batches = joined_batches(steps=3)
    train(model, wrapped, [part(batches[0])])
    train(alone, plain, batches[:1])
    twins, twin = duplicate((model, wrapped))
    assert isinstance(twin, SGD)
    assert type(twin).__qualname__ == "SGD"
    assert {*twin.state_dict(), "torch_ring_ranks"} == wrapped.state_dict().keys()
    loss_of(twins, part(batches[0])).backward()
    before = [parameter.detach().clone() for parameter in twins.parameters()]
    for each in (twin, twin, duplicate(twin)):  # the gradients are this rank's own
        with pytest.raises(ValueError, match=f"^rank {hvd.rank()}: this SGD is a copy of a Distr"):
            each.step()
    assert all(map(torch.equal, before, twins.parameters()))
    train(alone, plain, batches)
    train(twins, hvd.DistributedOptimizer(twin), map(part, batches))
    assert_same_weights(twins, alone)
    by_itself = SGD(twins.parameters(), lr=0.5)
    by_itself.load_state_dict(twin.state_dict())
    if hvd.rank() == 0:
        by_itself.step()  # alone: it has no other ranks


def pickled(pair: tuple[nn.Module, Optimizer]) -> tuple[nn.Module, Optimizer]:
    return pickle.loads(pickle.dumps(pair))


def copies_do_not_step_with_local_gradients() -> None:
    for duplicate in (copy.deepcopy, pickled):
        copy_and_step(duplicate)


def copies_where_there_is_no_world() -> None:
    """A copy loaded without a world is an ordinary optimizer; none is wrapped there."""
    model = make_model()
    data = pickle.dumps((model, hvd.DistributedOptimizer(make_sgd(model))))
    hvd.shutdown()
    alone = make_model()
    twins, twin = pickle.loads(data)
    generator = torch.Generator().manual_seed(1)
    batches = list(torch.randn(2, 6, 8, generator=generator))
    train(twins, twin, batches)
    train(alone, make_sgd(alone), batches)
    assert_same_weights(twins, alone)
    with pytest.raises(ValueError, match="init"):
        hvd.DistributedOptimizer(make_sgd(alone))
    hvd.init()


class Slotted(Generic[TypeVar("T")]):
    """As the first base of an optimizer it makes another layout in memory than torch's."""

    __slots__ = ()


class Real(ABC, Slotted[int], SGD):
    """A class as in pytorch_optimizer: abstract bases first, the methods further up."""

    zeroed = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed += 1
        super().zero_grad(set_to_none)


class Proxy(Optimizer):
    """An optimizer that passes everything on to another one: torch has not initialised it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str):
        return getattr(vars(self)["optimizer"], name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self.optimizer.state_dict()

    def step(self, closure=None):
        return self.optimizer.step(closure)


UNUSUAL = {
    "slotted": lambda model: Real(model.parameters(), lr=0.1),
    "proxy": lambda model: Proxy(make_sgd(model)),
}


def train_unusual(name: str, adasum: bool) -> None:
    make = UNUSUAL[name]
    alone, together = make_model(), make_model()
    plain, optimizer = make(alone), make(together)
    cls = type(optimizer)
    assert hvd.DistributedOptimizer(optimizer, op=hvd.Adasum if adasum else hvd.Average)
    assert isinstance(optimizer, cls)
    assert type(optimizer).__qualname__ == cls.__qualname__
    batches = joined_batches(steps=3)
    shares = batches if adasum else list(map(part, batches))  # equal changes count as one
    train(alone, plain, batches)
    train(together, optimizer, shares)
    assert_same_weights(together, alone)
    if name == "slotted":
        assert optimizer.zeroed == plain.zeroed == 3
        assert adasum or isinstance(copy.deepcopy(optimizer), cls)


@pytest.mark.parametrize("adasum", [False, True], ids=["average", "adasum"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_classes_unlike_torchs_own(name, adasum):
    run(train_unusual, 2, args=(name, adasum))


class Final(SGD):
    def __init_subclass__(cls, *, why: str) -> None:
        raise AssertionError(why)


def a_refused_optimizer_is_as_it_was() -> None:
    """A refused optimizer keeps its class and attributes, and can be wrapped later."""
    model = nn.Linear(3 + hvd.rank(), 4)
    for op in (hvd.Average, hvd.Adasum):
        optimizer = make_sgd(model)
        attributes = dict(vars(optimizer))
        with pytest.raises(hvd.MismatchError):
            hvd.DistributedOptimizer(optimizer, op=op)
        assert type(optimizer) is SGD
        assert vars(optimizer) == attributes

    optimizer = Final(make_model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"Final cannot be wrapped, as Python makes no sub.*'why'"):
        hvd.DistributedOptimizer(optimizer)
    assert type(optimizer) is Final

    proxy = Proxy(make_sgd(make_model()))
    proxy.step = lambda: None
    with pytest.raises(ValueError, match="calls no hooks: wrap the optimizer first"):
        hvd.DistributedOptimizer(proxy)
    assert type(proxy) is Proxy
    assert vars(proxy).keys() == {"optimizer", "step"}
    train_unusual("slotted", adasum=False)


def wrong_arguments_are_refused() -> None:
    model = make_model()
    named = list(model.named_parameters())
    weight = nn.Parameter(torch.zeros(2))
    for message, options in {
        "unique: 0.weight": {"named_parameters": [named[0], *named]},
        "lacks 1 of the 6": {"named_parameters": named[1:]},
        r"give model.named_parameters\(\)$": {"named_parameters": model.parameters()},
        r"pairs of names and parameters: give": {"named_parameters": model},
        r"hvd.Average, hvd.Sum or hvd.Adasum; got hvd.Max$": {"op": hvd.Max},
        r"got 'sum': use hvd.Sum$": {"op": "sum"},
        "needs op=Average": {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        "positive": {"gradient_predivide_factor": 0.0},
        "an integer, at least 1, not 1.5": {"backward_passes_per_step": 1.5},
        "compression='fp16' is no compressor": {"compression": "fp16"},
        "must be a ProcessSet, not None": {"process_set": None},
        "non-negative integer, not -1": {"groups": -1},
        "consist of tensors, not of str": {"groups": [["0.weight"]]},
        "only once": {"groups": [[named[0][1]], [named[1][1], named[0][1]]]},
        r"shape \[2\] in groups is no parameter": {"groups": [[weight]]},
    }.items():
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(make_sgd(model), **options)
    for wrong, found in ((model, "Sequential"), (SGD, "the class SGD")):
        with pytest.raises(TypeError, match=rf"Optimizer, not {found}: make the optimizer first"):
            hvd.DistributedOptimizer(wrong)
    with pytest.raises(ValueError, match="wrap it once"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(make_sgd(model)))
    with (
        pytest.warns(DeprecationWarning, match="use groups"),
        pytest.raises(ValueError, match="-2"),
    ):
        hvd.DistributedOptimizer(make_sgd(model), num_groups=-2)
    low = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"'low' has dtype torch.float8"):
        hvd.DistributedOptimizer(SGD([low], lr=0.1), [("low", low)])


def different_models_are_refused() -> None:
    odd = hvd.rank() == hvd.size() - 1
    wider = nn.Linear(3, 4)
    wider.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    same, first = nn.Linear(3, 4), "rank 0: 'weight' float32 [4, 3] on cpu; rank 2: 'weight' "
    for model, options, others, expected in (
        (nn.Linear(4, 3), {}, {}, first + "float32 [3, 4] on cpu"),
        (nn.Linear(3, 4).double(), {}, {}, first + "float64 [4, 3] on cpu"),
        (wider, {}, {}, "rank 0: nothing; rank 2: 'extra' float32 [1] on cpu"),
        (same, {"op": hvd.Sum}, {}, "rank 0: Average, "),
        (same, {"groups": 1}, {"groups": 2}, "[4] on cpu in group 1; rank 2: 'bias' float32 [4] "),
    ):
        model, options = (model, options) if odd else (same, others)
        with pytest.raises(hvd.MismatchError) as error:
            hvd.DistributedOptimizer(make_sgd(model), model.named_parameters(), **options)
        assert expected in str(error.value)
    hvd.DistributedOptimizer(make_sgd(make_model())).step()  # the job may go on


def shut_down_and_wrap_again() -> None:
    """After shutdown() a new world, and a new optimizer of the same parameters."""
    model = make_model()
    old = hvd.DistributedOptimizer(make_sgd(model))
    batches = [part(batch) for batch in joined_batches(steps=2)]
    train(model, old, batches)
    hvd.shutdown()
    with pytest.raises(hvd.RingError, match="shut down"):
        train(model, old, batches)
    hvd.init()
    alone = copy.deepcopy(model)
    train(alone, make_sgd(alone), joined_batches(steps=2))
    train(model, hvd.DistributedOptimizer(make_sgd(model)), batches)
    assert_same_weights(model, alone)


def lazy_modules_need_a_forward_pass() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    sgd = SGD(model.parameters(), lr=0.1)
    plain = hvd.DistributedOptimizer(SGD(make_model().parameters(), lr=0.1))
    rounds = hvd.LocalSGD(SGD(make_model().parameters(), lr=0.1))
    for call in (
        lambda: hvd.DistributedOptimizer(sgd, model.named_parameters()),
        lambda: hvd.DistributedOptimizer(sgd, op=hvd.Adasum),
        lambda: hvd.DistributedOptimizer(sgd, shard_state=True),
        lambda: hvd.LocalSGD(sgd),
        lambda: hvd.DiLoCo(sgd),
        lambda: plain.add_param_group({"params": model.parameters()}),
        lambda: rounds.add_param_group({"params": model.parameters()}),
        lambda: hvd.broadcast_parameters(model.state_dict(), root_rank=0),
        lambda: hvd.broadcast_buffers(model),
        lambda: hvd.verify_consistency(model),
    ):
        with pytest.raises(ValueError, match="run one forward pass first"):
            call()
    batch = joined_batches(steps=1)
    loss_of(model, batch[0])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, hvd.DistributedOptimizer(sgd, model.named_parameters()), batch)


@pytest.mark.parametrize(
    ("case", "size"),
    [
        (wrapping_keeps_everything, 1),
        (wrapping_keeps_everything, 2),
        (state_dicts_are_interchangeable, 2),
        (copies_do_not_step_with_local_gradients, 2),
        (copies_where_there_is_no_world, 2),
        (a_refused_optimizer_is_as_it_was, 2),
        (wrong_arguments_are_refused, 2),
        (different_models_are_refused, 3),
        (shut_down_and_wrap_again, 2),
        (lazy_modules_need_a_forward_pass, 2),
    ],
)
def test_wrapping(case, size):
    run(case, size)
