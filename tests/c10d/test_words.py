# SPDX-License-Identifier: Apache-2.0
"""Errors speak of the functions that a program of torch.distributed calls."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.groups import group_store, needs_torch_2_14, on_ring
from tests.support.pool import all_have_passed, error_of
from tests.support.worlds import on_both_transports
from torch_ring.tracing.operations import recorded_sets

REMEDY = "destroy_process_group() and init_process_group(), or exit"
OF_OTHERS = re.compile(r"shutdown\(|\binit\(|[Rr]emove|fence|allreduce|allgather|process set|world")


def without_pid(text: str) -> str:
    return re.sub(r"\(pid \d+\)", "(pid N)", text)


def ends_of(how: str, passed: Path) -> list[str]:
    """Return the texts of the errors after rank 1 has gone."""
    pair, ones = dist.new_group([0, 1]), torch.ones(3)
    dist.barrier(pair)
    dist.barrier()
    all_have_passed(passed, 2)
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return []  # and leaves
    calls = [dist.barrier, partial(dist.recv, ones, 1), partial(dist.all_reduce, ones)]
    texts = [error_of(call)[1] for call in calls]
    texts += [error_of(lambda: dist.all_reduce(ones, group=pair))[1] for _ in range(2)]
    return [without_pid(text) for text in texts]


@on_both_transports
@pytest.mark.parametrize("how", ["killed", "left"])
def test_a_lost_rank(how: str, transport: str, tmp_path: Path) -> None:
    may_die = [1] if how == "killed" else []
    barrier, receive, ended, _, group_ended = on_ring(
        ends_of, 2, how, tmp_path, transport=transport, may_die=may_die
    )[0]
    died = "rank 1 (pid N) died: its connection closed"
    causes = {
        "killed": [f"{died}; see its output"],
        "left": ["rank 1 (pid N) has left: it called destroy_process_group() or exited"],
    }[how]
    if how == "killed" and transport == "tcp":  # TCP resets it if rank 0's last bytes are unread
        causes.append(f"{died}, and nobody listens at its address any more; see its output, or")
    assert re.match(r"rank 0: barrier '#\d+': ", barrier)
    for text in (barrier, receive, ended, group_ended):
        assert any(cause in text for cause in causes), text
        assert not OF_OTHERS.search(text), text
    assert ended.startswith("rank 0: this group has ended: ")
    assert ended.endswith(f". Call {REMEDY}")
    assert group_ended.endswith(f". Call destroy_process_group(group), or {REMEDY}")


def operations() -> dict[str, Callable[[], object]]:
    two, four = torch.ones(2), torch.ones(4)
    sparse = torch.eye(2).to_sparse()
    return {
        "all_reduce": lambda: dist.all_reduce(two),
        "all_reduce of a sparse tensor": lambda: dist.all_reduce(sparse),
        "broadcast": lambda: dist.broadcast(two, 0),
        "reduce": lambda: dist.reduce(two, 0),
        "all_gather": lambda: dist.all_gather([two, two], two),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(four, two),
        "gather": lambda: dist.gather(two, [two, two] if dist.get_rank() == 0 else None),
        "scatter": lambda: dist.scatter(two, [two, two] if dist.get_rank() == 0 else None),
        "reduce_scatter": lambda: dist.reduce_scatter(two, [two, two]),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(two, four),
        "all_to_all": lambda: dist.all_to_all([two, two], [two, two]),
        "all_to_all_single": lambda: dist.all_to_all_single(four, torch.ones(4)),
    }


def texts_of_all() -> dict[str, str]:
    """Return by operation the text of its mismatch with the other rank's barrier."""
    texts = {}
    for name, call in operations().items():
        for rank in range(2):
            kind, text = error_of(call if dist.get_rank() == rank else dist.barrier)
            assert kind == "MismatchError", text
            texts[f"{name} of rank {rank}"] = text
    # Two names of one collective fit together.
    got = [torch.zeros(2), torch.zeros(2)]
    if dist.get_rank() == 0:
        dist.all_gather(got, torch.ones(2))
    else:
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2) * 2)
    assert dist.get_rank() or [each.tolist() for each in got] == [[1, 1], [2, 2]]
    return texts


@on_both_transports
def test_names_of_operations(transport: str) -> None:
    for texts in on_ring(texts_of_all, 2, transport=transport):
        for what, text in texts.items():
            name, rank = what.partition(" ")[0], int(what[-1])
            assert f"; rank {rank}: {name} '#" in text or f": rank {rank}: {name} '#" in text, text
            assert f"rank {1 - rank}: barrier '#" in text
            assert "two threads" not in text
            assert not OF_OTHERS.search(text), text


