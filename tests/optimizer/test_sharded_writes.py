"""shard_state=True: what a program writes to parameters and optimizer.state counts as without."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from pool import DEADLINE_S, expect_error, run
from test_sharded_state import (
    assert_equal,
    assert_equal_states,
    make_model,
    plain,
    sharded,
    step,
    train_beside_unsharded,
    with_gradients,
)
from training import joined_batches, loss_of, part
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.optimizer.host_memory import Segment


def write_on_one_rank() -> None:
    """One rank writes alone: an error on all ranks, no step, and the cure works."""
    models = make_model(), make_model()
    optimizer, other = sharded(models[1]), plain(models[0])
    parameters, batches = list(models[1].parameters()), iter(joined_batches(20))
    parameter, is_shared = parameters[2], optimizer._shards.is_shared

    def replaced() -> None:
        state = optimizer.state[parameter]
        state["exp_avg"] = torch.ones_like(state["exp_avg"])

    def in_place() -> None:
        optimizer.state[parameter]["exp_avg"].add_(1)

    writes: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: optimizer.state.pop(parameter),
            "'step' of parameter 2 in optimizer.state is taken out",
        ),
        (
            lambda: optimizer.state[parameter].pop("exp_avg"),
            "'exp_avg' of parameter 2 in optimizer.state is taken out",
        ),
        (replaced, "'exp_avg' of parameter 2 in optimizer.state is written"),
    ]
    if is_shared:  # elsewhere each rank has weights of its own
        writes += [
            (in_place, "'exp_avg' of parameter 2 in optimizer.state is written"),
            (lambda: parameter.data.mul_(0.5), "parameter 2 is written"),
            (lambda: setattr(parameter, "data", parameter * 0.5), "parameter 2 is written"),
        ]
    batch = next(batches)
    for model, by in zip(models, (other, optimizer), strict=True):
        step(model, by, batch)
    for write, text in writes:
        before = [parameter.detach().clone() for parameter in parameters]
        batch = next(batches)
        optimizer.zero_grad()
        loss_of(models[1], part(batch)).backward()
        if hvd.rank() == 1:
            write()
        message = expect_error("MismatchError", text, optimizer.step)
        assert "rank 0: nothing more; rank 1: " in message, message
        assert "write the same on all of them" in message
        if hvd.rank() == 0:
            assert all(map(torch.equal, before, parameters))
        hvd.broadcast_parameters(models[1].state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        optimizer.step()
        step(models[0], other, batch)
        assert_equal(models[1], models[0])
    saved = optimizer.state_dict()
    assert_equal_states(saved, other.state_dict())
    if is_shared:
        return
    if hvd.rank() == 1:
        in_place()
    optimizer.zero_grad()
    loss_of(models[1], part(batch)).backward()
    text = "'exp_avg' of parameter 2 in optimizer.state is changed in place"
    expect_error("MismatchError", text, optimizer.step)
    text = "rank 1 has changed its part of the state, which no other"
    broadcast = partial(hvd.broadcast_optimizer_state, optimizer, 0)
    expect_error("InvalidArgumentError", text, broadcast)
    optimizer.load_state_dict(saved)
    optimizer.step()
    step(models[0], other, batch)
    assert_equal(models[1], models[0])


@on_both_transports
def test_a_write_of_one_rank_is_an_error_on_all(transport: str) -> None:
    run(write_on_one_rank, 3, transport=transport)


def compile_step() -> None:
    models = make_model(), make_model()
    optimizers = plain(models[0]), sharded(models[1])
    steps = optimizers[0].step, torch.compile(lambda: optimizers[1].step(), backend="eager")
    for batch in joined_batches(3):
        for model, optimizer, take in zip(models, optimizers, steps, strict=True):
            optimizer.zero_grad()
            loss_of(model, part(batch)).backward()
            take()
        assert_equal(models[1], models[0])


def convert() -> None:
    """The weights change their memory format, whose state is cut: it is not mixed up."""
    models = [torch.nn.Sequential(torch.nn.Conv2d(16, 64, 3), torch.nn.Conv2d(64, 9, 3))]
    models.append(copy.deepcopy(models[0]))
    hvd.broadcast_parameters(models[0].state_dict(), 0)
    models[1].load_state_dict(models[0].state_dict())
    optimizers = plain(models[0]), sharded(models[1])
    torch.manual_seed(hvd.rank())
    for number in range(4):
        batch = torch.randn(2, 16, 8, 8)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            if number == 2:
                model.to(memory_format=torch.channels_last)
            for place, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, place) + parameter * batch.sum()
            optimizer.step()
        assert_equal(models[1], models[0])
    hvd.verify_consistency(models[1], optimizers[1])


@on_both_transports
def test_a_model_in_another_memory_format_keeps_its_state(transport: str) -> None:
    run(convert, 2, transport=transport, env={"TORCH_RING_CHECK_EVERY": "1"})


def put_what_cannot_be_divided() -> None:
    model, optimizer = with_gradients()
    if hvd.rank() == 0:
        optimizer.state[model[2].weight]["exp_avg"] = torch.zeros(7, 7)
    own = "optimizer.state has a tensor of shape [7, 7] as 'exp_avg' of parameter 2"
    text = own if hvd.rank() == 0 else "rank 0 cannot"
    for use in (optimizer.step, optimizer.state_dict):
        expect_error("InvalidArgumentError", text, use)


def test_a_value_that_cannot_be_divided_is_an_error_on_all_ranks() -> None:
    run(put_what_cannot_be_divided, 2, transport="tcp")


def have_no_page_table() -> None:
    """Without /proc/self/pagemap all pages are compared."""
    opened = os.open

    def open_other(path: Any, *args: Any, **more: Any) -> int:
        if path == "/proc/self/pagemap":
            raise PermissionError(path)
        return opened(path, *args, **more)

    os.open = open_other  # type: ignore[assignment]
    try:
        train_beside_unsharded(["multiply", "zero adam", "Average"])
    finally:
        os.open = opened


def grow_divided() -> None:
    """Ranks of a host that cannot open each other's memory divide their state anew."""
    models = make_model(), make_model()
    refused = mock.patch.object(Segment, "open", side_effect=OSError("of another container"))
    with refused:
        optimizers = plain(models[0]), sharded(models[1])
        for number, batch in enumerate(joined_batches(4)):
            for model, optimizer in zip(models, optimizers, strict=True):
                if number == 2:
                    torch.manual_seed(5)
                    model.append(torch.nn.Linear(3, 3))
                    optimizer.add_param_group({"params": model[-1].parameters(), "lr": 0.3})
                step(model, optimizer, batch)
            assert_equal(models[1], models[0])
    assert_equal_states(optimizers[1].state_dict(), optimizers[0].state_dict())
    assert not optimizers[1]._shards.is_shared


@pytest.mark.parametrize("case", [compile_step, have_no_page_table, grow_divided])
def test_unusual_surroundings(case: Callable[[], None]) -> None:
    run(case, 2, deadline_s=3 * DEADLINE_S)
