# SPDX-License-Identifier: Apache-2.0
"""The pool of ranks: its results, its messages about ranks that fail, and that no process stays."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pool import RanksFailed, are_gone, eventually, run, shared_files

import torch_ring as hvd


def facts_of_rank() -> tuple[int, int, int, int]:
    return int(os.environ["RANK"]), hvd.rank(), hvd.size(), os.getpid()


def preloaded_modules() -> list[str]:
    return sorted({"torch", "torch._dynamo", "torch_ring"} & sys.modules.keys())


def test_ranks_are_forked_with_torch_in_memory():
    # A missing module is skipped silently by multiprocessing, and costs seconds a test.
    assert run(preloaded_modules, 1, initialized=False) == [
        ["torch", "torch._dynamo", "torch_ring"]
    ]


def raise_on(rank: int) -> None:
    if hvd.rank() == rank:
        raise LookupError(f"this is rank {rank}")


def test_a_rank_that_raises_is_named_with_its_traceback():
    with pytest.raises(RanksFailed) as failed:
        run(raise_on, 3, args=[1])
    message = str(failed.value)
    assert "--- rank 1 ---\nTraceback" in message
    assert "in raise_on" in message
    assert "LookupError: this is rank 1" in message


def leave(how: str) -> int:
    if int(os.environ["RANK"]) == 1:
        if how == "exits":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    return 5


@pytest.mark.parametrize(("how", "code"), [("exits", 7), ("is killed", -signal.SIGKILL)])
def test_a_rank_that_dies_is_named_with_its_exit_code(how, code):
    with pytest.raises(RanksFailed) as failed:
        run(leave, 2, args=[how], initialized=False)
    assert str(failed.value) == f"--- rank 1 ---\ndied with exit code {code}"
    assert run(leave, 2, args=[how], initialized=False, may_die=[1]) == [5, None]


def hang_on(rank: int, pids: Path) -> None:
    (pids / os.environ["RANK"]).write_text(str(os.getpid()))
    while int(os.environ["RANK"]) == rank:
        wait_for_godot()


def wait_for_godot() -> None:
    time.sleep(0.1)


def have_ended(pids: Path) -> bool:
    """Return whether the processes end within seconds; a zombie has ended."""

    def has_ended(pid: str) -> bool:
        try:
            return "(zombie)" in Path("/proc", pid, "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    return eventually(lambda: all(has_ended(file.read_text()) for file in pids.iterdir()))


def test_a_rank_that_hangs_is_named_with_its_stack_and_killed(tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run(hang_on, 2, args=[0, tmp_path], initialized=False, deadline_s=3)
    message = str(failed.value)
    assert "--- rank 0 ---\nstill running at the deadline" in message
    assert "in wait_for_godot" in message
    assert "rank 1" not in message
    assert len(list(tmp_path.iterdir())) == 2
    assert have_ended(tmp_path)


def leave_a_child(pids: Path) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    (pids / "child").write_text(str(child.pid))


def test_no_process_is_left_behind(tmp_path):
    before = shared_files()
    run(facts_of_rank, 2)
    waiting = set(multiprocessing.active_children())  # for another test
    run(os.getpid, 2, initialized=False)
    assert set(multiprocessing.active_children()) == waiting
    left = shared_files() - before
    assert are_gone(left), left
    run(leave_a_child, 1, args=[tmp_path], initialized=False)
    assert have_ended(tmp_path)
