# SPDX-License-Identifier: Apache-2.0
"""verify_consistency and TORCH_RING_CHECK_EVERY: the first difference, and its place."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from closed_form import MOVED, patterned
from on_ranks import on_ranks
from pool import error_of, expect_error, run
from torch import nn
from torch.optim import SGD, Adam

import torch_ring as hvd


class Model(nn.Module):
    """Parameters and buffers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 1))
        self.frozen = nn.Parameter(torch.arange(5), requires_grad=False)
        self.columns = nn.Parameter(torch.randn(40, 30)[:, ::3])
        self.register_buffer("order", torch.randperm(2000), persistent=False)
        self.register_buffer("scalar", torch.tensor(3.0))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("nowhere", torch.zeros(3, device="meta"))
        for dtype in MOVED:
            name = "of_" + str(dtype).removeprefix("torch.")
            self.register_buffer(name, patterned(0, (300, 5), dtype, "cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.columns.sum()


def change(what: str, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Change one thing, so little that a coarse comparison would miss it."""
    first = model.body[0].weight
    if what == "bit":
        first.data.view(-1).view(torch.uint8)[4321] ^= 128
    elif what == "column":
        model.columns.data[7, 2] += 1
    elif what == "order":
        model.order[[3, 4]] = model.order[[4, 3]]
    elif what == "scalar":
        model.scalar += 1
    elif what == "sparse":
        model.sparse = 2 * model.sparse
    elif what == "float8":
        model.of_float8_e5m2.view(torch.uint8)[299, 4] ^= 1
    elif what == "dtype":
        model.body[2].double()
    elif what == "shape":
        model.register_buffer("scalar", torch.tensor([3.0]))
    elif what == "name":
        model.register_buffer("more", torch.zeros(1))
    elif what == "momentum":
        optimizer.state[first]["momentum_buffer"][0, 0] += 1e-3
    elif what == "state":
        del optimizer.state[first]["momentum_buffer"]
    elif what == "rate":
        optimizer.param_groups[0]["lr"] *= 1 + 1e-15


CHANGES = {
    "bit": "parameter 'body.0.weight' on {} (float32 [300, 8], digest ",
    "column": "parameter 'columns' on {} (float32 [40, 10], digest ",
    "order": "buffer 'order' on {} (int64 [2000], digest ",
    "scalar": "buffer 'scalar' on {} (float32 [], digest ",
    "sparse": "buffer 'sparse' on {} (float32 [3, 3], digest ",
    "float8": "buffer 'of_float8_e5m2' on {} (float8_e5m2 [300, 5], digest ",
    "dtype": "parameter 'body.2.weight' on {} (float64 [1, 300], digest ",
    "shape": "buffer 'scalar' on {} (float32 [1], digest ",
    "name": "buffer 'more' on {} (",
    "momentum": "state 'momentum_buffer' of 'body.0.weight' on {} (float32 [300, 8], digest ",
    "state": "state 'momentum_buffer' of 'body.0.weight' on {} (there is none) ",
    "rate": "'lr' of group 0 on {} (",
}


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_the_first_difference_is_named_on_all_ranks(size) -> None:
    rank = hvd.rank()
    for number, (what, expected) in enumerate(CHANGES.items()):
        odd = number % size if size > 2 else 1
        model = Model()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        hvd.verify_consistency(model, optimizer)
        if rank == odd:
            change(what, model, optimizer)
        call = partial(hvd.verify_consistency, model, optimizer)
        text = expect_error("MismatchError", expected.format(f"rank {odd}"), call)
        same = [str(r) for r in range(size) if r != odd]
        assert f") is not that on rank{'s' * (size > 2)} {', '.join(same)} (" in text
        assert text.startswith(f"rank {rank}: the ranks are not consistent: ")
        assert " broadcast_" in text
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_equal_values_are_consistent(size) -> None:
    """Other strides or storage, NaNs and a world of one rank are no difference."""
    hvd.verify_consistency(Model())
    model = nn.Linear(30, 40, bias=False)
    values = torch.arange(1200.0).view(40, 30)
    values[3, 4] = float("nan")
    is_odd = hvd.rank() % 2
    model.weight = nn.Parameter(values.t().contiguous().t() if is_odd else values)
    hvd.verify_consistency(model)
    apart = torch.zeros(1201)[1:].view(40, 30) if is_odd else torch.zeros(40, 30)
    model.weight = nn.Parameter(apart)
    hvd.verify_consistency(model, Adam(model.parameters()))
    words = "verify_consistency takes a torch.nn.Module, not "
    for wrong in (model.weight, None, {}):
        expect_error("InvalidArgumentError", words, partial(hvd.verify_consistency, wrong))
    assert error_of(lambda: hvd.verify_consistency(model, model))[0] == "InvalidArgumentError"


@on_ranks(3)
def test_a_process_set_compares_itself() -> None:
    pair = hvd.add_process_set([0, 2])
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float(hvd.rank() == 1))
    nn.init.zeros_(model.bias)
    if hvd.rank() != 1:
        hvd.verify_consistency(model, process_set=pair)
        nn.init.constant_(model.weight, float(hvd.rank()))
        call = partial(hvd.verify_consistency, model, process_set=pair)
        expect_error("MismatchError", "parameter 'weight' on rank 2 (", call)


def train(op: hvd.ReduceOp, change_at: int, joins: bool) -> list[str]:
    """Train; rank 1 changes a weight before a step. Return the errors of all steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 30), nn.Linear(30, 1))
    optimizer = hvd.DistributedOptimizer(
        SGD(model.parameters(), lr=0.01, momentum=0.9), model.named_parameters(), op=op
    )
    errors = []
    steps = 7 if joins and hvd.rank() == 1 else 8
    for index in range(1, steps + 1):
        if index == change_at and hvd.rank() == 1:
            model[1].bias.data += 1
        optimizer.zero_grad()
        model(torch.ones(2, 4) * (hvd.rank() + 1)).sum().backward()
        errors.append(error_of(optimizer.step)[1])
    if joins:
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    return errors


@pytest.mark.parametrize(("op", "transport"), [(hvd.Average, "tcp"), (hvd.Adasum, "shm")])
def test_every_third_step_is_checked(op, transport):
    env = {"TORCH_RING_CHECK_EVERY": "3"}
    words = "after step 6: the ranks are not consistent: parameter '1.bias' on rank 1"
    for errors in run(train, 2, args=(op, 5, False), env=env, transport=transport):
        assert [bool(error) for error in errors] == [False] * 5 + [True] + [False] * 2
        assert words in errors[5]


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_ranks_that_have_joined_are_not_compared(op):
    for errors in run(train, 2, args=(op, 0, True), env={"TORCH_RING_CHECK_EVERY": "2"}):
        assert not any(errors)


def test_no_step_is_checked_by_default():
    for errors in run(train, 2, args=(hvd.Average, 5, False)):
        assert not any(errors)
