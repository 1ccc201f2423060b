# SPDX-License-Identifier: Apache-2.0
"""Backward passes inside a backward pass: reentrant checkpoints."""

import os
import signal
from typing import Any

import pytest
from on_ranks import on_ranks
from oracle import Play, Program, expect_one_process
from torch import Tensor
from torch.optim import SGD
from training import joined_batches, part
from worlds import on_both_transports
from zoo import Segments

import torch_ring as hvd
from torch_ring._C import PassDecision
from torch_ring.optimizer.backward_sync import backward_sync_of


@on_both_transports
@on_ranks(2)
def test_a_nested_pass_fails(transport) -> None:
    """A nested pass fails, and the next one does not: nothing of the first remains."""
    model = Segments(again=False)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))

    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    rows = part(joined_batches(steps=1)[0]).double().requires_grad_()
    handle = model.first.weight.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model(rows, segments=True).square().mean().backward()
    handle.remove()
    optimizer.zero_grad()
    model(rows, segments=True).square().mean().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    model(rows, segments=False).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).abs().max() < 1e-10
    optimizer.step()


def interrupted(play: Play, transport: str) -> Program:
    """Rank 0 gets Ctrl-C while a pass is reduced that needs a second agreement for a part."""
    model = Segments(again=True)
    _, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.1))
    for step, rows in enumerate(play.batches(3)):
        optimizer.zero_grad()
        rows.requires_grad_()
        is_interrupted = not play.is_alone and hvd.rank() == step == 0
        if is_interrupted:
            press_ctrl_c_in_the_reduction(transport)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            model(rows, segments=not play.is_alone).square().mean().backward()
            assert not is_interrupted
        except KeyboardInterrupt:
            assert is_interrupted
        finally:
            signal.signal(signal.SIGINT, before)
        optimizer.step()
        yield model.parameters()


def press_ctrl_c_in_the_reduction(transport: str) -> None:
    reducers = backward_sync_of(hvd.global_process_set)._reducers
    reduce = reducers.reduce

    def reduce_interrupted(decision: PassDecision, *more: Any) -> None:
        reducers.reduce = reduce  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGINT)
        reduce(decision, *more)
        assert decision.has_another_round == (transport == "tcp")

    reducers.reduce = reduce_interrupted  # type: ignore[method-assign]


@on_both_transports
def test_an_interrupt_loses_no_gradient_that_comes_again(transport):
    env = {"TORCH_RING_BUCKET_BYTES": "256"}
    expect_one_process(interrupted, transport, transport=transport, env=env)
