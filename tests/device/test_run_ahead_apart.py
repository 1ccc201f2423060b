"""Planned passes on ranks that do not do the same: late ones, gradients of some, errors, join()."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import device_double
import device_runs
import pool
import pytest
import torch
from ahead_programs import Branches, batch_of, planned_passes, weights_of, wrapped
from device_runs import call_on_double
from pool import error_of, eventually
from torch.optim import SGD
from training import assert_same_on_all_ranks

import torch_ring as hvd
from torch_ring.optimizer.backward_sync import backward_sync_of
from torch_ring.optimizer.run_ahead import AHEAD

pytestmark = device_double.needed
run_on_double = functools.partial(device_runs.run_on_double, TORCH_RING_RUN_AHEAD="1")
on_worlds = pytest.mark.parametrize("size", [2, 3])

DEADLINE_S = 30.0
PLANNED = 3  # the first pass of a plan


def wait_for(path: Path) -> None:
    assert eventually(path.exists, DEADLINE_S)


class Training:
    """A model on a device, and steps with it."""

    def __init__(self, device: str, **options: object) -> None:
        self.device = device
        self.model = Branches(device)
        self.optimizer = wrapped(self.model, True, **options)
        self.done = 0
        self.batches = [batch_of(step, device) for step in range(100)]

    def backward(self, *used: int) -> None:
        self.optimizer.zero_grad()
        self.model(self.batches[self.done], used or (0,)).backward()

    def step(self, *used: int) -> None:
        self.backward(*used)
        self.optimizer.step()
        self.done += 1

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


class Given(torch.autograd.Function):
    """A loss whose gradient is a given number."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, number: float) -> torch.Tensor:
        ctx.gradient = functools.partial(torch.full_like, weight, number)
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient(), None


class Assigning(torch.optim.Optimizer):
    """Sets weights to their gradients."""

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        super().__init__(weights, {})

    @torch.no_grad()
    def step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.copy_(weight.grad)


class Quiet:
    """Steps in which the host waits for nothing on the stand-in, most of whose operators wait."""

    def __init__(self, device: str) -> None:
        self.weights = [torch.nn.Parameter(torch.zeros(5, device=device)) for _ in range(3)]
        self.optimizer = hvd.DistributedOptimizer(Assigning(self.weights))
        self.done = 0

    def backward(self) -> None:
        self.optimizer.zero_grad()
        sum(Given.apply(weight, self.done + hvd.rank()) for weight in self.weights).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.done += 1

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def check(self) -> None:
        expected = torch.full((5,), self.done - 1 + (hvd.size() - 1) / 2)
        for weight in self.weights:
            torch.testing.assert_close(weight.detach().cpu(), expected)


def is_planned() -> bool:
    return bool(backward_sync_of(hvd.global_process_set).run_ahead._plan)


def be_late(folder: Path, device: str) -> None:
    """The last rank begins its next pass when the others have finished `AHEAD` more."""
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
    run_on_double(functools.partial(be_late, tmp_path), size)


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
    run_on_double(functools.partial(run_into_the_bound, tmp_path), 2)


