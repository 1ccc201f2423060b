# SPDX-License-Identifier: Apache-2.0
"""init_scale.py starts worlds, checks their results, reports failures and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launcher_commands import clean_environment
from namespaces import why_none
from pool import eventually
from scripts import DEADLINE_S, ROOT
from waiting_ranks import why_no_mpi

import torch_ring

BENCHMARKS = ROOT / "benchmarks"
PROGRAM = str(BENCHMARKS / "init_scale.py")
END_S = 30.0  # a hang, not a slow machine


@pytest.fixture(scope="module")
def among_hosts() -> list[str]:
    """Return the option that adds two namespaces with two ranks each, if possible."""
    return ["--namespaces", *([] if why_none() else ["2"]), "--ranks-per-host", "2"]


def environment() -> dict[str, str]:
    """Return the variables by which a program imports the benchmarks, and the tested torch_ring."""
    folders = (str(BENCHMARKS), str(Path(torch_ring.__file__).parents[1]))
    return clean_environment(PYTHONPATH=os.pathsep.join(folders))


def rows_of(*arguments: str, folder: Path, jobs: int) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, PROGRAM, *arguments, "--json", "out.json"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=jobs * DEADLINE_S,  # they run one after another
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "out.json").read_text())
    assert "init_scale.py" in report["command"]
    assert report["machine"]["cores"] >= 1
    # The title and the columns, a line for each row, and lines about skipped parts.
    assert len(done.stdout.splitlines()) >= 2 + len(report["rows"])
    return report["rows"]


@pytest.mark.slow
def test_the_start_of_a_world(tmp_path: Path, among_hosts: list[str]) -> None:
    pytest.importorskip("matplotlib")
    options = ["--sizes", "3", "2", "--rounds", "1", "--timeout", "60", *among_hosts]
    here = ["torch_ring", "gloo"] if why_no_mpi() else ["torch_ring", "gloo", "mpi"]
    expected = [(1, size, library) for size in (2, 3) for library in here]
    if "2" in among_hosts[:2]:
        expected += [(2, 4, "torch_ring"), (2, 4, "gloo")]
    rows = rows_of(*options, "--plot", "out.png", folder=tmp_path, jobs=len(expected))
    assert [(row["hosts"], row["ranks"], row["library"]) for row in rows] == expected
    ours = {(row["hosts"], row["ranks"]): row for row in rows if row["library"] == "torch_ring"}
    for row in rows:
        assert (row["error"], row["rounds"]) == (None, 1)
        assert 0 < row["least_s"] <= row["seconds"] <= row["most_s"]
        assert row["mib_a_rank"] > 1
        if row["library"] == "torch_ring":
            assert row["ratio"] is None
        else:
            seconds = ours[row["hosts"], row["ranks"]]["seconds"]
            assert row["ratio"] == pytest.approx(row["seconds"] / seconds)
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_news_of_a_killed_rank(tmp_path: Path, among_hosts: list[str]) -> None:
    options = ["--death", "--sizes", "3", "--timeout", "60", *among_hosts]
    expected = [(1, 3, 2), (1, 3, 0)]
    if "2" in among_hosts[:2]:
        expected += [(2, 4, 3), (2, 4, 0)]
    rows = rows_of(*options, folder=tmp_path, jobs=len(expected))
    assert [(row["hosts"], row["ranks"], row["victim"]) for row in rows] == expected
    for row in rows:
        assert row["error"] is None
        assert (row["heard"], row["otherwise"]) == (row["ranks"] - 1, 0), row
        assert 0 < row["median_ms"] <= row["slowest_ms"] < 60_000
        assert f"rank {row['victim']}" in row["example"]


@contextmanager
def started(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    program = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield program
    finally:
        program.kill()
        program.communicate()


@pytest.mark.slow
def test_an_interrupted_program_leaves_nothing(tmp_path: Path, among_hosts: list[str]) -> None:
    if "2" not in among_hosts[:2]:
        pytest.skip("no network namespaces here")
    options = ["--sizes", *among_hosts, "--peers", "gloo"]
    with started(PROGRAM, *options, "--rounds", "1000", folder=tmp_path) as program:
        assert program.stdout is not None
        while "# hosts" not in program.stdout.readline():
            assert program.poll() is None
        assert eventually(lambda: PROGRAM in commands_of(descendants(program.pid)), END_S)
        assert eventually(lambda: f"bench{program.pid}h1" in namespaces_now(), END_S)
        ranks = descendants(program.pid)
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=END_S)
        assert program.returncode == 1
        assert errors.strip().splitlines()[-1] == "init_scale.py: ended"
        assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert f"bench{program.pid}" not in namespaces_now()
    for folder in ("/dev/shm", tempfile.gettempdir()):
        assert not list(Path(folder).glob(f"waiting_ranks-{program.pid}-*"))


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def commands_of(pids: list[int]) -> str:
    texts = []
    for pid in pids:
        with contextlib.suppress(OSError):
            texts.append(Path(f"/proc/{pid}/cmdline").read_text())
    return "\n".join(texts)


def namespaces_now() -> str:
    folder = Path("/run/netns")
    return " ".join(path.name for path in folder.iterdir()) if folder.is_dir() else ""
