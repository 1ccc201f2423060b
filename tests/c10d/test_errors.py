# SPDX-License-Identifier: Apache-2.0
"""Errors: every rank gets the error, in the words of torch.distributed, and nothing hangs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.groups import default_group, group_store, needs_torch_2_14, on_ring
from tests.support.pool import all_have_passed, error_of, expect_error

REMEDY = "destroy_process_group() and init_process_group(), or exit"
OF_OTHERS = re.compile(r"shutdown\(|\binit\(|[Rr]emove|fence|allreduce|allgather|process set|world")


def go_on() -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(dist.get_world_size())] * 3


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
        (lambda: dist.broadcast(two, rank), ("root 0", "root 1")),
        (lambda: dist.gather(two, parts, rank), ("root 0", "root 1")),
        (lambda: dist.reduce(torch.ones(3 + rank), 0), ("[3] Sum root 0", "[4] Sum root 0")),
        (lambda: wait_for(dist.all_reduce(two, op, async_op=True)), ("Sum", "Max")),
    ]


def operations() -> dict[str, Callable[[], object]]:
    two, four = torch.ones(2), torch.ones(4)
    of_root = [two, two] if dist.get_rank() == 0 else None
    return {
        "all_reduce": lambda: dist.all_reduce(two),
        "all_reduce of a sparse tensor": lambda: dist.all_reduce(torch.eye(2).to_sparse()),
        "broadcast": lambda: dist.broadcast(two, 0),
        "reduce": lambda: dist.reduce(two, 0),
        "all_gather": lambda: dist.all_gather([two, two], two),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(four, two),
        "gather": lambda: dist.gather(two, of_root),
        "scatter": lambda: dist.scatter(two, of_root),
        "reduce_scatter": lambda: dist.reduce_scatter(two, [two, two]),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(two, four),
        "all_to_all": lambda: dist.all_to_all([two, two], [two, two]),
        "all_to_all_single": lambda: dist.all_to_all_single(four, torch.ones(4)),
    }


def differ() -> None:
    rank = dist.get_rank()
    for call, sides in calls_that_differ():
        text = expect_error("MismatchError", sides[0], call)
        assert sides[1] in text
        go_on()
    for name, call in operations().items():
        for caller in range(2):
            text = expect_error(
                "MismatchError", "the ranks disagree", call if rank == caller else dist.barrier
            )
            assert f"rank {caller}: {name.partition(' ')[0]} '#" in text, (name, text)
            assert f"rank {1 - caller}: barrier '#" in text
            assert "two threads" not in text
            assert not OF_OTHERS.search(text), text
    # Two names of one collective fit together.
    got = [torch.zeros(2), torch.zeros(2)]
    if rank == 0:
        dist.all_gather(got, torch.ones(2))
        assert [each.tolist() for each in got] == [[1, 1], [2, 2]]
    else:
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2) * 2)
    failed = dist.all_reduce(torch.ones(2 + rank), async_op=True)
    assert failed is not None
    dist.barrier()
    assert not failed.is_success(), "nobody has waited for it"
    assert "the ranks disagree" in str(failed.exception())


def test_ranks_that_differ() -> None:
    on_ring(differ, 2)


@on_ranks(2, by=on_ring)
def test_backward_of_ddp_keeps_the_type_of_an_error() -> None:
    model = DistributedDataParallel(nn.Linear(2, 1))
    for _ in range(2):  # torch makes the buckets anew after the first
        model(torch.ones(1, 2)).sum().backward()
    loss = model(torch.ones(1, 2)).sum()
    call = loss.backward if dist.get_rank() else lambda: dist.all_reduce(torch.ones(9))
    text = expect_error("MismatchError", "the ranks disagree", call)
    assert text.count("the ranks disagree") == 1


def in_a_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


@on_ranks(3, by=on_ring)
def test_two_threads_of_one_group() -> None:
    """Two operations, of which rank 2 alone begins one in a second thread, in another order."""
    dist.barrier()
    reduce = partial(dist.all_reduce, torch.ones(3), async_op=True)
    cast = partial(dist.broadcast, torch.ones(5), 0, async_op=True)
    works = [in_a_thread(reduce), cast()] if dist.get_rank() == 2 else [cast(), reduce()]
    for work in works:
        text = expect_error("MismatchError", "from two threads of rank 2: give each its", work.wait)
        assert text.endswith(" as in dcp.async_save(..., process_group=dist.new_group())")
    dist.barrier()


@on_ranks(2, initialized=False)
def test_torchs_debug_level_detail() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with default_group():
            go_on()
            group = dist.new_group([0, 1])  # part of the default one, behind torch's wrapper
            dist.barrier(group)
            words = "Detected mismatch between collectives on ranks"
            expect_error(
                "RuntimeError", words, lambda: dist.all_reduce(torch.ones(dist.get_rank() + 1))
            )
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def all_gather_coalesced(inputs: list[torch.Tensor], outputs: int) -> None:
    lists = [[torch.empty(1)] * outputs for _ in range(dist.get_world_size())]
    dist.all_gather_coalesced(lists, inputs)


@on_ranks(2, by=on_ring)
def test_wrong_arguments() -> None:
    """Each rank refuses them by itself."""
    rank, size, one = dist.get_rank(), dist.get_world_size(), torch.ones(1)
    two, three, unequal = torch.ones(2), torch.ones(3), [torch.ones(1), torch.ones(2)]
    sizes = "a tensor of the list has 2 elements, and the other one 1"
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: dist.all_gather_into_tensor(torch.empty(1), one), "the output has 1 elements"),
        (lambda: dist.all_gather_into_tensor(two.double(), one), "differs from the input in dtype"),
        (lambda: dist.reduce_scatter_tensor(two, torch.ones(2)), "the input has 2 elements"),
        (lambda: dist.all_to_all_single(three, torch.ones(3)), "is not divisible by the 2 ranks"),
        (lambda: dist.all_reduce(one.expand(4)), "an expanded tensor"),
        (lambda: dist.all_reduce(two, dist.ReduceOp.BAND), "no Band of float32"),
        (lambda: dist.all_gather([one] * (size + 1), one), "a list has 3 tensors for 2 ranks"),
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
        expect_error("InvalidArgumentError", words, call)
    assert error_of(lambda: dist.send(one, rank))[0] == "ValueError"
    go_on()


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


@on_ranks(3, by=on_ring)
def test_splits_that_do_not_fit() -> None:
    for row in (1, 30_000):  # inline, and apart
        for differ, sent in (
            (unequal_splits, "3 rows to rank 0, which expects 2"),
            (unequal_tensors, f"{3 * row} elements to rank 0, which expects {2 * row}"),
        ):
            kind, text = differ(row)
            assert kind == "MismatchError", text
            assert f"rank 1 sends {sent}" in text
            go_on()


@on_ranks(2, by=on_ring)
def test_messages_that_do_not_fit() -> None:
    """The sender hears of long messages only: short ones do not wait for their receiver."""
    rank, got = dist.get_rank(), torch.zeros(3)
    for count in (5, 5000):
        for dtype, longest in ((torch.float64, count), (torch.float32, count - 1)):
            if rank == 0:
                send = partial(dist.send, torch.ones(count), 1)
                assert error_of(send)[0] == ("nothing" if count == 5 else "MismatchError")
                dist.send(torch.ones(3), 1)
            else:
                receive = partial(dist.recv, torch.zeros(longest, dtype=dtype), 0)
                text = expect_error("MismatchError", f"sends float32, {4 * count} bytes", receive)
                assert f"receives at most {str(dtype)[6:]}, {longest * dtype.itemsize} by" in text
                dist.recv(got, 0)
                assert got.tolist() == [1, 1, 1]


@needs_torch_2_14
@on_ranks(2, by=on_ring)
def test_a_late_rank() -> None:
    """Rank 1 comes too late to two of three groups, and in time to send in the third one."""
    second, got = timedelta(seconds=1), torch.zeros(1)
    late, in_time, changed = dist.new_group(timeout=second), *(dist.new_group() for _ in range(2))
    for group in (late, in_time, changed):
        dist.barrier(group)
    for group in (in_time, changed):
        dist.set_timeout(second, group)  # type: ignore[attr-defined]
    if dist.get_rank() == 1:
        group_store().wait(["gave up"])
        dist.send(torch.ones(1), 0, group=in_time)
        return
    posted = dist.irecv(got, 1, group=in_time)  # no timeout while nobody waits for it
    text = expect_error(
        "TimeoutError",
        "gave up after 1 s (the timeout of its group): rank 1 ",
        lambda: dist.all_reduce(torch.ones(1), group=late),
    )
    assert re.match(r"rank 0: all_reduce '#\d+' float32 \[1\] Sum: ", text), text
    assert not OF_OTHERS.search(text), text
    expect_error(
        "TimeoutError", "the timeout of", lambda: dist.recv(torch.ones(1), 1, group=changed)
    )
    group_store().set("gave up", "")
    wait_for(posted)
    assert got.item() == 1


def short_wait(how: str) -> None:
    """Rank 1 comes after rank 0 has given up a wait; the operation and the group go on."""
    ones = torch.ones(2)
    if dist.get_rank() == 1:
        group_store().wait([f"gave up {how}"])
        dist.send(ones * 2, 0) if how == "recv" else dist.all_reduce(ones)
    else:
        work = dist.irecv(ones, 1) if how == "recv" else dist.all_reduce(ones, async_op=True)
        assert work is not None
        words = "not done within the timeout of this wait()"
        expect_error("TimeoutError", words, lambda: work.wait(timedelta(seconds=0.2)))
        group_store().set(f"gave up {how}", "")
        work.wait()
        assert ones.tolist() == [2.0, 2.0]
    go_on()


@on_ranks(2, by=on_ring)
def test_a_wait_with_a_timeout() -> None:
    for how in ("all_reduce", "recv"):
        short_wait(how)


def end_of_rank_1(how: str, passed: Path) -> list[str]:
    """Return a rank's errors; each of the others is at another call when rank 1 ends."""
    rank, ones, group = dist.get_rank(), torch.ones(4), dist.new_group([0, 1])
    if rank < 2:
        dist.barrier(group)
    dist.barrier()
    all_have_passed(passed, dist.get_world_size())
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        return []  # and leaves
    texts = []
    if rank == 0:
        texts.append(expect_error("PeerLostError", "", lambda: dist.recv(torch.empty(1), 1)))
        reduce = partial(dist.all_reduce, ones, group=group)
        texts += [expect_error("PeerLostError", "", reduce) for _ in range(2)]
        assert texts[-1].endswith(f". Call destroy_process_group(group), or {REMEDY}")
    if rank == 2:
        work = dist.all_reduce(ones, async_op=True)
        assert work is not None
        texts.append(error_of(work.get_future().wait)[1])
    reduce = partial(dist.all_reduce, ones)
    texts += [expect_error("PeerLostError", "", reduce) for _ in range(2)]
    assert texts[-1].startswith(f"rank {rank}: this group has ended: ")
    assert texts[-1].endswith(f". Call {REMEDY}")
    return texts