def use_a_branch_first(set_to_none: bool, device: str) -> None:
    """Rank 0 alone uses another branch in one pass: it is averaged `AHEAD` + 1 passes later."""
    torch.manual_seed(1)
    x, y = (torch.nn.Parameter(torch.zeros(2, device=device)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(SGD([x, y], lr=0.0))
    first, found = PLANNED + 3, []
    for step in range(first + AHEAD + 3):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = (2 * x).sum()
        if step == 0 or (step in (first, first + 2) and hvd.rank() == 0):
            loss = loss + (6 * y).sum()
        loss.backward()
        assert x.grad.tolist() == [2, 2]
        found.append(None if y.grad is None else y.grad.tolist())
        optimizer.step()
    none = None if set_to_none else [0, 0]
    share = 2 * 6 / hvd.size()  # of two passes
    expected = [[6, 6], *[none] * (first + AHEAD), [share, share], none]
    assert found == [*expected][: len(found)]


@pytest.mark.parametrize("set_to_none", [True, False])
@on_worlds
def test_gradients_that_only_some_ranks_have_count_later(size, set_to_none):
    run_on_double(functools.partial(use_a_branch_first, set_to_none), size)


def step_too_often(device: str) -> tuple[str, str]:
    """Rank 1 calls step() once more than the others, between two passes: all hear of it."""
    training = Training(device)
    training.steps(PLANNED + 2)
    assert is_planned()
    if hvd.rank() == 1:
        with training.optimizer.skip_synchronize():
            training.optimizer.step()
    return error_of(lambda: training.steps(AHEAD + 1))


@on_worlds
def test_a_rank_that_steps_more_often(size):
    for kind, text in run_on_double(step_too_often, size):
        assert kind == "MismatchError"
        assert "rank 0 has taken 5 optimizer steps, rank 1 6" in text


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
    run_on_double(run_out_of_data, size)


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
    run_on_double(join_at_once, size)


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
    assert is_planned()
    assert_same_on_all_ranks(*weights_of(training.model, other.model))


def test_process_sets_and_new_optimizers():
    run_on_double(use_process_sets, 3)


def die(device: str) -> tuple[str, str] | None:
    training = Training(device)
    training.steps(PLANNED + 2)
    hvd.barrier()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: training.steps(AHEAD + 4))


@on_worlds
def test_a_dead_rank(size):
    results = pool.run(
        call_on_double,
        size,
        args=(die,),
        env={
            "TORCH_RING_NCCL_LIBRARY": str(device_double.NCCL_LIBRARY),
            "TORCH_RING_RUN_AHEAD": "1",
        },
        initialized=False,
        kind=device_double.DEVICE,
        may_die=[1],
    )
    for rank in {*range(size)} - {1}:
        kind, text = results[rank]
        assert kind == "PeerLostError"
        assert "rank 1" in text


@contextlib.contextmanager
def pressing_ctrl_c(when: Callable[[], bool], pressed: Path) -> Iterator[None]:
    """Send SIGINT to this process once `when()` holds, from another thread."""

    def press() -> None:
        if eventually(when, DEADLINE_S):
            os.kill(os.getpid(), signal.SIGINT)
            pressed.touch()

    thread = threading.Thread(target=press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        yield
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_a_rank_without_data(folder: Path, device: str) -> None:
    """Ctrl-C comes while rank 1 waits for rank 0's report; the pass ends, and rank 1 goes on."""
    training = Training(device)
    training.steps(PLANNED + 2)
    pressed = folder / "pressed"
    agreement = backward_sync_of(hvd.global_process_set).agreement
    if hvd.rank() == 0:
        wait_for(pressed)
        training.step()
    elif hvd.rank() == 1:
        training.optimizer.zero_grad()
        with (
            pressing_ctrl_c(lambda: agreement.is_reducing, pressed),
            pytest.raises(KeyboardInterrupt),
        ):
            training.optimizer.step()
        training.optimizer.step()
        training.done += 1
    else:
        training.step()
    training.steps(AHEAD + 3)
    assert_same_on_all_ranks(*weights_of(training.model))


@on_worlds
def test_an_interrupt_of_a_rank_without_data(size, tmp_path):
    run_on_double(functools.partial(interrupt_a_rank_without_data, tmp_path), size)


def fail_in_backward(after_part: bool, device: str) -> tuple[str, str]:
    """A hook of the program raises once on rank 1; it goes on with step()."""
    training = Training(device)
    training.steps(PLANNED + 2)

    def go_on() -> None:
        if hvd.rank() == 1:
            training.optimizer.zero_grad()
            training.optimizer.step()
            training.done += 1
        else:
            training.step()
        training.steps(AHEAD + 4)

    if hvd.rank() == 1:
        where = training.model.trunk if after_part else training.model.branches[0]

        def refuse(_: torch.Tensor) -> None:
            raise ValueError("refused")

        hook = where.weight.register_hook(refuse)
        with pytest.raises(ValueError, match="refused"):
            training.backward()
        hook.remove()
    failure = error_of(go_on)
    if not after_part:
        assert_same_on_all_ranks(*weights_of(training.model))
    return failure


@on_worlds
def test_an_exception_before_anything_is_launched(size):
    program = functools.partial(fail_in_backward, False)
    assert run_on_double(program, size) == [("nothing", "")] * size


@on_worlds
def test_an_exception_after_a_bucket_was_launched(size):
    program = functools.partial(fail_in_backward, True)
    failures = run_on_double(program, size, TORCH_RING_BUCKET_BYTES="1")
    for rank, (kind, text) in enumerate(failures):
        assert kind == ("RingError" if rank == 1 else "PeerLostError")
        assert "after part of its gradients had been sent" in text.replace("\n", " ")


def leave_late(folder: Path, device: str) -> None:
    """Rank 0 leaves while the others still have passes to enter."""
    training = Quiet(device)
    training.steps(PLANNED + 2)
    if hvd.rank() == 0:
        training.steps(AHEAD)
        (folder / "finished").touch()
    else:
        wait_for(folder / "finished")
        training.steps(AHEAD)
    size = hvd.size()
    hvd.shutdown()
    expected = training.done - 1 + (size - 1) / 2
    assert training.weights[0][0].item() == pytest.approx(expected)


@on_worlds
def test_shutdown_with_passes_under_way(size, tmp_path):
    run_on_double(functools.partial(leave_late, tmp_path), size)


def differ(device: str) -> tuple[str, str]:
    return error_of(lambda: wrapped(Branches(device), hvd.rank() == 0))


def test_ranks_with_other_settings():
    for kind, text in run_on_double(differ, 2):
        assert kind == "MismatchError"
        assert "run_ahead=True" in text
        assert "run_ahead=False" in text
