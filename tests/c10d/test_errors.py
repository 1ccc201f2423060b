# SPDX-License-Identifier: Apache-2.0
"""Errors: every rank gets the error, and nothing hangs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.groups import default_group, group_store, needs_torch_2_14, on_ring
from tests.support.pool import all_have_passed, error_of, run
from tests.support.slow import slow
from tests.support.worlds import on_both_transports
from torch_ring.c10d import registration
from torch_ring.c10d.groups import Group


def wait_for(work: Any) -> None:
    assert work is not None
    work.wait()


def calls_that_differ() -> list[tuple[Callable[[], object], tuple[str, str]]]:
    """Return calls, and the words of both ranks' sides in the errors."""
    rank, two = dist.get_rank(), torch.ones(2)
    dtype, op = [(torch.float32, dist.ReduceOp.SUM), (torch.float64, dist.ReduceOp.MAX)][rank]
    parts = [torch.empty(2), torch.empty(2)]
    return [
        (lambda: dist.all_reduce(torch.ones(rank + 1)), ("float32 [1]", "float32 [2]")),
        (lambda: dist.all_reduce(two.to(dtype)), ("float32 [2]", "float64 [2]")),
        (
            lambda: dist.broadcast(two, 0) if rank else dist.all_reduce(two),
            ("all_reduce", "broadcast"),
        ),
        (lambda: dist.broadcast(two, rank), ("root 0", "root 1")),
        (lambda: dist.gather(two, parts, rank), ("root 0", "root 1")),
        (
            lambda: dist.reduce(torch.ones(3 + rank), 0),
            ("float32 [3] Sum root 0", "float32 [4] Sum root 0"),
        ),
        (lambda: wait_for(dist.all_reduce(two, op, async_op=True)), ("Sum", "Max")),
    ]


def differ() -> None:
    for call, sides in calls_that_differ():
        kind, text = error_of(call)
        assert kind == "MismatchError", (sides, text)
        assert all(side in text for side in sides), (sides, text)
        go_on()
    failed = dist.all_reduce(torch.ones(2 + dist.get_rank()), async_op=True)
    assert failed is not None
    dist.barrier()
    assert not failed.is_success(), "nobody has waited for it"
    assert "the ranks disagree" in str(failed.exception())


@on_both_transports
def test_ranks_that_differ(transport: str) -> None:
    on_ring(differ, 2, transport=transport)


def go_on() -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(dist.get_world_size())] * 3


def differ_in_detail() -> tuple[str, str]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with default_group():
            assert registration._default_group() is not None  # behind torch's wrapper
            ones = torch.ones(2)
            dist.all_reduce(ones)
            assert ones.tolist() == [2, 2]
            return error_of(lambda: dist.all_reduce(torch.ones(dist.get_rank() + 1)))
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_torchs_debug_level_detail() -> None:
    for kind, text in run(differ_in_detail, 2, initialized=False):
        assert kind == "RuntimeError", text
        assert "Detected mismatch between collectives on ranks" in text


def all_gather_coalesced(inputs: list[torch.Tensor], outputs: int) -> None:
    lists = [[torch.empty(1)] * outputs for _ in range(dist.get_world_size())]
    dist.all_gather_coalesced(lists, inputs)


def wrong_arguments() -> None:
    """Each rank refuses them by itself."""
    rank, size, one = dist.get_rank(), dist.get_world_size(), torch.ones(1)
    unequal = [torch.ones(1), torch.ones(2)]
    sizes = "a tensor of the list has 2 elements, and the other one 1"
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: dist.all_gather_into_tensor(torch.empty(1), one), "the output has 1 elements"),
        (
            lambda: dist.all_gather_into_tensor(torch.empty(2, dtype=torch.float64), one),
            "differs from the input in dtype",
        ),
        (
            lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2)),
            "the input has 2 elements",
        ),
        (
            lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3)),
            "is not divisible by the 2 ranks",
        ),
        (lambda: dist.all_reduce(one.expand(4)), "an expanded tensor"),
        (lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND), "no Band of float32"),
        (
            lambda: dist.all_gather([torch.empty(1)] * (size + 1), one),
            "a list has 3 tensors for 2 ranks",
        ),
        (lambda: all_gather_coalesced([one] * 2, outputs=1), "1 outputs for 2 inputs"),
        (lambda: dist.all_gather(unequal, one), f"all_gather: {sizes}"),
        (lambda: dist.reduce_scatter(one, unequal), f"reduce_scatter: {sizes}"),
    ]
    if rank == 0:  # the root
        calls += [
            (lambda: dist.gather(one, unequal, 0), f"gather: {sizes}"),
            (lambda: dist.scatter(one, unequal, 0), f"scatter: {sizes}"),
        ]
    for call, words in calls:
        kind, text = error_of(call)
        assert kind == "InvalidArgumentError", (words, kind, text)
        assert words in text
    assert error_of(lambda: dist.send(one, rank))[0] == "ValueError"
    go_on()


