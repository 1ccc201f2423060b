# SPDX-License-Identifier: Apache-2.0
"""The self-test, ``python -m torch_ring``: in words and as JSON, and its reports of failures."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pool
import pytest
import torch
from scripts import ROOT

import torch_ring as hvd
from torch_ring.config import Config
from torch_ring.self_test import command, machine, rank
from torch_ring.setup.ucx import own_ucx

DEADLINE_S = 120  # of one of its runs, or of its start
SECRET = "a-word-that-nobody-may-read"
FIGURES = r"torch_ring \S+ us(?: \(\S+ GB/s\))?; gloo \S+ us; torch_ring is \S+ times as fast"


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch_ring", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell ignores SIGINT for background processes, and so would this one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def processes_below(pid: int) -> set[int]:
    return {int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"  # its parent was killed: its new parent will reap it


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file in /dev/shm or in the folder for temporary ones, and no rank."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "temporary").mkdir()
    files, children = pool.shared_files(), processes_below(os.getpid())
    yield
    left = pool.shared_files() - files
    assert pool.are_gone(left), left
    assert processes_below(os.getpid()) <= children
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.slow
def test_in_words_and_without_the_secret() -> None:
    # Variables of a shell inside another job, to which the self-test's ranks do not belong.
    job = {"MASTER_ADDR": "192.0.2.77", "RANK": "0", "WORLD_SIZE": "64"}
    secrets = {"TORCH_RING_SECRET": SECRET, "TORCH_RING_SERCET": SECRET}
    settings = {"TORCH_RING_CONNECTIONS": "2", "HOROVOD_SECRET_KEY": SECRET}
    process = start("--timeout", str(DEADLINE_S), **job, **secrets, **settings)
    output, errors = process.communicate(timeout=3 * DEADLINE_S)
    assert (process.returncode, errors) == (0, ""), output + errors
    assert SECRET not in output
    for line in (
        rf"torch_ring {re.escape(hvd.__version__)}: self-test \(put all of it in a bug report\)",
        rf"  torch  +{re.escape(torch.__version__)}",
        r"  cpu  +.*",
        r"  started_by  +env: rank 0 of 64",
        r"    MASTER_ADDR +192.0.2.77",
        r"    TORCH_RING_CONNECTIONS +2",
        r"    TORCH_RING_SECRET +\(set, not shown\)",
        r"    TORCH_RING_SERCET +\(not a setting of torch_ring\)",
        r"  secret  +set",
        r"2 ranks, auto  +allreduce is right, by shm",
        r"2 ranks, tcp  +allreduce is right, by tcp",
    ):
        assert re.search(rf"^{line}$", output, re.MULTILINE), f"{line}\n{output}"
    for size in ("1 KB", "1024 KB"):
        found = re.findall(rf"^  {size} +{FIGURES}$", output, re.MULTILINE)
        assert len(found) == 2, output
    assert output.endswith("\nself-test passed\n")


def keys_of(value: Any, above: str = "") -> set[str]:
    """Return the paths of an object's keys that are the same on each machine."""
    if isinstance(value, list):
        return set().union(*(keys_of(each, f"{above}[]") for each in value))
    if not isinstance(value, dict) or above.endswith("variables"):
        return set()
    paths = set()
    for key, below in value.items():
        path = f"{above}.{key}" if above else key
        paths |= {path} | keys_of(below, path)
    return paths


@pytest.mark.slow
def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json", "--timeout", str(DEADLINE_S)]) == 0
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert output.err == ""
    assert (found["passed"], found["problems"]) == (True, [])
    assert found["torch_ring"]["native_module"] == hvd._C.__file__
    assert found["python"]["torch"] == torch.__version__
    assert found["machine"]["cpus_allowed"] == sorted(os.sched_getaffinity(0))
    shm, tcp = found["runs"]
    assert (shm["asked_transport"], shm["transport"], shm["ranks"]) == ("auto", "shm", 2)
    assert (tcp["asked_transport"], tcp["transport"], tcp["ranks"]) == ("tcp", "tcp", 2)
    for run in found["runs"]:
        assert [row["bytes"] for row in run["allreduce"]] == [1 << 10, 1 << 20]
        assert all(row["torch_ring_us"] > 0 and row["gloo_us"] > 0 for row in run["allreduce"])

    page = (ROOT / "docs" / "self-test.md").read_text().partition("## JSON")[2]
    rows = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    documented = {key for row in rows for key in row.split(", ")}
    assert keys_of(found) == documented


# --- failures


