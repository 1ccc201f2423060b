# SPDX-License-Identifier: Apache-2.0
"""shard_state=True: each rank steps a part of the parameters, which all ranks of its host see."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import namespaces
import pytest
import torch
from logs import logged
from on_ranks import on_ranks
from pool import DEADLINE_S, error_of, eventually, expect_error, has_asked, run
from slow import on_shm_and_slowly_on_tcp
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from training import assert_same_on_all_ranks, joined_batches, loss_of, part
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring import checkpoint
from torch_ring.optimizer import sharded_state
from torch_ring.optimizer.host_memory import Segment
from torch_ring.optimizer.shard_parts import flat, plan_parts

OPTIM = torch.optim
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adam": partial(Adam, lr=0.01, amsgrad=True),
    "fused": partial(Adam, lr=0.01, fused=True),
    "foreach": partial(OPTIM.AdamW, lr=0.01, foreach=True),
    "rmsprop": partial(OPTIM.RMSprop, momentum=0.5, centered=True),
    "adagrad": OPTIM.Adagrad,
    "adadelta": OPTIM.Adadelta,
    "adamax": OPTIM.Adamax,
    "asgd": OPTIM.ASGD,
    "nadam": OPTIM.NAdam,
    "radam": OPTIM.RAdam,
    "rprop": OPTIM.Rprop,
    "adafactor": OPTIM.Adafactor,
    "muon": OPTIM.Muon,
}
Parameters = Sequence[nn.Parameter]


def make_model(maker: str = "adam", seed: int = 1) -> Any:
    """Return a net with a weight that is cut, small weights, and one in another memory format."""
    torch.manual_seed(seed)
    bias = maker != "muon"  # which takes matrices only
    layers = [nn.Linear(*shape, bias=bias) for shape in ((8, 100), (100, 77), (77, 3))]
    if maker != "fused":  # not for strides of a transposed weight
        layers[1].weight.data = layers[1].weight.data.t().contiguous().t()
    return nn.Sequential(layers[0], nn.Tanh(), *layers[1:])


def plain(model: nn.Module, maker: str = "adam", **more: Any) -> Any:
    return hvd.DistributedOptimizer(MAKERS[maker](model.parameters()), **more)


def sharded(model: nn.Module, maker: str = "adam", **more: Any) -> Any:
    optimizer = MAKERS[maker](model.parameters())
    assert hvd.DistributedOptimizer(optimizer, shard_state=True, **more) is optimizer
    return optimizer


def step(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, part(batch)).backward()
    optimizer.step()


def trained() -> tuple[Any, Any]:
    """Return a model and its optimizer after a step, with gradients for the next one."""
    model = make_model()
    optimizer = sharded(model)
    (batch,) = joined_batches(1)
    step(model, optimizer, batch)
    loss_of(model, part(batch)).backward()
    return model, optimizer


def assert_equal(model: nn.Module, other: nn.Module, where: str = "") -> None:
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), (where, name)


def assert_equal_states(state: dict[str, Any], other: dict[str, Any], where: str = "") -> None:
    """Compare two results of state_dict() bit by bit."""
    assert state["param_groups"] == other["param_groups"], where
    assert state["state"].keys() == other["state"].keys(), where
    for index, values in other["state"].items():
        assert list(state["state"][index]) == list(values), where
        for key, value in values.items():
            found = state["state"][index][key]
            assert found.shape == value.shape, (where, index, key)
            assert torch.equal(found, value), (where, index, key)


# --- programs that do something before some of the steps 0 to 3, beside an unsharded optimizer


def pop_key(parameters: Parameters, optimizer: Optimizer) -> None:
    for parameter in parameters:
        optimizer.state[parameter].pop("momentum_buffer", None)


def zero(parameters: Parameters, optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def put_zeros(parameters: Parameters, optimizer: Optimizer) -> None:
    """Replace tensors by others of their shapes."""
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = torch.zeros_like(value)


def put_whole(parameters: Parameters, optimizer: Optimizer) -> None:
    """Replace the state of one parameter by tensors of its shape, and of others."""
    parameter = parameters[2]
    optimizer.state[parameter] = {
        key: torch.tensor(5.0) if key == "step" else parameter.detach().abs() + place
        for place, key in enumerate(list(optimizer.state[parameter]))
    }


def shift(parameters: Parameters, optimizer: Optimizer) -> None:
    """Put a tensor in place of another one, and zeros in its place."""
    for state in optimizer.state.values():
        state["max_exp_avg_sq"] = state["exp_avg_sq"]
        state["exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])


def multiply(parameters: Parameters, optimizer: Optimizer) -> None:
    for parameter in parameters:
        parameter.data.mul_(0.9)


def move(parameters: Parameters, optimizer: Optimizer) -> None:
    for parameter in parameters:
        parameter.data = parameter.data * 0.9


def restride(parameters: Parameters, optimizer: Optimizer) -> None:
    """Give matrices another memory format, whose state is cut."""
    for parameter in parameters:
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().clone(memory_format=torch.contiguous_format).t()


def evaluate_on_root(parameters: Parameters, optimizer: Optimizer) -> None:
    """Rank 0 alone evaluates with other weights: written in place, and in memory of their own."""
    for parameter in parameters if hvd.rank() == 0 else ():
        kept = parameter.data.clone()
        parameter.data.zero_()
        parameter.data.copy_(kept)
        parameter.data = torch.ones_like(kept)
        parameter.data = kept


def be_sharpness_aware(parameters: Parameters, optimizer: Optimizer) -> None:
    """Go up along the gradient, and back, by subtraction or to memory of its own."""
    before = [parameter.data.clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=0.1)
    for index, (old, parameter) in enumerate(zip(before, parameters, strict=True)):
        if index % 2:
            parameter.data = old
        else:
            parameter.data.sub_(parameter.grad, alpha=0.1)


def set_rate(parameters: Parameters, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def begin_momentum(parameters: Parameters, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["momentum"] = 0.9 - group["momentum"]


def lack_first_gradients(parameters: Parameters, optimizer: Optimizer) -> None:
    for parameter in parameters[:2]:
        parameter.grad = None


def add_group(parameters: Parameters, optimizer: Optimizer) -> None:
    torch.manual_seed(5)
    added = nn.Linear(50, 60)
    optimizer.zero_grad()
    optimizer.add_param_group({"params": added.parameters(), "lr": 0.3})
    (added(torch.ones(1, 50)).sum() * (hvd.rank() + 1)).backward()


def clear_and_multiply(parameters: Parameters, optimizer: Optimizer) -> None:
    optimizer.state.clear()
    multiply(parameters, optimizer)


Program = tuple[Callable[[Parameters, Any], object], str, Sequence[int]]
WRITES: dict[str, Program] = {
    "state.clear()": (lambda _, optimizer: optimizer.state.clear(), "adam", [2]),
    "state = {}": (
        lambda _, optimizer: setattr(optimizer, "state", defaultdict(dict)),
        "adam",
        [2],
    ),
    "state.pop(p)": (
        lambda parameters, optimizer: optimizer.state.pop(parameters[2]),
        "adam",
        [2, 3],
    ),
    "state[p].pop(key)": (pop_key, "sgd", [2]),
    "state[p] = {...}": (put_whole, "adam", [2, 3]),
    **{write.__name__: (write, "adam", [2]) for write in (zero, put_zeros, shift, add_group)},
    **{
        write.__name__: (write, "adam", range(4))
        for write in (multiply, move, be_sharpness_aware, evaluate_on_root)
    },
    "another step": (lambda parameters, _: SGD(parameters[1:3], lr=0.1).step(), "adam", range(4)),
}
PROGRAMS: dict[str, Program] = {
    **WRITES,
    "clear_and_multiply": (clear_and_multiply, "adam", [1, 2, 3]),
    "rate": (set_rate, "adam", range(4)),
    "momentum": (begin_momentum, "sgd", [0, 2]),
    "no gradients": (lack_first_gradients, "adam", [0, 1]),
    "strides": (restride, "adam", [2]),
    "load": (
        lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        "adam",
        [1, 3],
    ),
    "broadcast": (
        lambda _, optimizer: hvd.broadcast_optimizer_state(optimizer, hvd.size() - 1),
        "adam",
        [1, 3],
    ),
    **{maker: (lambda *_: None, maker, ()) for maker in MAKERS},
}


def train_beside_unsharded(names: Sequence[str], compiled: bool = False, **options: Any) -> None:
    """Compare with an unsharded optimizer beside which the program does the same."""
    for name in names:
        do, maker, when = PROGRAMS[name]
        models = make_model(maker), make_model(maker)
        optimizers = plain(models[0], maker, **options), sharded(models[1], maker, **options)
        takes = [optimizer.step for optimizer in optimizers]
        if compiled:
            takes[1] = torch.compile(
                lambda sharding=optimizers[1]: sharding.step(), backend="eager"
            )
        for number, batch in enumerate(joined_batches(4)):
            for model, optimizer, take in zip(models, optimizers, takes, strict=True):
                optimizer.zero_grad()
                loss_of(model, part(batch)).backward()
                if number in when:
                    do(list(model.parameters()), optimizer)
                take()
            assert_equal(models[1], models[0], f"{name}, step {number}")
        process_set = options.get("process_set", hvd.global_process_set)
        is_one_of_several = hvd.size() > 1 and process_set.included()
        assert optimizers[1]._shards.is_active == is_one_of_several
        states = [optimizer.state_dict() for optimizer in optimizers]
        assert_equal_states(states[1], states[0], name)
        if not options:
            assert_same_on_all_ranks(*models[1].parameters())


@pytest.mark.parametrize(("transport", "size"), [("shm", 1), ("shm", 4), ("tcp", 2)])
def test_bits_are_those_of_an_unsharded_optimizer(transport: str, size: int) -> None:
    """Of all optimizers of torch that step each tensor by itself."""
    run(train_beside_unsharded, size, args=(list(MAKERS),), transport=transport)


@on_shm_and_slowly_on_tcp
def test_what_a_program_does_counts_as_without(transport: str) -> None:
    args, env = (sorted(PROGRAMS.keys() - MAKERS.keys()),), {"TORCH_RING_CHECK_EVERY": "1"}
    run(train_beside_unsharded, 3, args=args, transport=transport, env=env)


@on_both_transports
@on_ranks(3)
def test_process_sets(transport) -> None:
    train_beside_unsharded(["adam"], process_set=hvd.add_process_set([0, 2]))


def train_on_hosts() -> list[int]:
    hvd.init()
    train_beside_unsharded(list(WRITES))
    shards = sharded(make_model())._shards
    hvd.shutdown()
    assert shards.is_shared
    return list(shards._owners)


@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` (iproute2)")
@pytest.mark.slow
def test_each_host_has_a_whole_copy(hosts: list[str]) -> None:
    found = run(
        train_on_hosts,
        4,
        initialized=False,
        transport="",
        env={"MASTER_ADDR": f"{namespaces.NETWORK}.1", "MASTER_PORT": "29513"},
        namespaces=[hosts[host] for host in (0, 0, 1, 2)],
        deadline_s=3 * DEADLINE_S,
    )
    assert found == [[0, 1], [0, 1], [2], [3]]


class OtherOrder(set[Any]):
    """A set in the order that it has in a process with another PYTHONHASHSEED."""

    @staticmethod
    def intersection(*sets: set[Any]) -> OtherOrder:
        return OtherOrder(set.intersection(*sets))

    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


def cannot_open_memory() -> Any:
    return mock.patch.object(Segment, "open", side_effect=OSError("another container"))


def have_no_page_table() -> Any:
    return mock.patch.object(os, "preadv", side_effect=PermissionError)


def have_other_hashes() -> Any:
    return mock.patch.object(sharded_state, "set", OtherOrder, create=True)


@pytest.mark.parametrize(
    ("of_a_rank", "names", "is_shared"),
    [
        (cannot_open_memory, ["add_group"], False),
        (have_no_page_table, ["multiply", "zero"], True),
        (have_other_hashes, ["clear_and_multiply"], True),
    ],
)
@on_ranks(2)
def test_unusual_surroundings(
    of_a_rank: Callable[[], Any], names: list[str], is_shared: bool
) -> None:
    """One rank lives in unusual surroundings."""
    with of_a_rank() if hvd.rank() == 1 else contextlib.nullcontext():
        train_beside_unsharded(names)
        assert sharded(make_model())._shards.is_shared == is_shared


def test_a_compiled_step() -> None:
    run(train_beside_unsharded, 2, args=(["adam"], True))


# --- the parts


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_parts_are_balanced_and_cover_all(ranks: int) -> None:
    sizes = [(3, 4), (1_000_000, 4), (0, 4), (50_000, 2), (400_000, 8), *[(5_000, 4)] * 30]
    for may_cut in (True, False):
        parts = plan_parts(sizes, ranks, may_cut=may_cut)
        for index, (numel, _) in enumerate(sizes):
            mine = [each for each in parts if each.parameter == index]
            edges = [0, *(each.end for each in mine)]
            assert [each.begin for each in mine] == edges[:-1]
            assert edges[-1] == numel
            assert all(each.is_whole for each in mine) == (len(mine) == 1)
            assert may_cut or len(mine) == 1
            assert all(each.begin % 1024 == 0 for each in mine)
        assert [p.owner for p in parts] == sorted(p.owner for p in parts)
        loads = [
            sum((p.end - p.begin) * sizes[p.parameter][1] for p in parts if p.owner == rank)
            for rank in range(ranks)
        ]
        assert not may_cut or max(loads) <= sum(loads) / ranks * (1 + 1 / 16) + 2 * 1024 * 8


def test_small_tensors_are_not_cut() -> None:
    """The border between two ranks' fair parts lies in the small one."""
    parts = plan_parts([(300_000, 4), (4_000, 4), (300_000, 4)], 2, may_cut=True)
    assert [(p.parameter, p.begin, p.owner) for p in parts] == [(0, 0, 0), (1, 0, 1), (2, 0, 1)]


