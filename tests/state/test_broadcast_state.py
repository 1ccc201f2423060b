# SPDX-License-Identifier: Apache-2.0
"""broadcast_parameters(), broadcast_buffers(), broadcast_optimizer_state(): ranks become equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from pool import error_of, run
from slow import slow
from torch import nn
from torch.optim import Optimizer
from training import assert_same_on_all_ranks, joined_batches, loss_of, make_model, train

import torch_ring as hvd

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


@on_ranks(2)
def test_broadcast_parameters() -> None:
    for collect in (nn.Module.state_dict, nn.Module.named_parameters, list_of):
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
            if collect is nn.Module.state_dict:
                require_buffers_of(model, root)
    with pytest.raises(ValueError, match="list of tensors"):
        hvd.broadcast_parameters(model.weight, root_rank=0)


def list_of(model: nn.Module) -> object:
    return list(model.parameters())


@on_ranks(3)
def test_all_ranks_get_the_roots_buffers() -> None:
    """Parameters do not change."""
    root = 2
    model = Everything(hvd.rank())
    model.register_buffer("unsaved", torch.full((2,), float(hvd.rank())), persistent=False)
    model.register_buffer("expanded", torch.full((4, 1), float(hvd.rank())).expand(2, 4, 3))
    before = dict(model.named_buffers())
    hvd.broadcast_buffers(model, root_rank=root)
    assert all(buffer is before[name] for name, buffer in model.named_buffers())
    assert model.unsaved.unique().tolist() == model.expanded.unique().tolist() == [root]
    del model.unsaved, model.expanded
    require_buffers_of(model, root)
    assert (model.weight == hvd.rank()).all()
    hvd.broadcast_buffers(nn.Linear(2, 2), root_rank=root)  # it has none


def models_that_differ() -> list[tuple[str, str]]:
    odd: list[nn.Module] = [nn.BatchNorm1d(5), nn.BatchNorm1d(4), nn.Linear(2, 2)]
    odd[1].running_var = odd[1].running_var.double()
    odd.append(nn.Sequential(nn.BatchNorm1d(4)))  # other names
    usual = nn.BatchNorm1d(4)
    models = odd if hvd.rank() == 1 else [usual] * 4
    errors = [error_of(lambda model=model: hvd.broadcast_buffers(model)) for model in models]
    hvd.broadcast_buffers(usual)  # the job goes on
    return errors


def test_models_that_differ_are_refused_on_every_rank():
    mean, var = "buffer 'running_mean' torch.float32", "buffer 'running_var' torch.float"
    differences = [
        f"rank 0: {mean} [4]; rank 1: {mean} [5]",
        f"rank 0: {var}32 [4]; rank 1: {var}64 [4]",
        f"rank 0: {mean} [4]; rank 1: nothing",
        f"rank 0: {mean} [4]; rank 1: buffer '0.running_mean' torch.float32 [4]",
    ]
    expected = [
        ("MismatchError", f"the ranks have different models: {each}") for each in differences
    ]
    assert run(models_that_differ, 3) == [expected] * 3


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


@on_ranks(2)
def test_another_or_a_missing_parameter_is_an_error_in_that_call() -> None:
    with pytest.raises(
        hvd.MismatchError, match=r"rank 0: parameter 'a' .*\[3\]; rank 1: parameter 'a'"
    ):
        hvd.broadcast_parameters({"a": torch.zeros(3 + hvd.rank())}, root_rank=0)
    for poorer in range(2):
        tensors = {name: torch.full((3,), float(hvd.rank())) for name in "abc"}
        if hvd.rank() == poorer:
            del tensors["b"]
        with pytest.raises(hvd.MismatchError, match="the ranks have different parameters: rank 0"):
            hvd.broadcast_parameters(tensors, root_rank=0)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2  # the next innocent
    tensors.pop("b", None)
    hvd.broadcast_parameters(dict(sorted(tensors.items(), reverse=hvd.rank() == 1)), root_rank=0)
    assert tensors["c"].tolist() == [0.0] * 3  # the order does not matter


OPTIONS: dict[type[Optimizer], dict[str, Any]] = {
    torch.optim.SGD: {"momentum": 0.9, "nesterov": True},
    torch.optim.Adam: {"amsgrad": True},
    torch.optim.AdamW: {"lr": torch.tensor(0.01), "foreach": False},
    torch.optim.LBFGS: {"max_iter": 3},
    torch.optim.RMSprop: {"centered": True, "momentum": 0.1},
}


def optimizers_of_torch() -> list[type[Optimizer]]:
    kinds = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    return [kind for kind in kinds if issubclass(kind, Optimizer) and kind is not Optimizer]


def make_optimizer(kind: type[Optimizer], model: nn.Module) -> Optimizer:
    parameters = list(model.parameters())
    if kind is torch.optim.Muon:
        parameters = [parameter for parameter in parameters if parameter.dim() == 2]
    options = copy.deepcopy(OPTIONS.get(kind, {}))
    if kind is not torch.optim.Adamax:
        return kind(parameters, **options)
    return kind([{"params": [parameter], "tag": "x"} for parameter in parameters])


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


@pytest.mark.parametrize(("size", "root"), [(2, 1), slow(3, 0)])
@on_ranks()
def test_broadcast_optimizer_state(size, root: int) -> None:
    """The root has other hyper-parameters; some ranks have trained; then all ranks train alike."""
    others = [rank for rank in range(hvd.size()) if rank != root]
    for kind in optimizers_of_torch():
        for warm in ([root], others, range(hvd.size()), []):
            broadcast_one_optimizer(kind, root, hvd.rank() in warm)
    broadcast_one_optimizer(torch.optim.Adam, root, hvd.rank() == root, hvd.DistributedOptimizer)


def broadcast_one_optimizer(
    kind: type[Optimizer], root: int, warm: bool, wrap: Callable[..., Optimizer] = lambda it: it
) -> None:
    model = make_model()
    optimizer = make_optimizer(kind, model)
    if warm:
        take_steps(model, optimizer)
    if hvd.rank() == root:
        optimizer.param_groups[0]["lr"] *= 3
        optimizer.param_groups[0]["note"] = ("a tuple", None, True, 7)
    else:
        optimizer.param_groups[0]["of_another_run"] = 1
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hvd.broadcast_optimizer_state(wrap(optimizer), root_rank=root)
    assert all(map(torch.equal, before, model.parameters())), "no step is taken"
    group = optimizer.param_groups[0]
    assert group["note"] == ("a tuple", None, True, 7)
    fresh = make_optimizer(kind, make_model()).param_groups[0]["lr"]
    assert type(group["lr"]) is type(fresh)
    mine = comparable_form(optimizer.state_dict())
    assert all(other == mine for other in hvd.allgather_object(mine)), kind
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    take_steps(model, optimizer)
    assert_same_on_all_ranks(*model.parameters())


@on_ranks(1)
def test_on_one_rank_nothing_changes() -> None:
    model = make_model()
    optimizer = make_optimizer(torch.optim.Adam, model)
    train(model, optimizer, joined_batches(steps=1))
    expected = optimizer.state_dict()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    torch.testing.assert_close(optimizer.state_dict(), expected)


@pytest.mark.parametrize("wrap", [False, True])
@on_ranks(2)
def test_gradients_exist_after_a_broadcast(wrap: bool) -> None:
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


@on_ranks(2)
def test_optimizers_of_different_models_are_refused() -> None:
    model = nn.Linear(3, 3 + hvd.rank())
    with pytest.raises(hvd.MismatchError) as error:
        hvd.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1), root_rank=0)
    assert "rank 0: parameter 0 of group 0: [3, 3]; rank 1: parameter 0" in str(error.value)
