"""Fewer ranks run more backward passes a step: the global batch size stays the same."""

from __future__ import annotations

import os
from typing import Any

import pool
import pytest
import torch
from arrivals import run_with_arrivals
from mortal_training import BATCHES, GLOBAL_BATCH, Reaper, Samples, expected, make, weights_of

import torch_ring as hvd

EPOCHS = 3
AT_ONCE = 3  # samples of a rank in a pass, at most: 1, 2, 2 and 4 passes of 4, 3, 2 ranks and 1


def passes() -> int:
    return -(-GLOBAL_BATCH // hvd.size() // AT_ONCE)


def train(
    plan: dict[str, tuple[str, int]], until: int
) -> tuple[list[tuple[int, int]], list[float]]:
    """Train while ranks die, or until a process has joined.

    Args:
        plan: where processes die.
        until: the number of epochs; if no process dies, counted from the one in which one joins.

    Returns:
        The ranks, and the samples of all passes of this one, in each step; and the weights.
    """
    reaper = Reaper(*plan.get(os.environ.get("TORCH_RING_PROCESS", f"p{hvd.rank()}"), ("", 0)))
    model, optimizer = make()
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), groups=3, backward_passes_per_step=passes()
    )
    now = 0  # the pass of the step
    # After one of the buckets has been sent, and before another, if this pass sends any.
    model.weights[1].register_hook(lambda _: reaper.at(f"pass {now}"))
    sampler = hvd.elastic.ElasticSampler(Samples())
    state = hvd.elastic.TorchState(
        model, optimizer, sampler=sampler, epoch=0, end=until if plan else -1
    )
    if not plan:

        def end_soon() -> None:
            if hvd.size() == 3:  # it may need a second try
                state.end = state.epoch + until

        state.register_reset_callbacks([end_soon])
    state.register_reset_callbacks([lambda: optimizer.set_backward_passes_per_step(passes())])
    steps: list[tuple[int, int]] = []

    @hvd.elastic.run
    def go_on(state: Any) -> None:
        nonlocal now
        while state.epoch != state.end:
            share = GLOBAL_BATCH // hvd.size()
            for index, batch in enumerate(
                torch.utils.data.DataLoader(Samples(), share, sampler=sampler)
            ):
                optimizer.zero_grad()
                for now, part in enumerate(batch.tensor_split(passes())):
                    assert len(part) <= AT_ONCE
                    (model(part) / passes()).backward()
                    if now == 0 and passes() > 1:  # nothing is averaged yet
                        assert model.ledger.grad is not None
                        torch.testing.assert_close(model.ledger.grad, part.mean(0) / passes())
                optimizer.step()
                steps.append((hvd.size(), len(batch)))
                sampler.record_batch(index, len(batch))
                state.check_host_updates()
            sampler.set_epoch(state.epoch + 1)
            state.epoch += 1

    go_on(state)
    return steps, weights_of(model)


def test_the_batch_of_all_ranks_stays_when_ranks_die() -> None:
    # In the fourth step of four ranks; between the two passes of the second step of three ranks.
    plan = {"p3": ("pass 0", 4), "p1": ("pass 1", 2)}
    results = pool.run(train, 4, args=(plan, EPOCHS), may_die=[1, 3])
    for steps, weights in (results[0], results[2]):
        assert {size for size, _ in steps} == {4, 3, 2}
        assert all(size * share == GLOBAL_BATCH for size, share in steps)
        assert weights == pytest.approx(expected(EPOCHS), rel=1e-12)


def test_the_batch_of_all_ranks_stays_when_one_comes() -> None:
    results = run_with_arrivals(train, 2, 1, args=({}, 2))
    steps, weights = results[0]
    assert {size for size, _ in steps} == {2, 3}
    assert weights == pytest.approx(expected(len(steps) // BATCHES), rel=1e-12)
    assert [each for _, each in results] == [weights] * 3