def write_and_copy() -> None:
    """A rank's writes are its own until a step, and copies have memory of their own."""
    model, optimizer = trained()
    parameter, exp_avg = model[2].weight, optimizer.state[model[2].weight]["exp_avg"]
    copied, state = copy.deepcopy(model), copy.deepcopy(optimizer).state_dict()
    assert_equal_states(state, optimizer.state_dict())
    if hvd.rank() == 1:
        with torch.no_grad():
            parameter.fill_(7.0)
            exp_avg.fill_(7.0)
    hvd.barrier()
    is_mine = hvd.rank() == 1
    assert (parameter == 7.0).all() == (exp_avg == 7.0).all() == is_mine
    assert not (copied[2].weight == 7.0).any()
    assert not (state["state"][2]["exp_avg"] == 7.0).any()
    assert parameter.untyped_storage().nbytes() == parameter.nbytes  # torch.save() saves it all


def warn() -> None:
    """Rank 0 warns of views of parameters."""
    model, own = make_model(), nn.Parameter(torch.zeros(3000))
    view, memory = own.detach()[:5], torch.zeros(3001)
    optimizer = MAKERS["adam"]([*model.parameters(), own])
    where = "other tensors lie where parameters [6] of the optimizer do"
    with logged() as log:
        hvd.DistributedOptimizer(optimizer, shard_state=True)
    assert (where in " ".join(log)) == (hvd.rank() == 0), log
    assert len(view) == 5
    for is_view in (False, True):
        model[0].weight.data = model[0].weight.data * 0.5
        own.data = memory[1:] if is_view else own.data * 0.5
        with logged() as log:
            step(model, optimizer, joined_batches(1)[0])
        assert (where in " ".join(log)) == (is_view and hvd.rank() == 0), log


