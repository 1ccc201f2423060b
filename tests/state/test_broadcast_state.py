# SPDX-License-Identifier: Apache-2.0
"""broadcast_parameters(), broadcast_buffers(), broadcast_optimizer_state(): ranks become equal."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from pool import error_of, run
from torch import nn
from torch.optim import Optimizer
from training import assert_same_on_all_ranks, joined_batches, loss_of, make_model, train
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring import state as state_module

CODES = (torch.bits8, torch.float4_e2m1fn_x2)  # neither collectives nor torch.equal() take them


class Everything(nn.Module):
    """Parameters, frozen ones, and buffers of many dtypes and layouts, whose values are a rank's.

    Its batch normalisation has seen other batches than that of another rank.
    """

    def __init__(self, value: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 4), float(value)))
        self.frozen = nn.Parameter(torch.full((2,), float(value)), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(float(value)))
        self.norm = nn.BatchNorm1d(4)
        self.again = self.norm  # buffers with two names
        dtypes = torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.float64
        for dtype in (*dtypes, torch.complex128, torch.float8_e5m2):
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(f"{name}s", torch.full((5,), value).to(dtype))
            self.register_buffer(f"transposed_{name}", torch.full((3, 2), value).to(dtype).t())
        for dtype in CODES:
            codes = torch.full((4,), value, dtype=torch.uint8)
            self.register_buffer(f"codes_{str(dtype)[6:]}", codes.view(dtype))
        image = torch.full((2, 3, 4, 4), float(value)).to(memory_format=torch.channels_last)
        self.register_buffer("image", image)
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("missing", None)
        generator = torch.Generator().manual_seed(value)
        for _ in range(value + 1):
            self.norm(torch.randn(4, 4, generator=generator))

    def get_extra_state(self) -> str:
        return "not a tensor"

    def set_extra_state(self, state: str) -> None:
        del state


def require_buffers_of(model: nn.Module, root: int) -> None:
    expected = Everything(root)
    for name, buffer in model.named_buffers():
        other = expected.get_buffer(name)
        assert (buffer.dtype, buffer.stride()) == (other.dtype, other.stride()), name
        both = [each.view(torch.uint8) if each.dtype in CODES else each for each in (buffer, other)]
        assert torch.equal(*[each.to(torch.complex128) for each in both]), name


def broadcast_parameters(collect: Callable[[nn.Module], object]) -> None:
    for root in range(hvd.size()):
        model = Everything(hvd.rank())
        before = dict(model.named_parameters())
        hvd.broadcast_parameters(collect(model), root_rank=root)
        for name, parameter in model.named_parameters():
            assert parameter is before[name]
            if not name.startswith("norm"):
                assert (parameter == root).all(), name
        assert model.weight.requires_grad
        assert model.weight.is_leaf
        if collect is state_of:
            require_buffers_of(model, root)
    with pytest.raises(ValueError, match="list of tensors"):
        hvd.broadcast_parameters(model.weight, root_rank=0)


def state_of(model: nn.Module) -> object:
    return model.state_dict()


def named_of(model: nn.Module) -> object:
    return model.named_parameters()


def list_of(model: nn.Module) -> object:
    return list(model.parameters())


@pytest.mark.parametrize("collect", [state_of, named_of, list_of])
@on_both_transports
def test_broadcast_parameters(transport, collect):
    run(broadcast_parameters, 2, args=(collect,), transport=transport)


def broadcast_buffers(root: int) -> int:
    """Return the number of broadcasts, which do not change parameters."""
    model = Everything(hvd.rank())
    model.register_buffer("unsaved", torch.full((2,), float(hvd.rank())), persistent=False)
    model.register_buffer("expanded", torch.full((4, 1), float(hvd.rank())).expand(2, 4, 3))
    before = dict(model.named_buffers())
    with mock.patch.object(state_module, "broadcast_", wraps=state_module.broadcast_) as broadcasts:
        hvd.broadcast_buffers(model, root_rank=root)
    assert all(buffer is before[name] for name, buffer in model.named_buffers())
    assert model.unsaved.unique().tolist() == model.expanded.unique().tolist() == [root]
    del model.unsaved, model.expanded
    require_buffers_of(model, root)
    assert (model.weight == hvd.rank()).all()
    hvd.broadcast_buffers(nn.Linear(2, 2), root_rank=root)  # it has none
    return broadcasts.call_count


@pytest.mark.parametrize(("size", "root"), [(1, 0), (2, 1), (3, 2)])
@on_both_transports
def test_all_ranks_get_the_roots_buffers_by_one_broadcast(transport, size, root):
    assert run(broadcast_buffers, size, args=(root,), transport=transport) == [1] * size


def models_that_differ(how: str) -> tuple[str, str]:
    model: nn.Module = nn.BatchNorm1d(4)
    if hvd.rank() == 1:
        if how == "shape":
            model = nn.BatchNorm1d(5)
        elif how == "dtype":
            model.running_var = model.running_var.double()
        elif how == "name":
            model = nn.Sequential(model)
        else:
            model = nn.Linear(2, 2)
    error = error_of(lambda: hvd.broadcast_buffers(model))
    hvd.broadcast_buffers(nn.BatchNorm1d(4))  # the job goes on
    return error


@pytest.mark.parametrize(
    ("how", "ours", "theirs"),
    [
        ("shape", "'running_mean' torch.float32 [4]", "buffer 'running_mean' torch.float32 [5]"),
        ("dtype", "'running_var' torch.float32 [4]", "buffer 'running_var' torch.float64 [4]"),
        ("name", "'running_mean' torch.float32 [4]", "buffer '0.running_mean' torch.float32 [4]"),
        ("absence", "'running_mean' torch.float32 [4]", "nothing"),
    ],
)
def test_models_that_differ_are_refused_on_every_rank(how, ours, theirs):
    expected = f"the ranks have different models: rank 0: buffer {ours}; rank 1: {theirs}"
    assert run(models_that_differ, 3, args=(how,)) == [("MismatchError", expected)] * 3


def in_a_process_set() -> list[float]:
    members = hvd.add_process_set([1, 2])
    model = nn.BatchNorm1d(1)
    model.running_mean.fill_(hvd.rank())
    if members.included():
        hvd.broadcast_buffers(model, 2, members)
        name, text = error_of(lambda: hvd.broadcast_buffers(model, 0, members))
        assert name == "InvalidArgumentError"
        assert "root_rank=0 is not in the process set [1, 2]" in text
    return model.running_mean.tolist()


def test_a_process_set_with_a_global_root():
    assert run(in_a_process_set, 3) == [[0.0], [2.0], [2.0]]


def broadcast_without_one(poorer: int) -> None:
    with pytest.raises(
        hvd.MismatchError, match=r"rank 0: parameter 'a' .*\[3\]; rank 1: parameter 'a'"
    ):
        hvd.broadcast_parameters({"a": torch.zeros(3 + hvd.rank())}, root_rank=0)
    tensors = {name: torch.full((3,), float(hvd.rank())) for name in "abc"}
    if hvd.rank() == poorer:
        del tensors["b"]
    with pytest.raises(hvd.MismatchError, match="the ranks have different parameters: rank 0: "):
        hvd.broadcast_parameters(tensors, root_rank=0)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()  # the next innocent
    tensors.pop("b", None)
    hvd.broadcast_parameters(dict(sorted(tensors.items(), reverse=hvd.rank() == 1)), root_rank=0)
    assert tensors["c"].tolist() == [0.0] * 3  # the order does not matter


@pytest.mark.parametrize("poorer", [0, 1])
def test_another_or_a_missing_parameter_is_an_error_in_that_call(poorer):
    run(broadcast_without_one, 2, args=(poorer,))


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), foreach=False),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters()),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3),
    "Muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2]),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters()),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters()),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), centered=True, momentum=0.1),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "SparseAdam": lambda m: torch.optim.SparseAdam(m.parameters()),
    "groups": lambda m: torch.optim.Adam([{"params": [p], "tag": "x"} for p in m.parameters()]),
}


def take_steps(model: nn.Module, optimizer: Optimizer) -> None:
    for batch in joined_batches(steps=2):

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            if isinstance(optimizer, torch.optim.SparseAdam):  # takes no others
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad = parameter.grad.to_sparse()
            return loss

        optimizer.step(closure)


def comparable_form(value: object) -> object:
    """Return a nested structure with types and numbers in place of tensors and values."""
    if isinstance(value, dict):
        return {key: comparable_form(item) for key, item in value.items()}
    if isinstance(value, list):
        return [comparable_form(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.dtype, value.stride(), value.tolist()
    return type(value), value


def broadcast_optimizer(name: str, root: int, wrap: bool) -> None:
    """The root has other hyper-parameters; some ranks have trained; then all ranks train alike."""
    for warm in ([root], [r for r in range(hvd.size()) if r != root], range(hvd.size()), []):
        broadcast_one_optimizer(name, root, wrap, hvd.rank() in warm)


def broadcast_one_optimizer(name: str, root: int, wrap: bool, warm: bool) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[name](model)
    if warm:
        take_steps(model, optimizer)
    if hvd.rank() == root:
        optimizer.param_groups[0]["lr"] *= 3
        optimizer.param_groups[0]["note"] = ("a tuple", None, True, 7)
    else:
        optimizer.param_groups[0]["of_another_run"] = 1
    before = [parameter.detach().clone() for parameter in model.parameters()]
    wrapped = hvd.DistributedOptimizer(optimizer) if wrap else optimizer
    hvd.broadcast_optimizer_state(wrapped, root_rank=root)
    assert all(map(torch.equal, before, model.parameters())), "no step is taken"
    group = optimizer.param_groups[0]
    assert group["note"] == ("a tuple", None, True, 7)
    fresh = OPTIMIZERS[name](make_model()).param_groups[0]["lr"]
    assert type(group["lr"]) is type(fresh)
    mine = comparable_form(optimizer.state_dict())
    assert all(other == mine for other in hvd.allgather_object(mine))
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    take_steps(model, optimizer)
    assert_same_on_all_ranks(*model.parameters())


def broadcast_on_one_rank() -> None:
    tested = {type(make(make_model())) for make in OPTIMIZERS.values()}
    known = [c for c in vars(torch.optim).values() if isinstance(c, type)]
    assert tested == {c for c in known if issubclass(c, Optimizer)} - {Optimizer}
    model = make_model()
    optimizer = OPTIMIZERS["Adam"](model)
    train(model, optimizer, joined_batches(steps=1))
    expected = optimizer.state_dict()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    torch.testing.assert_close(optimizer.state_dict(), expected)


def test_on_one_rank_nothing_changes_and_no_optimizer_of_torch_is_left_out():
    run(broadcast_on_one_rank, 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_broadcast_optimizer_state(name):
    run(broadcast_optimizer, 2, args=(name, 1, False))


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_optimizer_state_of_a_wrapped_one(root):
    run(broadcast_optimizer, 3, args=("Adam", root, True), transport="tcp")


def broadcast_without_gradients(wrap: bool) -> None:
    """As Horovod's test_broadcast_state_no_grad, whose root alone has trained."""
    used, frozen, unused = (nn.Parameter(torch.full((2, 3), 2.0)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD([used, frozen, unused], lr=0.1, momentum=0.9, nesterov=True)
    if hvd.rank() == 0:
        (3 * used).sum().backward()
        optimizer.step()
    if wrap:
        hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_parameters([used, frozen, unused], root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert frozen.grad is None
    assert used.grad.tolist() == [[3.0 * (hvd.rank() == 0)] * 3] * 2  # an existing gradient stays
    assert unused.grad.tolist() == [[0.0] * 3] * 2
    optimizer.zero_grad()
    (used * (1 + hvd.rank()) if wrap else used).sum().backward()
    assert used.grad.tolist() == [[1.5 if wrap else 1.0] * 3] * 2
    optimizer.step()
    assert unused.grad is None
    assert_same_on_all_ranks(used, frozen, unused)


@on_both_transports
@pytest.mark.parametrize("wrap", [False, True])
def test_gradients_exist_after_a_broadcast(wrap, transport):
    run(broadcast_without_gradients, 2, args=(wrap,), transport=transport)


def broadcast_different_optimizers() -> str:
    model = nn.Linear(3, 3 + hvd.rank())
    with pytest.raises(hvd.MismatchError) as error:
        hvd.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1), root_rank=0)
    return str(error.value)


def test_optimizers_of_different_models_are_refused():
    for message in run(broadcast_different_optimizers, 2):
        assert "rank 0: parameter 0 of group 0: [3, 3]; rank 1: parameter 0" in message
