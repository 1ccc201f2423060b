# SPDX-License-Identifier: Apache-2.0
"""A state received from another rank is compared with the original."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pool
import pytest
import torch
from arrivals import run_with_arrivals
from on_ranks import on_ranks
from slow import slow_after

import torch_ring as hvd
from torch_ring.collectives import objects
from torch_ring.elastic import state

FOR_EVER = 1 << 30


def damage(part: str, times: int) -> None:
    """Damage one part of the state that this rank receives."""
    left = [times]

    def flip_a_bit(name: str | None, tensor: torch.Tensor) -> None:
        if name == part and left[0]:
            left[0] -= 1
            octets = tensor.detach().view(-1).view(torch.uint8)
            octets[len(octets) // 2] ^= 1

    def damaging(copy_from: Callable[[Any, int], None]) -> Any:
        def call(handler: state.StateHandler, root: int) -> None:
            copy_from(handler, root)
            for name, value in handler.contents().items():
                flip_a_bit(name, value)

        return call

    def broadcast(tensor: torch.Tensor, root: int, name: str | None = None, *args: Any) -> None:
        broadcast_(tensor, root, name, *args)
        flip_a_bit(name, tensor)

    for kind in (state.ModelStateHandler, state.OptimizerStateHandler):
        kind.copy_from = damaging(kind.copy_from)  # type: ignore[method-assign]
    broadcast_, objects.broadcast_ = objects.broadcast_, broadcast  # type: ignore[assignment]


class Model(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("count", torch.zeros(5))


def make_state(part: str) -> tuple[Any, Callable[[], object], Callable[[], Any]]:
    """Return a state, a step, and its tensors: those of any program, or of a training in torch."""
    common = {"step": 0, "end": -1, "text": "a" * 99}
    if part == "elastic.state":
        return hvd.elastic.ObjectState(**common), hvd.barrier, list
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(999))

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        model.count += 1.0
        sampler.record_batch(0, 1)

    def tensors() -> list[torch.Tensor]:
        momentum = [each["momentum_buffer"] for each in optimizer.state.values()]
        return [*model.state_dict().values(), *momentum]

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, **common)
    return state, step, tensors


def let_one_in(part: str, times: int) -> tuple[str, str, Any]:
    """A newcomer receives a damaged state, `times` times."""
    is_newcomer = os.environ["TORCH_RING_PROCESS"] == "p2"
    torch.manual_seed(int(is_newcomer))
    state, step, tensors = make_state(part)
    if is_newcomer:
        state.text = "b"
        damage(part, times)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step != state.end:
            if hvd.size() == 3 and state.end < 0:
                state.end = state.step + 2
            step()
            state.step += 1
            state.commit()

    kind, text = pool.error_of(lambda: train(state))
    if kind != "nothing":
        return kind, text, None
    return kind, state.text, [tensor.tolist() for tensor in tensors()]


PARTS = {
    "'weight'": "model: 'weight' on rank 2 (float32 [2, 3], digest ",
    "'count'": "model: 'count' on rank 2 (float32 [5], digest ",
    "state 'momentum_buffer' of '0.0'": (
        "optimizer: state 'momentum_buffer' of '0.0' on rank 2 (float32 [2, 3], digest "
    ),
    "elastic.optimizer": "elastic.optimizer of rank 0 (",
    "elastic.stateful": "elastic.stateful of rank 0 (",
    "elastic.attributes": "elastic.attributes of rank 0 (",
    "elastic.state": "elastic.state of rank 0 (",
}


@pytest.mark.parametrize("part", slow_after(4, reversed(PARTS)))
def test_a_newcomer_that_gets_something_else_is_an_error_on_all_ranks(part: str) -> None:
    transport = ("shm", "tcp")[list(PARTS).index(part) % 2]
    results = run_with_arrivals(let_one_in, 2, 1, args=(part, FOR_EVER), transport=transport)
    for rank, (kind, text, _) in enumerate(results):
        assert kind == "StateDamagedError", (kind, text)
        assert text.startswith(f"rank {rank}: ")
        assert "has not arrived as it was sent" in text
        assert PARTS[part] in text
        assert "on rank 2" in text


@pytest.mark.parametrize("part", ["'count'", "elastic.state"])
def test_what_is_damaged_once_is_sent_again(part: str) -> None:
    results = run_with_arrivals(let_one_in, 2, 1, args=(part, 1))
    kind, text, tensors = results[0]
    assert (kind, text) == ("nothing", "a" * 99)
    assert results == [(kind, text, tensors)] * 3


@on_ranks(2)
def test_a_rank_loses_what_the_root_has_not() -> None:
    """Additional state of a rank is no damage, such as a setting added by a scheduler: it goes."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    state.sync()
    if hvd.rank() == 1:
        optimizer.param_groups[0]["initial_lr"] = 0.3
        state.on_arrival()
    state.resume()
    assert "initial_lr" not in optimizer.param_groups[0]
