# SPDX-License-Identifier: Apache-2.0
"""Dumps of the last operations: of the world, of messages, of groups of torch.distributed."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.distributed.flight_recorder import fr_trace

import torch_ring as hvd
from tests.support.groups import TIMEOUT_S, default_group, group_store, on_ring
from tests.support.pool import error_of, run
from torch_ring import tracing
from torch_ring.collectives.compare import require_same
from torch_ring.tracing.lateness import Straggler
from torch_ring.tracing.page.recording import read_recording
from torch_ring.world import current


def analysed(folder: Path) -> str:
    """Return the output of ``torchfrtrace`` on the dumps in a folder."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logger = logging.getLogger("Flight Recorder")
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(said):
            fr_trace.main([str(folder)])
    finally:
        logger.removeHandler(handler)
    return said.getvalue()


def dumped(folder: Path, rank: int) -> dict[str, Any]:
    """Return the dump of a rank."""
    found = pickle.loads((folder / f"flight_{rank}").read_bytes())
    assert isinstance(found, dict)
    return found


def entries(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the operations in the dump of a rank."""
    found = dumped(folder, rank)["entries"]
    assert isinstance(found, list)
    return found


def functions(frames: list[dict[str, Any]]) -> list[str]:
    return [frame["name"] for frame in frames]


def do_everything(folder: str) -> None:
    values = torch.ones(8, 2)
    pair = hvd.add_process_set([2, 3])  # whose indices are no members
    if pair.included():
        # Rank 3 asks for "late" in a round after that of rank 2, which announced it before "p".
        for name in ("late", "p") if hvd.rank() == 2 else ("p", "late"):
            handle = hvd.allreduce_async(values, name=name, process_set=pair)
            if name == "p":
                hvd.synchronize(handle)
            else:
                late = handle
        hvd.synchronize(late)
    hvd.allreduce(values, name="a")
    hvd.broadcast(values, 0, name="b")
    hvd.allgather(values, name="c")
    hvd.alltoall(torch.ones(hvd.size(), 2), name="d")
    hvd.reducescatter(values, name="e")
    hvd.barrier()
    hvd.allreduce(torch.ones(100_000), name="large")
    tracing.dump(folder)


def test_torchs_analyser_finds_nothing_wrong_with_equal_programs(tmp_path: Path) -> None:
    run(do_everything, 4, transport="tcp", args=(str(tmp_path),))
    text = analysed(tmp_path)
    assert "Not all ranks" not in text, text
    assert "errors" not in text, text
    for rank in range(4):
        mine = entries(tmp_path, rank)
        named = {entry["ring"]["name"]: entry for entry in mine}
        assert [named[name]["state"] for name in ("a", "large")] == ["completed"] * 2
        large = named["large"]
        assert large["input_sizes"] == [[100_000]]
        assert large["ring"]["bytes"] == 400_000
        times = [large[f"time_{each}_ns"] for each in ("created", "discovered_started")]
        times.append(large["time_discovered_completed_ns"])
        assert times == sorted(times)
        assert abs(times[-1] / 1e9 - time.time()) < 600
        assert large["ring"]["transport"] == "tcp"
        assert len({entry["record_id"] for entry in mine}) == len(mine)
        sequences = [entry["collective_seq_id"] for entry in mine if entry["pg_id"] == 0]
        assert sequences == sorted(set(sequences))
        if rank >= 2:
            assert named["late"]["ring"]["last_rank"] == 3


def leave_one_out(folder: str, missing: int) -> None:
    hvd.allreduce(torch.ones(3), name="same")
    names = ["not on all ranks", "on one rank"]
    first, second = names if hvd.rank() != missing else reversed(names)
    handle = hvd.allreduce_async(torch.ones(3), name=first)
    hvd.allreduce(torch.ones(3), name="afterwards")
    tracing.dump(folder)
    hvd.barrier()
    hvd.allreduce(torch.ones(3), name=second)
    hvd.synchronize(handle)


def test_torchs_analyser_finds_a_missing_rank(tmp_path: Path) -> None:
    run(leave_one_out, 3, transport="tcp", args=(str(tmp_path), 1))
    text = analysed(tmp_path)
    assert "Not all ranks joining collective" in text, text
    assert "missing ranks: {1}" in text, text
    assert "missing ranks: {0, 2}" in text, text
    waiting = entries(tmp_path, 0)[-1]
    assert waiting["ring"]["name"] == "not on all ranks"
    assert waiting["state"] == "scheduled"
    assert any(frame["name"] == "leave_one_out" for frame in waiting["frames"])


def dump_into_folders_and_files(folder: Path) -> None:
    hvd.allreduce(torch.ones(3), name="a")
    for _ in range(2):
        assert tracing.dump(folder / "dumps") == folder / "dumps" / f"flight_{hvd.rank()}"
    with pytest.raises(FileNotFoundError):
        tracing.dump(folder / "no such folder" / "x")
    for name in (f"named_{hvd.rank()}", f"named{hvd.rank()}.pickle"):
        assert tracing.dump(folder / name) == folder / name
        assert (folder / name).is_file()
    written = tracing.dump(folder / f"rank{hvd.rank()}.json")
    assert json.loads(written.read_text())["entries"][-1]["ring"]["name"] == "a"


def test_a_dump_is_in_a_new_folder_or_in_a_file_or_in_json(tmp_path: Path) -> None:
    run(dump_into_folders_and_files, 2, args=(tmp_path,))
    assert sorted(os.listdir(tmp_path / "dumps")) == ["flight_0", "flight_1"]
    assert len(list(tmp_path.iterdir())) == 1 + 3 * 2  # and nothing half written


def fail(way: str) -> str:
    hvd.allreduce(torch.ones(3), name="same")
    if way == "departure" and hvd.rank() == 1:
        hvd.shutdown()
        return ""
    size = 3 + hvd.rank() if way == "mismatch" else 3
    kind, text = error_of(lambda: hvd.allreduce(torch.ones(size), name="different"))
    assert kind == ("MismatchError" if way == "mismatch" else "PeerLostError")
    return str(text)


@pytest.mark.parametrize(("transport", "way"), [("shm", "mismatch"), ("tcp", "departure")])
def test_an_error_names_the_file_with_the_failed_operation(
    tmp_path: Path, transport: str, way: str
) -> None:
    folder = tmp_path / "new"
    env = {"TORCH_RING_FLIGHT_DIR": str(folder)}
    errors = run(fail, 2, args=(way,), transport=transport, env=env)
    failed = [each for each in read_recording(folder).operations if each.state == "failed"]
    assert {each.rank for each in failed} == ({0, 1} if way == "mismatch" else {0})
    for each in failed:
        assert (each.kind, each.name) == ("allreduce", "different")
        assert each.error
        assert each.error in errors[each.rank]
        note = f"[the last operations of this rank are in {folder}/flight_{each.rank}]"
        assert note in errors[each.rank]
        # Nothing is in flight: the stack shows the main thread's position.
        assert "fail" in functions(dumped(folder, each.rank)["main_thread"])
        assert "fail" in functions(entries(folder, each.rank)[-1]["frames"])
    if way == "mismatch":
        assert "SIZE_OR_SYNTAX_MISMATCH" in analysed(folder)


def objects_that_differ(folder: Path) -> str:
    """Return the text of an error raised in Python."""
    hvd.allreduce(torch.ones(3), name="a")
    kind, text = error_of(lambda: require_same([f"seed {hvd.rank()}"], "they differ"))
    assert kind == "MismatchError"
    written = dumped(folder, hvd.rank())
    assert "a" in [entry["ring"]["name"] for entry in written["entries"]]
    assert "objects_that_differ" in functions(written["main_thread"])
    return str(hvd.HorovodInternalError(f"another error: {text}"))  # it has the file's name


def test_an_error_that_is_raised_in_python_names_the_file_that_it_has_written(
    tmp_path: Path,
) -> None:
    env = {"TORCH_RING_FLIGHT_DIR": str(tmp_path)}
    for rank, text in enumerate(run(objects_that_differ, 2, args=(tmp_path,), env=env)):
        note = f"[the last operations of this rank are in {tmp_path}/flight_{rank}]"
        assert text.count(note) == 1


@pytest.mark.parametrize(("name", "note"), [("", None), ("file/folder", "could not be written")])
def test_without_a_folder_an_error_stays_as_it_is(
    tmp_path: Path, name: str, note: str | None
) -> None:
    (tmp_path / "file").write_text("")
    env = {"TORCH_RING_FLIGHT_DIR": str(tmp_path / name)} if name else {}
    for error in run(fail, 2, args=("mismatch",), env=env):
        assert "the ranks disagree" in error
        assert "last operations" not in error if note is None else note in error


def send_a_signal(folder: str) -> None:
    if dist.is_initialized():
        dist.all_reduce(torch.ones(3))
    else:
        hvd.allreduce(torch.ones(3))
    os.kill(os.getpid(), signal.SIGUSR2)
    found = dumped(Path(folder), int(os.environ["RANK"]))
    assert found["entries"]
    assert "send_a_signal" in functions(found["main_thread"])


def test_a_signal_writes_a_dump(tmp_path: Path) -> None:
    env = {"TORCH_RING_FLIGHT_DIR": str(tmp_path)}
    run(send_a_signal, 2, args=(str(tmp_path),), env=env)
    on_ring(send_a_signal, 2, str(tmp_path), is_fresh=True, env=env)


def keep_a_handler(folder: str) -> None:
    heard = []
    signal.signal(signal.SIGUSR2, lambda *_: heard.append("the program"))
    hvd.init()
    signal.raise_signal(signal.SIGUSR2)
    assert heard == ["the program"]
    assert os.listdir(folder) == []
    hvd.shutdown()


def test_the_programs_own_handler_stays(tmp_path: Path) -> None:
    env = {"TORCH_RING_FLIGHT_DIR": str(tmp_path)}
    run(keep_a_handler, 1, initialized=False, args=(str(tmp_path),), env=env)


LONG = 100_000  # too long to be sent before there is a receive


def send_round(folder: Path) -> None:
    """Send a short and a long message to the next rank of three; the last receive stays open."""
    engine, rank = current.engine(), hvd.rank()
    ahead, behind = (rank + 1) % 3, (rank + 2) % 3
    long = torch.empty(LONG, dtype=torch.float64)
    receives = [engine.receive(torch.empty(4), behind, 5), engine.receive(long, None, 6)]
    sends = [engine.send(torch.ones(3), ahead, 5), engine.send(torch.ones_like(long), ahead, 6)]
    for each in (*receives, *sends):
        each.wait()
    open_one = engine.receive(torch.empty(2, dtype=torch.int16), None, 7)
    tracing.dump(folder)
    hvd.barrier()  # all have written their dumps before any rank goes on
    engine.send(torch.ones(1, dtype=torch.int16), ahead, 7).wait()
    open_one.wait()
    hvd.barrier()


def test_a_dump_has_the_messages(tmp_path: Path) -> None:
    run(send_round, 3, args=(tmp_path,))
    for rank in range(3):
        found = dumped(tmp_path, rank)["messages"]
        ahead, behind = (rank + 1) % 3, (rank + 2) % 3
        fields = ("number", "direction", "peer", "tag", "dtype", "bytes", "state")
        assert [tuple(each[name] for name in fields) for each in found] == [
            (1, "receive", behind, 5, "float32", 12, "finished"),
            (2, "receive", behind, 6, "float64", 8 * LONG, "finished"),
            (3, "send", ahead, 5, "float32", 12, "finished"),
            (4, "send", ahead, 6, "float64", 8 * LONG, "finished"),
            (5, "receive", None, 7, "int16", 4, "posted"),
        ]
        for each in (found[0], found[1], found[3]):
            assert each["time_posted_ns"] <= each["time_matched_ns"] <= each["time_finished_ns"]
        assert found[4]["time_matched_ns"] is found[4]["time_finished_ns"] is None
    text = analysed(tmp_path)  # they do not disturb torch's analyser
    assert "Not all ranks" not in text, text


LATE_S = 0.1


def use_two_groups(folder: str) -> None:
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    before = tracing.snapshot()
    dist.all_reduce(torch.ones(6, 2))
    if rank > 0:
        dist.broadcast(torch.ones(3), src=1, group=pair)
    if rank == 2:
        dist.recv(torch.empty(3), src=1)
    elif rank == 1:
        dist.send(torch.ones(3), 2)
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    assert work is not None
    work.wait()
    dist.barrier()
    tracing.dump(folder)

    found = tracing.snapshot()
    assert (found.rank, found.size, found.sets) == (rank, 3, {})
    (default,) = (each for each in found.groups.values() if each.ranks == (0, 1, 2))
    (earlier,) = (each for each in before.groups.values() if each.ranks == (0, 1, 2))
    assert "allreduce" not in earlier.operations
    counts = default.operations["allreduce"]
    assert (counts.operations, counts.bytes) == (2, 48 + 400_000)
    assert default.messages["sent"].messages == (rank == 1)
    assert default.messages["received"].messages == (rank == 2)
    pairs = [each for each in found.groups.values() if each.ranks == (1, 2)]
    assert [each.operations["broadcast"].bytes for each in pairs] == [12] * (rank > 0)


def test_operations_and_messages_of_groups_are_dumped_and_counted(tmp_path: Path) -> None:
    on_ring(use_two_groups, 3, str(tmp_path))
    text = analysed(tmp_path)
    assert "Not all ranks" not in text, text
    assert "errors" not in text, text
    for rank in range(3):
        found = dumped(tmp_path, rank)
        assert found["rank"] == rank
        groups = {each["desc"]: each["ranks"] for each in found["pg_config"].values()}
        assert groups["group 0 of torch.distributed"] == "[0, 1, 2]"
        assert ("[1, 2]" in groups.values()) == (rank > 0)
        # torch has barriers of its own in init_process_group() and new_group().
        operations = [entry["profiling_name"] for entry in found["entries"]]
        assert operations.count("gloo:all_reduce") == 2
        assert "gloo:barrier" in operations
    none, (sent,), (received,) = (dumped(tmp_path, rank)["messages"] for rank in range(3))
    assert none == []
    assert (sent["direction"], sent["peer"], sent["bytes"]) == ("send", 2, 12)
    assert (received["direction"], received["peer"], received["bytes"]) == ("receive", 1, 12)
    assert sent["process_group"][1] == received["process_group"][1]


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


@on_ranks(1, initialized=False)
def test_without_world_and_group_there_is_nothing_to_trace() -> None:
    asked = (tracing.snapshot, tracing.stragglers, tracing.report, hvd.stop_timeline)
    for function in (*asked, lambda: tracing.dump("x"), lambda: hvd.start_timeline("x")):
        assert error_of(function)[0] == "NotInitializedError"
