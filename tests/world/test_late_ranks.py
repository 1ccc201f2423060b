# SPDX-License-Identifier: Apache-2.0
"""Late ranks: by default they cause no error, and the right one is named."""

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from logs import logged
from on_ranks import on_ranks
from pool import all_have_passed, error_of, eventually, run
from slow import on_shm_and_slowly_on_tcp

import torch_ring as hvd
from torch_ring.config import SETTINGS, Config

WARN_S = 0.4
LATE_S = 1.5

LONGEST = {
    s.variable: f"{1e8 if s.field != 'fusion_window_s' else 1000:g}"
    for s in SETTINGS
    if isinstance(getattr(Config(), s.field), float)
}


def accused(text: str) -> list[int]:
    """Return the ranks that a warning or a TimeoutError names as late."""
    called = re.findall(r"rank (\d+) \([^)]*pid \d+\) has not called it", text)
    stuck = re.search(r"All wait for (.*): it is stuck", text)
    ranks = re.findall(r"rank (\d+) \(", stuck[1]) if stuck else called
    return sorted(int(rank) for rank in ranks)


def come_late(late: list[int], folder: Path) -> list[str]:
    """Reduce on all ranks; late ones come after the others have reported them. Return the log."""
    values = torch.ones(3)
    hvd.barrier()
    told = {rank: folder / f"told-{rank}" for rank in range(hvd.size()) if rank not in late}
    with logged() as messages:

        def warnings() -> list[str]:
            return [text for text in messages if "'x'" in text and " has waited " in text]

        def has_told() -> bool:
            lines = warnings()
            return len(lines) >= 2 and late in map(accused, lines)

        if hvd.rank() in late:
            assert eventually(lambda: all(path.exists() for path in told.values()))
        else:
            mine = told[hvd.rank()]
            threading.Thread(target=lambda: eventually(has_told) and mine.touch()).start()
        assert hvd.allreduce(values, op=hvd.Sum, name="x").tolist() == [hvd.size()] * 3
        return warnings()


@pytest.mark.parametrize(("transport", "size", "late"), [("shm", 4, [0, 2]), ("tcp", 5, [2, 3])])
def test_a_warning_names_the_late_ranks_and_repeats(transport, size, late, tmp_path):
    """Only one rank is late in tests/cpp/engine_errors_test.cc, on all layouts of hosts."""
    env = {"TORCH_RING_TIMEOUT": "0", "TORCH_RING_STALL_WARNING": str(WARN_S)}
    logs = run(come_late, size, args=(late, tmp_path), transport=transport, env=env)
    for rank in {*range(size)}.difference(late):
        lines = logs[rank]
        assert len(lines) >= 2, "a warning repeats"
        # The first warning may precede some punctual ranks, and the last may follow some late ones.
        named = [accused(line) for line in lines]
        assert late in named, (rank, lines)
        assert named[-1], (rank, lines)
        assert set(named[-1]) <= set(late), (rank, lines)
        assert lines[-1].endswith("It goes on waiting: TORCH_RING_TIMEOUT is not set")
        assert lines[-1].startswith(f"rank {rank} has waited ")


def outlive_a_stopped_rank(victim: int, folder: Path) -> str:
    """Reduce until it fails, because the victim is stopped. Return the error.

    The victim is then killed: no rank waits for its departure.
    """
    values = torch.ones(4 << 20)
    pids = hvd.allgather_object(os.getpid())
    all_have_passed(folder / "here", hvd.size())
    if hvd.rank() == victim:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    kind = "nothing"
    while kind == "nothing":
        kind, text = error_of(lambda: hvd.allreduce(values, name="doomed"))
    assert kind == "TimeoutError", text
    all_have_passed(folder / "over", hvd.size() - 1)
    with contextlib.suppress(ProcessLookupError):  # another one was faster
        os.kill(pids[victim], signal.SIGKILL)
    return text


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_timeout_names_the_rank_that_is_stopped(transport, tmp_path):
    """The other ranks wait for their neighbours, in a transfer or before it."""
    args, env = (0, tmp_path), {"TORCH_RING_TIMEOUT": "3"}
    texts = run(outlive_a_stopped_rank, 4, args=args, transport=transport, env=env, may_die={0})
    assert [accused(text) for text in texts[1:]] == [[0]] * 3, texts


@on_shm_and_slowly_on_tcp
@on_ranks(2, env={"TORCH_RING_TIMEOUT": "1"})
def test_a_rank_that_makes_progress_has_time(transport) -> None:
    """Rank 1 is late with one operation, and makes progress with others."""
    values = torch.ones(3)
    handle = hvd.allreduce_async(values, name="first") if hvd.rank() == 0 else None
    end = time.monotonic() + LATE_S
    for step in range(1000):
        more = torch.tensor([float(time.monotonic() < end)])
        if hvd.allreduce(more, op=hvd.Min, name=f"step {step}").item() == 0:
            break
        time.sleep(0.05)
    handle = handle or hvd.allreduce_async(values, name="first")
    hvd.synchronize(handle)


@on_shm_and_slowly_on_tcp
@on_ranks(2)
def test_a_second_thread_may_come_later(transport) -> None:
    """Each thread waits for the call of the other rank's second thread, a second later."""
    names = ["one", "other"]
    mine, later = names if hvd.rank() == 0 else names[::-1]
    results: dict[str, list[float]] = {}

    def reduce(name: str, delay_s: float) -> None:
        time.sleep(delay_s)
        results[name] = hvd.allreduce(torch.ones(2), op=hvd.Sum, name=name).tolist()

    thread = threading.Thread(target=reduce, args=(later, 1.0))
    thread.start()
    reduce(mine, 0.0)
    thread.join()
    assert [results[name] for name in names] == [[2.0, 2.0]] * 2


@on_ranks(2, transport="tcp", env=LONGEST)
def test_the_longest_times_that_the_settings_take() -> None:
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3
