"""Dumps of the last operations: the findings of torch's analyser, and the times of dumps."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import error_of, run
from slow import on_shm_and_slowly_on_tcp

import torch_ring as hvd
from torch_ring import errors, tracing
from torch_ring.collectives.compare import require_same
from torch_ring.tracing.page.recording import read_recording


def analysed(folder: Path, *options: str) -> str:
    """Return the output of ``torchfrtrace`` on the dumps in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), *options],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


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
    values = torch.ones(6, 2)
    hvd.allreduce(values, name="a")
    hvd.broadcast(values, 0, name="b")
    hvd.allgather(values, name="c")
    hvd.alltoall(torch.ones(hvd.size(), 2), name="d")
    hvd.reducescatter(values, name="e")
    hvd.barrier()
    hvd.allreduce(torch.ones(100_000), name="large")
    tracing.dump(folder)


@pytest.mark.slow
@on_shm_and_slowly_on_tcp
def test_torchs_analyser_finds_nothing_wrong_with_equal_programs(
    tmp_path: Path, transport: str
) -> None:
    run(do_everything, 2, transport=transport, args=(str(tmp_path),))
    text = analysed(tmp_path)
    assert "Not all ranks" not in text, text
    assert "errors" not in text, text
    for rank in range(2):
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
        assert large["ring"]["transport"] == transport
        sequences = [entry["collective_seq_id"] for entry in mine]
        assert sequences == sorted(set(sequences))


def disagree(folder: str) -> None:
    hvd.allreduce(torch.ones(3), name="same")
    with pytest.raises(hvd.MismatchError):
        hvd.allreduce(torch.ones(3 + hvd.rank()), name="different")
    tracing.dump(folder)


@pytest.mark.slow
def test_torchs_analyser_finds_a_mismatch(tmp_path: Path) -> None:
    run(disagree, 2, args=(str(tmp_path),))
    text = analysed(tmp_path)
    assert "SIZE_OR_SYNTAX_MISMATCH" in text, text
    assert entries(tmp_path, 1)[-1]["ring"]["state"] == "failed"
    assert "the ranks disagree" in entries(tmp_path, 1)[-1]["ring"]["error"]


def leave_one_out(folder: str, missing: int) -> None:
    hvd.allreduce(torch.ones(3), name="same")
    handle = None
    if hvd.rank() != missing:
        handle = hvd.allreduce_async(torch.ones(3), name="not on all ranks")
    hvd.allreduce(torch.ones(3), name="afterwards")
    tracing.dump(folder)
    hvd.barrier()
    hvd.synchronize(handle or hvd.allreduce_async(torch.ones(3), name="not on all ranks"))


@pytest.mark.slow
def test_torchs_analyser_finds_a_missing_rank(tmp_path: Path) -> None:
    run(leave_one_out, 3, transport="tcp", args=(str(tmp_path), 1))
    text = analysed(tmp_path)
    assert "Not all ranks joining collective" in text, text
    assert "missing ranks: {1}" in text, text
    waiting = entries(tmp_path, 0)[-1]
    assert waiting["ring"]["name"] == "not on all ranks"
    assert waiting["state"] == "scheduled"
    assert any(frame["name"] == "leave_one_out" for frame in waiting["frames"])


def write_json(folder: str) -> None:
    hvd.allreduce(torch.ones(3), name="a")
    written = tracing.dump(Path(folder) / f"rank{hvd.rank()}.json")
    assert json.loads(written.read_text())["entries"][-1]["ring"]["name"] == "a"
    with pytest.raises(FileNotFoundError):
        tracing.dump(Path(folder) / "no such folder" / "x")
    assert sorted(os.listdir(folder)) == ["rank0.json"]


def dump_into_new_folders(folder: str) -> None:
    hvd.allreduce(torch.ones(3), name="a")
    new = Path(folder) / "dumps"
    for _ in range(2):
        assert tracing.dump(new) == new / f"flight_{hvd.rank()}"
    hvd.barrier()
    assert {path.name for path in new.iterdir()} == {f"flight_{n}" for n in range(hvd.size())}
    for name in (f"named_{hvd.rank()}", f"named{hvd.rank()}.pickle"):
        assert tracing.dump(Path(folder) / name) == Path(folder) / name
        assert (Path(folder) / name).is_file()


def test_a_dump_makes_its_folder(tmp_path: Path) -> None:
    run(dump_into_new_folders, 3, args=(str(tmp_path),))


def fail_with_a_dump(folder: str, way: str) -> str:
    """Return the error of a rank whose dump is written with it."""
    hvd.allreduce(torch.ones(3), name="same")
    if way == "mismatch":
        with pytest.raises(hvd.MismatchError) as caught:
            hvd.allreduce(torch.ones(3 + hvd.rank()), name="different")
    else:
        if hvd.rank() == 1:
            hvd.shutdown()
            return ""
        with pytest.raises(hvd.PeerLostError) as caught:
            hvd.allreduce(torch.ones(3), name="different")
    assert str(Path(folder) / f"flight_{hvd.rank()}") in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("way", ["mismatch", "departure"])
