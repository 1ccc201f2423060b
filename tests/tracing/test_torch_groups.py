"""Groups of torch.distributed with the backend ring: their operations, and late ranks."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from slow import on_shm_and_slowly_on_tcp

from tests.support.groups import TIMEOUT_S, default_group, group_store, on_ring
from tests.support.pool import error_of, run
from tests.tracing.test_flight_recorder import analysed
from torch_ring import tracing
from torch_ring.tracing.lateness import Straggler

LATE_S = 0.1


def content(folder: Path, rank: int) -> Any:
    return pickle.loads((folder / f"flight_{rank}").read_bytes())


def use_two_groups(folder: str) -> None:
    dist.all_reduce(torch.ones(6, 2))
    pair = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        dist.broadcast(torch.ones(3), src=1, group=pair)
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    assert work is not None
    work.wait()
    dist.barrier()
    tracing.dump(folder)


@pytest.mark.slow
def test_torchs_analyser_reads_the_operations_of_groups(tmp_path: Path) -> None:
    on_ring(use_two_groups, 3, str(tmp_path))
    text = analysed(tmp_path)
    assert "Not all ranks" not in text, text
    assert "errors" not in text, text
    names = []
    for rank in range(3):
        found = content(tmp_path, rank)
        assert found["rank"] == rank
        descriptions = {each["desc"]: each["ranks"] for each in found["pg_config"].values()}
        names.append(sorted(descriptions))
        assert descriptions["group 0 of torch.distributed"] == "[0, 1, 2]"
        (default,) = (i for i, each in found["pg_config"].items() if "group 0" in each["desc"])
        operations = [
            entry["profiling_name"]
            for entry in found["entries"]
            if entry["process_group"][0] == default
        ]
        # torch has barriers of its own in init_process_group() and new_group().
        assert operations.count("gloo:all_reduce") == 2
        assert operations[-2:] == ["gloo:all_reduce", "gloo:barrier"]
    assert len(names[0]) == 1
    assert names[1] == names[2]
    assert len(names[1]) == 2


def disagree() -> str:
    dist.all_reduce(torch.ones(3))
    return error_of(lambda: dist.all_reduce(torch.ones(3 + dist.get_rank())))[1]


@pytest.mark.slow
def test_an_error_writes_a_dump_in_which_the_analyser_finds_the_mismatch(tmp_path: Path) -> None:
    texts = on_ring(disagree, 2, env={"TORCH_RING_FLIGHT_DIR": str(tmp_path)})
    for rank, text in enumerate(texts):
        assert f"the last operations of this rank are in {tmp_path}/flight_{rank}" in text, text
    assert "mismatch" in analysed(tmp_path).lower()


def send_a_signal(folder: str) -> None:
    dist.all_reduce(torch.ones(3))
    os.kill(os.getpid(), signal.SIGUSR2)
    assert content(Path(folder), dist.get_rank())["entries"]


def test_a_signal_writes_a_dump(tmp_path: Path) -> None:
    env = {"TORCH_RING_FLIGHT_DIR": str(tmp_path)}
    on_ring(send_a_signal, 2, str(tmp_path), is_fresh=True, env=env)


def reduce_with_a_late_rank(late: int, step: int, group: dist.ProcessGroup | None = None) -> None:
    """Reduce; the late rank reduces a while after the others, however late these are."""
    ranks = dist.get_process_group_ranks(group)
    asked = {rank: f"step {step}: rank {rank} of {ranks} has asked" for rank in ranks}
    store, rank = group_store(), dist.get_rank()
    if rank == late:
        store.wait([asked[other] for other in ranks if other != late])
        time.sleep(LATE_S)
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    store.set(asked[rank], "")
    assert work is not None
    work.wait()


def be_late(late: int) -> list[Straggler]:
    for step in range(12):
        reduce_with_a_late_rank(late, step)
    dist.barrier()  # makes the last rank known
    return tracing.stragglers(min_lag_s=LATE_S / 2)


@on_shm_and_slowly_on_tcp
def test_a_late_rank_of_a_group_is_named(transport: str) -> None:
    for rank, found in enumerate(on_ring(be_late, 3, 1, transport=transport)):
        assert [each.rank for each in found] == ([] if rank == 1 else [1]), found


def look_at_the_counters() -> None:
    pair = dist.new_group([0, 1])
    before = tracing.snapshot()
    for _ in range(3):
        dist.all_reduce(torch.ones(10))
    if dist.get_rank() < 2:
        dist.broadcast(torch.ones(5), src=1, group=pair)
    found = tracing.snapshot()
    assert (found.rank, found.size, found.sets) == (dist.get_rank(), 3, {})
    (default,) = (each for each in found.groups.values() if each.ranks == (0, 1, 2))
    (earlier,) = (each for each in before.groups.values() if each.ranks == (0, 1, 2))
    assert "allreduce" not in earlier.operations
    counts = default.operations["allreduce"]
    assert (counts.operations, counts.bytes) == (3, 120)
    pairs = [each for each in found.groups.values() if each.ranks == (0, 1)]
    assert len(pairs) == (dist.get_rank() < 2)
    for each in pairs:
        assert each.operations["broadcast"].bytes == 20


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_snapshot_counts_groups(transport: str) -> None:
    on_ring(look_at_the_counters, 3, transport=transport)


def report_of_all() -> list[tracing.RankReport]:
    dist.barrier()  # connects first: a first operation would be submitted only after that
    work = dist.all_reduce(torch.ones(3), async_op=True) if dist.get_rank() else None
    group_store().set(f"asked-{dist.get_rank()}", "")
    found = []
    if dist.get_rank() == 0:
        group_store().wait(["asked-1", "asked-2"])
        found = tracing.report(TIMEOUT_S)
        work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.wait()
    return found


def test_the_report_asks_the_ranks_of_torch_distributed() -> None:
    first, second, third = on_ring(report_of_all, 3)[0]
    assert [each.rank for each in (first, second, third)] == [0, 1, 2]
    assert (first.text or "").startswith("in no collective; its main thread is in ")
    for each in (second, third):
        assert (each.text or "").startswith("in all_reduce '#"), each
        assert "in report_of_all (" in (each.text or "")


def be_late_in_one_of_two_groups() -> list[Straggler]:
    """Rank 2 is late in the second of two groups of ring, which share only rank 0."""
    rank = int(os.environ["RANK"])
    with default_group("gloo"):
        groups = [dist.new_group(ranks, backend="ring") for ranks in ([0, 1], [0, 2])]
        for step in range(6):
            for group in groups:
                if dist.get_rank(group) >= 0:
                    reduce_with_a_late_rank(2, step, group)
        for group in groups:
            if dist.get_rank(group) >= 0:
                dist.barrier(group)
        found = tracing.stragglers(min_lag_s=LATE_S / 2) if rank == 0 else []
        dist.barrier()
    return found


def test_a_late_rank_of_one_of_two_groups_is_named() -> None:
    first, *_ = run(be_late_in_one_of_two_groups, 3, initialized=False, kind="c10d")
    assert [each.rank for each in first] == [2]


def without_group() -> tuple[str, str]:
    return error_of(lambda: tracing.dump("anywhere"))


def test_without_world_and_group_there_is_nothing_to_dump() -> None:
    assert run(without_group, 1, initialized=False)[0][0] == "NotInitializedError"