def fork_workers() -> None:
    """Forked workers see the weights, and write to their own."""
    model, optimizer = trained()
    weight = model[2].weight
    for _ in range(2):
        before = weight.detach().clone()
        worker = os.fork()
        if worker == 0:
            is_seen = torch.equal(weight, before)
            weight.data.zero_()
            os._exit(0 if is_seen else 1)
        assert os.waitpid(worker, 0)[1] == 0
        assert torch.equal(weight, before)
        step(model, optimizer, joined_batches(1)[0])


@pytest.mark.parametrize("look", [write_and_copy, warn, fork_workers])
def test_shared_memory(look: Callable[[], None]) -> None:
    run(look, 2)


def look_at_divided_state() -> None:
    model, optimizer = trained()
    whole = optimizer.state_dict()["state"]
    numbers = torch.zeros(hvd.size())
    for index, parameter in enumerate(model.parameters()):
        state = optimizer.state[parameter]
        assert list(state) == list(whole[index])
        value, memory = state["exp_avg"], flat(whole[index]["exp_avg"])
        assert torch.equal(hvd.allgather(flat(value.as_subclass(Tensor))), memory)
        numbers[hvd.rank()] += value.numel()
        if 0 < value.numel() < parameter.numel():
            for use in (lambda part=value: part[0], lambda part=value: part.__setitem__(0, 1.0)):
                expect_error("InvalidArgumentError", "has no rows", use)
    assert hvd.allreduce(numbers, op=hvd.Sum).max() < 0.6 * sum(
        p.numel() for p in model.parameters()
    )
    text = "copy its state_dict(), on all"
    expect_error("InvalidArgumentError", text, lambda: copy.deepcopy(optimizer))
    text = "only where the ranks of a host share memory"
    expect_error("ValueError", text, lambda: hvd.elastic.TorchState(model, optimizer))