def test_the_page_of_a_failed_job_shows_the_operation_and_its_error(
    tmp_path: Path, transport: str, way: str
) -> None:
    env = {"TORCH_RING_FLIGHT_DIR": str(tmp_path)}
    errors = run(fail_with_a_dump, 2, args=(str(tmp_path), way), transport=transport, env=env)
    failed = [each for each in read_recording(tmp_path).operations if each.state == "failed"]
    assert {each.rank for each in failed} == ({0, 1} if way == "mismatch" else {0})
    for each in failed:
        assert (each.kind, each.name) == ("allreduce", "different")
        assert each.error
        assert each.error in errors[each.rank]


def test_json(tmp_path: Path) -> None:
    run(write_json, 1, args=(str(tmp_path),))


def disagree_in_json(folder: str) -> None:
    hvd.allreduce(torch.ones(3), name="same")
    with pytest.raises(hvd.MismatchError):
        hvd.allreduce(torch.ones(3 + hvd.rank()), name="different")
    tracing.dump(Path(folder) / f"rank{hvd.rank()}.json")


@pytest.mark.slow
def test_torchs_analyser_finds_the_same_in_what_was_written_as_json(tmp_path: Path) -> None:
    """The analyser reads only pickles."""
    run(disagree_in_json, 2, args=(str(tmp_path),))
    pickles = tmp_path / "pickles"
    pickles.mkdir()
    for rank in range(2):
        content = json.loads((tmp_path / f"rank{rank}.json").read_text())
        (pickles / f"flight_{rank}").write_bytes(pickle.dumps(content))
    assert "SIZE_OR_SYNTAX_MISMATCH" in analysed(pickles)


def text_of_a_mismatch() -> str:
    kind, text = error_of(lambda: hvd.allreduce(torch.ones(3 + hvd.rank()), name="x"))
    assert kind == "MismatchError"
    return str(text)


def test_an_error_names_the_file_that_it_has_written(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    errors = run(text_of_a_mismatch, 2, env={"TORCH_RING_FLIGHT_DIR": str(folder)})
    for rank, error in enumerate(errors):
        assert f"[the last operations of this rank are in {folder}/flight_{rank}]" in error
        assert entries(folder, rank)[-1]["ring"]["name"] == "x"
        # Nothing is in flight: the stack shows the main thread's position.
        assert "text_of_a_mismatch" in functions(dumped(folder, rank)["main_thread"])
        assert "text_of_a_mismatch" in functions(entries(folder, rank)[-1]["frames"])
    assert "SIZE_OR_SYNTAX_MISMATCH" in analysed(folder)


def objects_that_differ(folder: str) -> list[str]:
    """Return the texts of errors raised in Python."""
    hvd.allreduce(torch.ones(3), name="a")
    kind, text = error_of(lambda: require_same([f"seed {hvd.rank()}"], "they differ"))
    assert kind == "MismatchError"
    written = dumped(Path(folder), hvd.rank())
    assert "a" in [entry["ring"]["name"] for entry in written["entries"]]
    assert "objects_that_differ" in functions(written["main_thread"])
    (Path(folder) / f"flight_{hvd.rank()}").unlink()
    told = hvd.HorovodInternalError(f"another error: {text}")  # it already has the file's name
    assert not (Path(folder) / f"flight_{hvd.rank()}").exists()
    return [text, str(told)]


def test_an_error_that_is_raised_in_python_names_the_file_that_it_has_written(
    tmp_path: Path,
) -> None:
    env = {"TORCH_RING_FLIGHT_DIR": str(tmp_path)}
    for rank, texts in enumerate(run(objects_that_differ, 2, args=(str(tmp_path),), env=env)):
        for text in texts:
            assert (
                text.count(f"[the last operations of this rank are in {tmp_path}/flight_{rank}]")
                == 1
            )


def cannot_write() -> str:
    """The note of an error raises another one."""

    def refuse() -> str:
        return str(hvd.HorovodInternalError("inner"))

    errors.add_to_texts(refuse)
    try:
        return str(hvd.HorovodInternalError("outer "))
    finally:
        errors._notes.remove(refuse)


def test_the_note_of_an_error_has_no_note() -> None:
    assert cannot_write() == "outer inner"


def test_without_a_folder_nothing_is_written() -> None:
    for error in run(text_of_a_mismatch, 2):
        assert "the ranks disagree" in error
        assert "last operations" not in error


def test_a_folder_that_cannot_be_made_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "folder"
    for error in run(text_of_a_mismatch, 2, env={"TORCH_RING_FLIGHT_DIR": str(folder)}):
        assert "the ranks disagree" in error
        assert "could not be written" in error


def signalled(folder: str) -> None:
    hvd.allreduce(torch.ones(3), name="a")
    logging.getLogger("torch_ring").setLevel("ERROR")
    handle = hvd.allreduce_async(torch.ones(3), name="late") if hvd.rank() == 0 else None
    if hvd.rank() == 1:
        deadline = time.monotonic() + 30
        while not (Path(folder) / "flight_0").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        handle = hvd.allreduce_async(torch.ones(3), name="late")
    else:
        signal.raise_signal(signal.SIGUSR2)
    assert handle is not None
    hvd.synchronize(handle)


def test_a_signal_writes_a_dump(tmp_path: Path) -> None:
    run(signalled, 2, args=(str(tmp_path),), env={"TORCH_RING_FLIGHT_DIR": str(tmp_path)})
    waiting = entries(tmp_path, 0)[-1]
    assert waiting["ring"]["name"] == "late"
    assert waiting["state"] == "scheduled"
    assert "signalled" in functions(dumped(tmp_path, 0)["main_thread"])