def backward_beside_another() -> tuple[str, str]:
    model = DistributedDataParallel(nn.Linear(2, 1))
    for _ in range(2):  # torch makes the buckets anew after the first
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
    loss = model(torch.ones(1, 2)).sum()
    return error_of(loss.backward if dist.get_rank() else lambda: dist.all_reduce(torch.ones(9)))


def test_backward_of_ddp_keeps_the_type_of_an_error() -> None:
    for kind, text in on_ring(backward_beside_another, 2):
        assert kind == "MismatchError", text
        assert text.count("the ranks disagree") == 1


def in_a_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def two_threads() -> list[tuple[str, str]]:
    """Two operations, of which rank 2 alone begins one in a second thread, in another order."""
    dist.barrier()
    reduce = partial(dist.all_reduce, torch.ones(3), async_op=True)
    cast = partial(dist.broadcast, torch.ones(5), 0, async_op=True)
    works = [in_a_thread(reduce), cast()] if dist.get_rank() == 2 else [cast(), reduce()]
    errors = [error_of(work.wait) for work in works]
    dist.barrier()
    return errors


def test_two_threads_of_one_group() -> None:
    for errors in on_ring(two_threads, 3):
        for kind, text in errors:
            assert kind == "MismatchError", text
            assert text.endswith(
                ". Operations of this group come from two threads of rank 2: give each its "
                "own group, as in dcp.async_save(..., process_group=dist.new_group())"
            )


def requested() -> int:
    """Return the number of operations that this rank has requested."""
    return sum(len(found.records) for found in recorded_sets())


class Planner(dcp.DefaultSavePlanner):
    """Waits, in the thread that saves, for the training."""

    def __init__(self, may_go_on: threading.Event) -> None:
        super().__init__()
        self._may_go_on = may_go_on

    def create_local_plan(self) -> Any:
        self._may_go_on.wait()
        return super().create_local_plan()


def save_beside_training(folder: str, has_own_group: bool) -> list[tuple[str, str]]:
    """A reduction of the training, before an operation of the saving on rank 1, after it on 0."""
    ones, may_go_on = torch.ones(3), threading.Event()
    dist.all_reduce(ones)
    group = dist.new_group() if has_own_group else None
    before = requested()
    if dist.get_rank() == 0:
        may_go_on.set()
    saving: Any = dcp.async_save(
        {"weight": torch.arange(4.0)},
        checkpoint_id=folder,
        process_group=group,
        planner=Planner(may_go_on),
    )
    if dist.get_rank() == 0:
        while requested() == before:
            threading.Event().wait(0.01)
    work = dist.all_reduce(ones, async_op=True)
    may_go_on.set()
    assert work is not None
    errors = [error_of(saving.result), error_of(work.wait)]
    if has_own_group:
        assert ones.tolist() == [4.0] * 3
        loaded = {"weight": torch.zeros(4)}
        dcp.load(loaded, checkpoint_id=folder)
        assert loaded["weight"].tolist() == [0, 1, 2, 3]
    return errors


@needs_torch_2_14
@pytest.mark.parametrize("has_own_group", [False, True])
def test_async_save_beside_training(has_own_group: bool, tmp_path: Path) -> None:
    for errors in on_ring(save_beside_training, 2, str(tmp_path), has_own_group):
        if has_own_group:
            assert errors == [("nothing", "")] * 2
        for kind, text in [] if has_own_group else errors:
            assert kind == "MismatchError", text
            assert "dcp.async_save(..., process_group=dist.new_group())" in text


def rank_0_waits_alone() -> tuple[str, str]:
    dist.barrier()
    if dist.get_rank():
        group_store().wait(["gave up"])
        return "", ""
    error = error_of(dist.barrier)
    group_store().set("gave up", "")
    return error


def test_a_late_rank() -> None:
    env = {"TORCH_RING_STALL_WARNING": "0.5"}
    kind, text = on_ring(rank_0_waits_alone, 2, timeout_s=12.0, env=env)[0]
    assert kind == "TimeoutError"
    gave_up = r"rank 0: barrier '#\d+': gave up after 12 s \(the timeout of its group\): rank 1 "
    assert re.match(gave_up, text), text
    assert not OF_OTHERS.search(text), text