def test_wrong_arguments() -> None:
    on_ring(wrong_arguments, 2)


def unequal_splits(row: int) -> tuple[str, str]:
    """Rank 1 sends three rows to rank 0, which expects two. Rank 2 has no part in that."""
    rank = dist.get_rank()
    sent = [[2, 2, 1], [3, 1, 1], [1, 1, 1]][rank]
    expected = [[2, 2, 1], [2, 1, 1], [1, 1, 1]][rank]
    output = torch.full((sum(expected), row), -1.0)
    rows = torch.ones(sum(sent), row)
    error = error_of(lambda: dist.all_to_all_single(output, rows, expected, sent))
    assert output.eq(-1).all()
    return error


def unequal_tensors(row: int) -> tuple[str, str]:
    """Rank 1 sends rank 0 a larger tensor than expected, in lists of tensors."""
    rank = dist.get_rank()
    sent = [torch.ones(row * (3 if (rank, to) == (1, 0) else 2)) for to in range(3)]
    outputs = [torch.full((row * 2,), -1.0) for _ in range(3)]
    work = dist.all_to_all(outputs, sent, async_op=True)
    assert work is not None
    error = error_of(work.wait)
    assert all(output.eq(-1).all() for output in outputs)
    return error


def splits_that_do_not_fit() -> None:
    for row in (1, 30_000):  # inline, and apart
        for differ, sent in (
            (unequal_splits, "3 rows to rank 0, which expects 2"),
            (unequal_tensors, f"{3 * row} elements to rank 0, which expects {2 * row}"),
        ):
            kind, text = differ(row)
            assert kind == "MismatchError", text
            assert f"rank 1 sends {sent}" in text
            go_on()


@on_both_transports
def test_splits_that_do_not_fit(transport: str) -> None:
    on_ring(splits_that_do_not_fit, 3, transport=transport)