def test_a_wrong_setting_fails_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_RING_TIMEOUT", "soon")
    problem = "TORCH_RING_TIMEOUT='soon': must be a number from 0 to 1e+08"
    assert command.main([]) == 1
    assert capsys.readouterr().out.endswith(f"\nself-test FAILED: {problem}\n")
    assert command.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["problems"], found["runs"]) == (False, [problem], [])


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("echo 'ImportError: built for torch 2.11' >&2; exit 1", "rank 0: ImportError: built for"),
        ("kill -KILL $$", "rank 0: was ended by SIGKILL"),
        ("exec sleep 1000", "rank 0, rank 1 did not end within 1 s"),
        (None, r"rank 0 cannot be started: .*No such file"),
        (
            'if [ "$3" = 1 ]; then echo \'{"failure": "RingError: no memory"}\'; exit 1; fi; '
            'echo \'{"failure": "PeerLostError: rank 1 died"}\'; exit 1',
            "rank 1: RingError: no memory",
        ),
        ('if [ "$3" = 1 ]; then exit 3; fi; exec sleep 1000', "rank 1: ended with exit code 3"),
    ],
)
def test_ranks_that_fail_are_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str | None,
    failure: str,
) -> None:
    """Each rank runs a shell instead of Python."""
    interpreter = tmp_path / "python"
    if program:
        interpreter.write_text(f"#!/bin/sh\n{program}\n")
        interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    # Only ranks that do not end may exceed the time.
    if program and "sleep" in program:
        monkeypatch.setattr(rank, "_GRACE_S", 0.2)
    timeout = "1" if program == "exec sleep 1000" else "60"
    assert command.main(["--timeout", timeout]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    before = "self-test FAILED: 2 local ranks with TORCH_RING_TRANSPORT=auto: "
    assert re.match(before + failure, last), last


@pytest.mark.slow
def test_ranks_say_why_they_cannot_begin(capsys: pytest.CaptureFixture[str]) -> None:
    """All ranks exit on their own, with the library's error."""
    broken = {"TORCH_RING_CONNECTIONS": "0"}
    real = rank._environment
    with mock.patch.object(rank, "_environment", lambda *args: real(*args) | broken):
        assert command.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    for run in found["runs"]:
        assert re.match(r"rank \d: InvalidArgumentError: TORCH_RING_CONNECTIONS", run["failure"])
    assert len(found["problems"]) == 2


@pytest.mark.slow
def test_its_end_is_that_of_its_ranks() -> None:
    process = start("--timeout", str(DEADLINE_S))
    try:
        lines = iter(process.stdout.readline, "")  # type: ignore[union-attr]
        assert any(line.startswith("gpus") for line in lines)
        assert pool.eventually(lambda: len(processes_below(process.pid)) == 2, 20)
        ranks = processes_below(process.pid)
        assert pool.eventually(lambda: any(map(has_begun, ranks)), DEADLINE_S)
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)  # it does not end on its own
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.communicate()
    ended = pool.eventually(lambda: all(map(is_gone, ranks)), 20)
    for pid in [] if ended else ranks:
        os.kill(pid, signal.SIGKILL)
    assert ended
    assert process.returncode == 130, f"{output}{errors}"
    assert errors == "torch_ring: the self-test was interrupted\n"


def has_begun(rank: int) -> bool:
    output = Path(f"/proc/{rank}/fd/2")
    # Until the process has become the rank, this is the pipe of the self-test.
    is_of_rank = str(output.readlink()).startswith("/memfd:")
    return is_of_rank and "2 ranks on one host" in output.read_text()


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, problem in (
        (["--ranks", "1"], "'1': must be a whole number, 2 or more"),
        (["--timeout", "0"], "'0': must be a number of seconds, 1 to 3600"),
    ):
        with pytest.raises(SystemExit) as left:
            command.main(arguments)
        assert left.value.code == 2
        assert problem in capsys.readouterr().err


def test_only_the_first_rank_of_a_launcher_runs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command.main([]) == 0
    assert capsys.readouterr().out == ""


# --- missing parts of a machine


def test_two_gpus_are_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def run_ranks(size: int, transport: str, deadline_s: float, device: str = "cpu") -> Any:
        tried.append((size, transport, device))
        return {
            **{"asked_transport": transport, "ranks": size, "failure": None, "log": []},
            **{"transport": "nccl", "gloo_problem": None, "allreduce": []},
        }

    monkeypatch.setattr(command, "run_ranks", run_ranks)
    for names, not_tested in ((["A"], True), (["A", "B"], False)):
        found = {"problem": None, "names": names}
        monkeypatch.setattr(machine, "gpus", lambda found=found: found)
        tried.clear()
        assert command.main(["--ranks", "4"]) == 0
        assert (tried[2:] == []) == not_tested
        assert ("not tested here: an allreduce by NCCL" in capsys.readouterr().out) == not_tested
    assert tried[2] == (2, "auto", "cuda")


@pytest.mark.weekly
def test_over_ucx(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_ucx(Config.from_environment())
    if not own[:1].isdigit():
        pytest.skip(own)
    monkeypatch.setenv("TORCH_RING_NETWORK", "ucx")
    assert command.main(["--json", "--timeout", str(DEADLINE_S)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ucx"]["problem"] is None
    run = found["runs"][2]
    assert (run["asked_transport"], run["transport"], run["ranks"]) == ("ucx", "ucx", 2)
