"""Planned passes on ranks that differ: late ranks, gradients of some ranks, join()."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import device_double
import pytest
import torch
from ahead_programs import Branches, planned_passes, weights_of
from ahead_training import (
    AHEAD,
    DEADLINE_S,
    PLANNED,
    Quiet,
    Training,
    is_planned,
    on_worlds,
    run_ahead_on_double,
    wait_for,
)
from logs import logged
from pool import error_of, eventually
from torch.optim import SGD
from training import assert_same_on_all_ranks

import torch_ring as hvd
from torch_ring.optimizer.backward_sync import backward_sync_of
from torch_ring.optimizer.planned_pass import Entered

pytestmark = device_double.needed


def be_late(folder: Path, device: str) -> None:
    """The last rank begins its next pass after the others have finished `AHEAD` more."""
    training = Quiet(device)
    training.steps(PLANNED + 2)
    late = hvd.size() - 1
    with planned_passes() as numbers:
        if hvd.rank() == late:
            for rank in range(late):
                wait_for(folder / str(rank))
        training.steps(AHEAD)
        if hvd.rank() != late:
            (folder / str(hvd.rank())).touch()
        training.steps(3)
    assert len(numbers) == AHEAD + 3
    training.check()


@on_worlds
def test_a_late_rank_delays_no_other_host(size, tmp_path):
    run_ahead_on_double(functools.partial(be_late, tmp_path), size)


def run_into_the_bound(folder: Path, device: str) -> None:
    """The others wait for the last rank after `AHEAD` passes, and not before."""
    training = Quiet(device)
    training.steps(PLANNED + 2)
    late = hvd.size() - 1
    mine = folder / str(hvd.rank())
    if hvd.rank() == late:
        for rank in range(late):
            wait_for(folder / f"{rank}.{AHEAD}")
        assert not eventually(lambda: any(folder.glob(f"*.{AHEAD + 1}")), 0.5)
    for number in range(1, AHEAD + 3):
        training.step()
        mine.with_suffix(f".{number}").touch()
    training.check()


def test_a_host_runs_so_far_ahead_and_no_further(tmp_path):
    run_ahead_on_double(functools.partial(run_into_the_bound, tmp_path), 2)


def use_a_branch_first(set_to_none: bool, device: str) -> None:
    """Rank 0 alone uses another branch in one pass: it is averaged `AHEAD` + 1 passes later."""
    torch.manual_seed(1)
    x, y = (torch.nn.Parameter(torch.zeros(2, device=device)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(SGD([x, y], lr=0.0), [("x", x), ("y", y)])
    first, found = PLANNED + 3, []
    with logged() as messages:
        for step in range(first + AHEAD + 3):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = (2 * x).sum()
            if step == 0 or (step in (first, first + 2) and hvd.rank() == 0):
                loss = loss + (6 * y).sum()
            loss.backward()
            assert x.grad.tolist() == [2, 2]
            found.append(None if y.grad is None else y.grad.tolist())
            optimizer.step()
    late = [message for message in messages if "two steps later" in message]
    assert len(late) == (hvd.rank() == 0), messages
    assert all("of 'y', which" in message for message in late), late
    none = None if set_to_none else [0, 0]
    share = 2 * 6 / hvd.size()  # of two passes
    expected = [[6, 6], *[none] * (first + AHEAD), [share, share], none]
    assert found == [*expected][: len(found)]


@pytest.mark.parametrize("set_to_none", [True, False])
@on_worlds
def test_gradients_that_only_some_ranks_have_count_later(size, set_to_none):
    run_ahead_on_double(functools.partial(use_a_branch_first, set_to_none), size)


def use_a_branch_of_two_optimizers(device: str) -> None:
    """As above, with two optimizers in each pass: ranks that put no gradient aside step alike."""
    x, y, other = (torch.nn.Parameter(torch.zeros(2, device=device)) for _ in range(3))
    optimizers = [hvd.DistributedOptimizer(SGD(of, lr=0.0)) for of in ([x, y], [other])]
    first, found = PLANNED + 3, []
    for step in range(first + AHEAD + 3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = (2 * x).sum() + other.sum()
        if step == 0 or (step == first and hvd.rank() == 0):
            loss = loss + (6 * y).sum()
        loss.backward()
        found.append(None if y.grad is None else y.grad.tolist())
        for optimizer in optimizers:
            optimizer.step()
    late = first + AHEAD + 1
    share = 6 / hvd.size()
    assert found == [[6, 6], *[None] * (late - 1), [share, share], None]


@on_worlds
def test_gradients_of_some_ranks_in_one_of_two_optimizers(size):
    run_ahead_on_double(use_a_branch_of_two_optimizers, size)


def step_too_often(device: str) -> tuple[str, str]:
    """Rank 1 calls step() once more than the others, between two passes: all get an error."""
    training = Training(device)
    training.steps(PLANNED + 2)
    assert is_planned()
    if hvd.rank() == 1:
        with training.optimizer.skip_synchronize():
            training.optimizer.step()
    return error_of(lambda: training.steps(AHEAD + 1))


@on_worlds
def test_a_rank_that_steps_more_often(size):
    for kind, text in run_ahead_on_double(step_too_often, size):
        assert kind == "MismatchError"
        assert "rank 0 has taken 4 optimizer steps, rank 1 5" in text


def hear_of_it_late(folder: Path, device: str) -> tuple[str, str]:
    """Rank 1 has stepped once more, and leaves while the others end the pass after that."""
    training = Quiet(device)
    training.steps(PLANNED + 2)
    run_ahead = backward_sync_of(hvd.global_process_set).run_ahead
    send = run_ahead._send

    def send_when_it_has_left(*report: Any) -> Entered:
        (folder / str(hvd.rank())).touch()
        wait_for(folder / "left")
        entered = send(*report)
        assert eventually(entered.work.done, DEADLINE_S)
        return entered

    if hvd.rank() != 1:
        training.step()
        run_ahead._send = send_when_it_has_left
        return error_of(training.step)
    with training.optimizer.skip_synchronize():
        training.optimizer.step()
    for rank in {*range(hvd.size())} - {1}:
        wait_for(folder / str(rank))
    failure = error_of(training.step)  # "nothing" if the others' reports have not come
    hvd.shutdown()
    (folder / "left").touch()
    return failure


@on_worlds
def test_a_rank_that_leaves_has_told_the_others_why(size, tmp_path):
    failures = run_ahead_on_double(functools.partial(hear_of_it_late, tmp_path), size)
    for rank, (kind, text) in enumerate(failures):
        if rank != 1 or kind != "nothing":
            assert kind == "MismatchError", text
            assert "rank 0 has taken 4 optimizer steps, rank 1 5" in text


def run_out_of_data(device: str) -> None:
    """Ranks have different numbers of batches, and join; afterwards they train on."""
    rank, size = hvd.rank(), hvd.size()
    training = Training(device)
    reference = Branches(device)
    optimizer = SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for epoch in range(2):
        counts = [PLANNED + 3 + 7 * r * (1 - epoch) for r in range(size)]
        for step in range(max(counts)):
            optimizer.zero_grad()
            for r in range(size):
                if step < counts[r]:
                    generator = torch.Generator().manual_seed(100 * r + training_step(epoch, step))
                    batch = torch.randn(4, 5, generator=generator).to(device)
                    (reference(batch) / size).backward()
            optimizer.step()
        for step in range(counts[rank]):
            training.done = training_step(epoch, step)
            training.step()
            metric = hvd.allreduce(torch.ones(3, device=device), op=hvd.Sum)
            assert metric[0].item() == sum(step < count for count in counts)
        last = hvd.join()
        assert counts[last] == max(counts)
        hvd.broadcast_parameters(training.model.state_dict(), last)
        hvd.broadcast_optimizer_state(training.optimizer, last)
        assert_same_on_all_ranks(*weights_of(training.model))
        for mine, other in zip(weights_of(training.model), weights_of(reference), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def training_step(epoch: int, step: int) -> int:
    return 40 * epoch + step


@on_worlds
def test_join(size):
    run_ahead_on_double(run_out_of_data, size)


def join_at_once(device: str) -> None:
    """All ranks join after the same pass, and train on."""
    training = Training(device)
    for _ in range(3):
        training.steps(PLANNED + 2)
        assert is_planned()
        hvd.join()
        assert not is_planned()
    assert_same_on_all_ranks(*weights_of(training.model))


@on_worlds
def test_join_after_equally_many_passes(size):
    run_ahead_on_double(join_at_once, size)


def join_with_a_pending_collective(device: str) -> None:
    """Rank 0 has called 'm' when it joins; the others call it after passes that they run ahead."""
    training = Quiet(device)
    training.steps(PLANNED + 2)
    mine = torch.full((3,), hvd.rank() + 1.0, device=device)
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(mine, name="m", op=hvd.Sum)
    else:
        hvd.allreduce(torch.zeros(1), name="rank 0 joins")  # ends when it has, and not before
        training.steps(1)
        handle = hvd.allreduce_async(mine, name="m", op=hvd.Sum)
        training.steps(3)
    hvd.join()
    assert hvd.synchronize(handle).tolist() == [hvd.size() * (hvd.size() + 1) / 2] * 3
    others = range(1, hvd.size())
    expected = sum(training.done - 1 + rank for rank in others) / hvd.size()
    if hvd.rank() != 0:
        assert training.weights[0].tolist() == [pytest.approx(expected)] * 5


@on_worlds
def test_join_with_a_pending_collective(size):
    run_ahead_on_double(join_with_a_pending_collective, size)


def call_during_a_pass(folder: Path, device: str) -> tuple[str, str]:
    """Rank 0 has joined; the others call a collective between two launches of a planned pass."""
    training = Quiet(device)
    training.steps(PLANNED + 2)
    call = functools.partial(hvd.allreduce_async, torch.ones(3, device=device), name="m")
    called: list[hvd.Handle] = []

    def go_on() -> None:
        if hvd.rank() > 0:
            wait_for(folder / "joins")
            weight = training.weights[1]
            hook = weight.register_post_accumulate_grad_hook(lambda _: called.append(call()))
            training.step()
            hook.remove()
            training.steps(3)
        else:
            (folder / "joins").touch()
        hvd.join()

    return error_of(go_on)


@on_worlds
def test_a_collective_during_a_pass_after_a_join_is_refused(size, tmp_path):
    program = functools.partial(call_during_a_pass, tmp_path)
    failures = run_ahead_on_double(program, size, TORCH_RING_BUCKET_BYTES="1")
    for rank, (kind, text) in enumerate(failures):
        assert kind == ("RingError" if rank == 0 else "PeerLostError"), text
        assert "allreduce 'm' float32 [3]" in text
        assert "during a backward pass whose hosts run ahead" in text


def use_process_sets(device: str) -> None:
    """While there is another set, the ranks agree; then they plan again."""
    training = Training(device)
    training.steps(PLANNED + 2)
    assert is_planned()
    added = hvd.add_process_set([0, 1])
    assert not is_planned()
    training.steps(PLANNED + 2)
    assert not is_planned()
    hvd.remove_process_set(added)
    training.steps(PLANNED + 1)
    assert is_planned()
    other = Training(device)
    assert not is_planned(), "a new optimizer's first pass is agreed"
    for _ in range(12):
        training.step()
        other.step()
        assert not is_planned(), "passes in turn are no equal ones"
    training.steps(PLANNED)
    assert is_planned()
    assert_same_on_all_ranks(*weights_of(training.model, other.model))


def test_process_sets_and_new_optimizers():
    run_ahead_on_double(use_process_sets, 3)