def later_timeout(timeout_s: float, how: str) -> tuple[str, str]:
    """Rank 1 is later than the group's first timeout, or comes when rank 0 has given up."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)
    ones = torch.ones(1)
    if dist.get_rank() == 1:
        if timeout_s > 2:
            time.sleep(5)
        else:
            group_store().wait(["gave up"])
        return error_of(lambda: dist.send(ones, 0) if how == "recv" else dist.all_reduce(ones))
    if how == "unwaited":
        work = dist.all_reduce(ones, async_op=True)
        assert work is not None
        while not work.is_completed():
            time.sleep(0.01)
        error = error_of(work.wait)
    else:
        error = error_of(lambda: dist.recv(ones, 1) if how == "recv" else dist.all_reduce(ones))
    group_store().set("gave up", "")
    return error


@needs_torch_2_14
@pytest.mark.parametrize("how", ["blocking", slow("unwaited"), slow("recv")])
def test_a_timeout_that_is_set_later(how: str) -> None:
    assert on_ring(later_timeout, 2, 20.0, how, timeout_s=4.0) == [("nothing", "")] * 2
    kind, text = on_ring(later_timeout, 2, 1.0, how)[0]
    assert kind == "TimeoutError", text
    assert "the timeout of" in text


def short_wait(how: str) -> tuple[str, str]:
    """Rank 1 comes after rank 0 has given up a wait; the operation and the group go on."""
    ones = torch.ones(2)
    if dist.get_rank() == 1:
        group_store().wait(["gave up"])
        dist.send(ones * 2, 0) if how == "recv" else dist.all_reduce(ones)
        error = "", ""
    else:
        work = dist.irecv(ones, 1) if how == "recv" else dist.all_reduce(ones, async_op=True)
        assert work is not None
        error = error_of(lambda: work.wait(timedelta(seconds=0.2)))
        group_store().set("gave up", "")
        work.wait()
        assert ones.tolist() == [2.0, 2.0]
    dist.all_reduce(ones)
    dist.barrier()
    return error


@on_both_transports
@pytest.mark.parametrize("how", ["all_reduce", "recv"])
def test_a_wait_with_a_timeout(how: str, transport: str) -> None:
    (kind, text), other = on_ring(short_wait, 2, how, transport=transport)
    assert kind == "TimeoutError"
    assert "not done within the timeout of this wait()" in text
    assert other == ("", "")


def receive_that_nobody_waits_for() -> tuple[float, tuple[str, str]]:
    """It is posted for longer than the timeout of its group; a wait lasts that long."""
    got = torch.zeros(1)
    if dist.get_rank() == 1:
        group_store().wait(["long after"])
        dist.send(torch.ones(1), 0)
        dist.all_reduce(got)
        return got.item(), ("", "")
    work = dist.irecv(got, 1)
    time.sleep(4)
    group_store().set("long after", "")
    assert work is not None
    work.wait()
    dist.all_reduce(got)
    work = dist.irecv(torch.zeros(1), 1)
    assert work is not None
    return got.item(), error_of(work.wait)


@pytest.mark.slow
def test_a_receive_that_nobody_waits_for() -> None:
    (sum_0, (kind, text)), (sum_1, _) = on_ring(receive_that_nobody_waits_for, 2, timeout_s=3.0)
    assert sum_0 == sum_1 == 1.0
    assert kind in ("TimeoutError", "PeerLostError"), text  # rank 1 may have left before


def keys_of_monitored_barriers() -> list[int]:
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for barriers in (1, 10):
        for _ in range(barriers):
            dist.monitored_barrier()
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


@needs_torch_2_14
def test_monitored_barriers_leave_nothing_in_the_store() -> None:
    for before, after in on_ring(keys_of_monitored_barriers, 3):
        assert before == after


def end_of_rank_1(how: str, passed: Path) -> list[tuple[str, str]]:
    """Return a rank's errors; each of the others is at another call when rank 1 ends."""
    rank, ones = dist.get_rank(), torch.ones(4)
    dist.barrier()
    all_have_passed(passed, dist.get_world_size())
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        return []
    errors = []
    if rank == 0:
        errors.append(error_of(lambda: dist.recv(torch.empty(1), 1)))
    if rank == 2:
        work = dist.all_reduce(ones, async_op=True)
        assert work is not None
        errors.append(error_of(work.get_future().wait))
    return [*errors, error_of(lambda: dist.all_reduce(ones))]


@on_both_transports
@pytest.mark.parametrize("how", ["killed", "left"])
def test_a_rank_that_is_gone(how: str, transport: str, tmp_path: Path) -> None:
    outcomes = on_ring(end_of_rank_1, 4, how, tmp_path, transport=transport, may_die=[1])
    message, future = outcomes[0][0], outcomes[2][0]
    assert "rank 1" in future[1], future
    for kind, text in (message, outcomes[0][1], outcomes[2][1], *outcomes[3]):
        assert kind == "PeerLostError", text
        assert "rank 1" in text


def leaves_for_a_reason() -> list[str]:
    """Rank 1 leaves three groups, of which it has used two; return rank 0's errors in them."""
    failed, ended, unused = (dist.new_group() for _ in range(3))
    for group in (failed, ended):
        dist.barrier(group)
    if dist.get_rank() == 1:
        with contextlib.suppress(ValueError):
            try:
                raise ValueError("bad data")
            finally:
                dist.destroy_process_group(failed)
                dist.destroy_process_group(unused)
        dist.destroy_process_group(ended)
    else:
        dist.barrier(unused, async_op=True)
    dist.new_group()  # rank 1 tells now that it does not use the third one
    dist.barrier()
    if dist.get_rank() == 1:
        return []
    return [error_of(partial(dist.barrier, group))[1] for group in (failed, ended, unused)]