def put_what_cannot_be_divided() -> None:
    model, optimizer = trained()
    if hvd.rank() == 0:
        optimizer.state[model[2].weight]["exp_avg"] = torch.zeros(7, 7)
    own = "optimizer.state has a tensor of shape [7, 7] as 'exp_avg' of parameter 2"
    text = own if hvd.rank() == 0 else "rank 0 cannot"
    for use in (optimizer.step, optimizer.state_dict):
        expect_error("InvalidArgumentError", text, use)


@pytest.mark.parametrize("look", [look_at_divided_state, put_what_cannot_be_divided])
def test_without_shared_memory_each_rank_has_the_state_of_its_part(
    look: Callable[[], None],
) -> None:
    run(look, 2, transport="tcp")


def save_and_load(path: str) -> None:
    """Training continues exactly: from a checkpoint, and as in Horovod, from rank 0's state."""
    batches = joined_batches(4)
    model, reference = make_model(), make_model()
    optimizer, other = sharded(model), plain(reference)
    for batch in batches[:2]:
        step(model, optimizer, batch)
        step(reference, other, batch)
    state = optimizer.state_dict(root_rank=1)
    assert bool(state["state"]) == (hvd.rank() == 1)
    checkpoint.save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    saved = checkpoint.load(path)
    assert_equal_states(saved["optimizer"], other.state_dict())
    resumed, fresh, told = (make_model(seed=seed) for seed in (9, 8, 3))
    told_by = sharded(told)
    step(told, told_by, batches[0])
    for each in (resumed, fresh, *([told] if hvd.rank() == 0 else [])):
        each.load_state_dict(saved["model"])
    resumed_by = sharded(resumed)
    resumed_by.load_state_dict(saved["optimizer"])
    fresh_by = MAKERS["adam"](fresh.parameters())
    fresh_by.load_state_dict(copy.deepcopy(saved["optimizer"]))
    hvd.DistributedOptimizer(fresh_by, shard_state=True)  # with a state
    if hvd.rank() == 0:
        told_by.load_state_dict(copy.deepcopy(saved["optimizer"]))
    hvd.broadcast_parameters(told.state_dict(), 0)
    hvd.broadcast_optimizer_state(told_by, 0)
    every = {"resumed": (resumed, resumed_by), "fresh": (fresh, fresh_by), "told": (told, told_by)}
    for batch in batches[2:]:
        step(reference, other, batch)
        for name, (each, by) in every.items():
            step(each, by, batch)
            assert_equal(each, reference, name)
    assert_equal_states(told_by.state_dict(), other.state_dict())