@pytest.mark.parametrize(
    ("how", "transport"), [("killed", "shm"), ("killed", "tcp"), ("left", "tcp")]
)
def test_a_rank_that_is_gone(how: str, transport: str, tmp_path: Path) -> None:
    words = {
        "killed": r"rank 1 \(pid \d+\) died: its connection closed.*; see its output",
        "left": r"rank 1 \(pid \d+\) has left: it called destroy_process_group\(\) or exited",
    }
    outcomes = on_ring(end_of_rank_1, 4, how, tmp_path, transport=transport, may_die=[1])
    for rank in (0, 2, 3):
        for text in outcomes[rank]:
            assert re.search(words[how], text), text
            assert not OF_OTHERS.search(text), text


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


def test_the_reason_to_leave_a_group_is_told_in_that_group() -> None:
    failed, ended, unused = on_ring(leaves_for_a_reason, 2, transport="tcp")[0]
    assert "left: ValueError: bad data at test_errors.py:" in failed, failed
    assert "left: ValueError: bad data at test_errors.py:" in unused, unused
    assert "has left: it called" in ended, ended


@on_ranks(2, initialized=False)
def test_abort_from_another_thread() -> None:
    with default_group():
        group = dist.new_group()
        group._get_backend(torch.device("cpu")).abort()  # type: ignore[union-attr]
        expect_error("RingError", "was destroyed or aborted", lambda: dist.barrier(group))
        if dist.get_rank() == 1:
            group_store().wait(["aborted"])
            # Rank 0 had joined the first one, which may complete before the news of the end
            # arrives.
            errors = [error_of(lambda: dist.all_reduce(torch.ones(1))) for _ in range(2)]
            assert any("aborted by abort()" in text for _, text in errors), errors
            return
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        thread = threading.Timer(0.3, backend.abort)
        thread.start()
        expect_error("RingError", "aborted by abort()", work.wait)
        thread.join()
        group_store().set("aborted", "")


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