@on_both_transports
def test_the_reason_to_leave_a_group_is_told_in_that_group(transport: str) -> None:
    failed, ended, unused = on_ring(leaves_for_a_reason, 2, transport=transport)[0]
    assert "left: ValueError: bad data at test_errors.py:" in failed, failed
    assert "left: ValueError: bad data at test_errors.py:" in unused, unused
    assert "has left: it called" in ended, ended


def leaves_for_a_death(how: str, passed: Path) -> str:
    """Rank 3 of a mesh dies, so rank 1 leaves; return the error of rank 0, in no group with it."""
    dist.barrier()
    rows, columns = (
        [dist.new_group(ranks) for ranks in each] for each in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    )
    rank = dist.get_rank()
    row, column = rows[rank // 2], columns[rank % 2]
    for group in (row, column):
        dist.barrier(group)
    all_have_passed(passed, dist.get_world_size())
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        return error_of(lambda: dist.barrier(row))[1]
    if rank == 1:
        try:
            dist.barrier(column)
        except RuntimeError:
            if how == "raises":
                dist.destroy_process_group(row)
        if how == "goes":
            dist.destroy_process_group(row)
    return ""


@pytest.mark.parametrize("how", ["raises", slow("goes")])
def test_a_rank_that_leaves_because_of_a_death_says_so(how: str, tmp_path: Path) -> None:
    text = on_ring(leaves_for_a_death, 4, how, tmp_path, may_die=[3])[0]
    assert re.search(r"rank 1 \(.*\) left: .*rank 3 \(.*\) died: its connection closed", text), text


def abort_in_a_thread() -> tuple[str, str]:
    with default_group():
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        if dist.get_rank() == 1:
            group_store().wait(["aborted"])
            # Rank 0 had joined the first one, which may complete before the news of the end
            # arrives.
            errors = [error_of(lambda: dist.all_reduce(torch.ones(1))) for _ in range(2)]
            return next((error for error in errors if error[0] != "nothing"), errors[-1])
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        thread = threading.Timer(0.5, backend.abort)
        thread.start()
        error = error_of(work.wait)
        thread.join()
        group_store().set("aborted", "")
        return error


def test_abort_from_another_thread() -> None:
    (kind, text), (other, reason) = run(abort_in_a_thread, 2, initialized=False)
    assert kind == "RingError"
    assert other != "nothing"
    assert "aborted by abort()" in text
    assert "aborted by abort()" in reason


def abort_unused() -> tuple[str, str]:
    group = dist.new_group()
    group._get_backend(torch.device("cpu")).abort()  # type: ignore[union-attr]
    return error_of(lambda: dist.all_reduce(torch.ones(1), group=group))


def test_an_aborted_group_cannot_be_used() -> None:
    for kind, text in on_ring(abort_unused, 2):
        assert kind == "RingError"
        assert "was destroyed or aborted" in text


def leave_while_connecting() -> tuple[str, str]:
    if dist.get_rank() == 1:
        return "", ""
    store = dist.PrefixStore("alone", dist.distributed_c10d._get_default_store())
    default = registration._default_group()
    group = Group(0, 2, (0, 1), store, 60.0, name="1", is_default=False, part_of=default)
    threading.Timer(0.5, group.leave).start()
    return error_of(group.connect)


def test_leaving_ends_the_first_use() -> None:
    kind, text = on_ring(leave_while_connecting, 2)[0]
    assert kind == "RingError"
    assert "was destroyed or aborted" in text


def interrupted() -> str:
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1))
        dist.barrier()
        return "done"
    signal.signal(signal.SIGALRM, _raise_interrupt)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        dist.recv(torch.empty(1), 1)
    except KeyboardInterrupt:
        work.wait()
        dist.barrier()
        return "interrupted"
    return "not interrupted"


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt() -> None:
    assert on_ring(interrupted, 2) == ["interrupted", "done"]