@on_both_transports
def test_checkpoints_are_those_of_an_unsharded_optimizer(transport: str, tmp_path: Path) -> None:
    run(save_and_load, 3, args=(str(tmp_path / "checkpoint.pt"),), transport=transport)


@on_ranks(2)
def test_no_rank_writes_while_another_may_read(tmp_path) -> None:
    """Rank 0 reads the parameters, in a hook of its step, while rank 1 waits to write its part."""
    waits = tmp_path / "rank 1 waits"
    model, optimizer = trained()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    seen: list[bool] = []

    def look(*_: object) -> None:
        assert eventually(waits.exists)
        seen.extend(map(torch.equal, before, model.parameters()))

    thread = threading.Thread(target=lambda: eventually(has_asked) and waits.touch())
    if hvd.rank() == 0:
        optimizer.register_step_pre_hook(look)
    else:
        thread.start()
    optimizer.step()
    if hvd.rank() == 0:
        assert seen == [True] * len(before)
    else:
        thread.join()
    assert not any(map(torch.equal, before, model.parameters()))


# --- errors


class Own(SGD):
    """An optimizer not known to be elementwise."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Renamed(SGD):
    """An optimizer that steps as SGD does."""


@on_ranks(2)
def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    cases: list[tuple[Callable[..., Optimizer], dict[str, Any], str]] = [
        (torch.optim.LBFGS, {}, "LBFGS is none of the optimizers that step each tensor"),
        (partial(Own, lr=0.1), {}, "Own is none of the optimizers that step each tensor"),
        (partial(Adam, differentiable=True), {}, "a step of differentiable=True"),
        (Adam, {"op": hvd.Adasum}, "shard_state=True does not go with op=Adasum"),
    ]
    for make, options, text in cases:
        optimizer = make(make_model().parameters())
        call = partial(hvd.DistributedOptimizer, optimizer, shard_state=True, **options)
        expect_error("ValueError", text, call)
        hvd.DistributedOptimizer(optimizer)  # it is unchanged
    model = make_model()
    model[2].weight.data = torch.zeros(1, 100).expand(77, 100)
    expect_error("ValueError", "which do not fill its memory", partial(sharded, model))
    hvd.DistributedOptimizer(Renamed(make_model().parameters(), lr=0.1), shard_state=True)
    make = (sharded, plain)[hvd.rank()]
    expect_error("MismatchError", "shard_state=True; rank 1", lambda: make(make_model()))


def refuse_steps() -> None:
    """Ranks that step differently cause an error on all ranks, and no parameter changes."""
    model, optimizer = trained()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def refused(kind: str, text: str) -> None:
        expect_error(kind, text, optimizer.step)
        assert all(map(torch.equal, model.parameters(), before))

    optimizer.param_groups[0]["lr"] = 0.01 + hvd.rank()
    refused("MismatchError", "the ranks step differently: rank 0: 'lr' of group 0 is 0.01; rank 1")
    optimizer.param_groups[0]["lr"] = 0.01
    kept = model[0].bias.grad
    if hvd.rank() == 1:
        model[0].bias.grad = None
    refused("MismatchError", "rank 1: parameters [1] of the optimizer have no gradient")
    model[0].bias.grad = kept
    if hvd.rank() == 1:
        model[0].bias.grad = kept.to_sparse()
    refused("InvalidArgumentError", "is sparse" if hvd.rank() == 1 else "rank 1 cannot step")
    model[0].bias.grad = kept
    own = optimizer.param_groups[0]["params"]
    if hvd.rank():
        optimizer.param_groups[0]["params"] = own[1:]
    refused("InvalidArgumentError", "moved" if hvd.rank() else "2 ranks cannot step")
    optimizer.param_groups[0]["params"] = own
    if hvd.rank() == 1:
        optimizer.load_state_dict(copy.deepcopy(MAKERS["adam"](model.parameters()).state_dict()))
    refused("MismatchError", "'step' of parameter 0 in optimizer.state is taken out")


def convert_differently() -> None:
    """The ranks give a weight other strides."""
    model, optimizer = trained()
    weight = model[2].weight
    weight.data = weight.data.clone() if hvd.rank() else weight.data.clone().contiguous()
    kind, text = error_of(optimizer.step)
    told = {
        "MismatchError": "ranks 0 and 1 have parameters of other shapes, strides or dtypes now",
        "InvalidArgumentError": "1 of 3 ranks have given parameters other memory",
    }
    assert told[kind] in text, text


def fail_on_one_rank() -> None:
    _, optimizer = trained()
    if hvd.rank() == 1:
        for state in optimizer._shards._state.values():
            state["exp_avg"] = "no tensor"
        with pytest.raises((AttributeError, TypeError)):
            optimizer.step()
    else:
        expect_error("RingError", "1 other ranks have failed to step their parts", optimizer.step)


def join_early() -> None:
    """A rank that has joined cannot step its part."""
    _, optimizer = trained()
    if hvd.rank() < 2:
        expect_error("InvalidArgumentError", "1 ranks have called join()", optimizer.step)
    hvd.join()


@pytest.mark.parametrize("case", [refuse_steps, convert_differently, fail_on_one_rank, join_early])
@on_both_transports
def test_a_step_that_fails_on_one_rank_fails_on_all(
    transport: str, case: Callable[[], None]
) -> None:
    run(case, 3, transport=transport)


@on_both_transports
@on_ranks(3)
def test_a_write_of_one_rank_is_an_error_on_all(transport) -> None:
    """One rank writes alone: an error on all ranks, no step, and the cure works."""
    models = make_model(), make_model()
    optimizer, other = sharded(models[1]), plain(models[0])
    parameter, batches = models[1][2].weight, iter(joined_batches(6))
    is_shared = optimizer._shards.is_shared

    def replaced() -> None:
        state = optimizer.state[parameter]
        state["exp_avg"] = torch.ones_like(state["exp_avg"])

    def in_place() -> None:
        optimizer.state[parameter]["exp_avg"].add_(1)

    def step_again() -> None:
        optimizer.step()
        step(models[0], other, batch)
        assert_equal(models[1], models[0])

    def refused(write: Callable[[], Any], text: str) -> None:
        optimizer.zero_grad()
        loss_of(models[1], part(batch)).backward()
        if hvd.rank() == 1:
            write()
        message = expect_error("MismatchError", text, optimizer.step)
        assert "rank 0: nothing more; rank 1: " in message, message
        assert "write the same on all of them" in message

    batch = next(batches)
    for model, by in zip(models, (other, optimizer), strict=True):
        step(model, by, batch)
    where = "'exp_avg' of parameter 2 in optimizer.state is"
    writes: list[tuple[Callable[[], Any], str]] = [
        (lambda: optimizer.state[parameter].pop("exp_avg"), f"{where} taken out"),
        (replaced, f"{where} written"),
    ]
    if is_shared:  # elsewhere each rank has weights of its own
        writes += [
            (in_place, f"{where} written"),
            (lambda: parameter.data.mul_(0.5), "parameter 2 is written"),
            (lambda: setattr(parameter, "data", parameter * 0.5), "parameter 2 is written"),
        ]
    for write, text in writes:
        batch = next(batches)
        refused(write, text)
        hvd.broadcast_parameters(models[1].state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        step_again()
    if is_shared:
        return
    saved = optimizer.state_dict()
    refused(in_place, f"{where} changed in place")
    text = "rank 1 has changed its part of the state, which no other"
    broadcast = partial(hvd.broadcast_optimizer_state, optimizer, 0)
    expect_error("InvalidArgumentError", text, broadcast)
    optimizer.load_state_dict(saved)
    step_again()
