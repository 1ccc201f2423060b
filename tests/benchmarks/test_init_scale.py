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


def python(*arguments: str, folder: Path, jobs: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=jobs * DEADLINE_S,  # they run one after another
        check=False,
    )


def environment() -> dict[str, str]:
    """Return the variables by which a program imports the benchmarks, and the tested torch_ring."""
    folders = (str(BENCHMARKS), str(Path(torch_ring.__file__).parents[1]))
    return clean_environment(PYTHONPATH=os.pathsep.join(folders))


def rows_of(*arguments: str, folder: Path, jobs: int) -> list[dict[str, Any]]:
    done = python(PROGRAM, *arguments, "--json", "out.json", folder=folder, jobs=jobs)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "out.json").read_text())
    assert "init_scale.py" in report["command"]
    assert report["machine"]["cores"] >= 1
    # The title and the columns, a line for each row, and lines about skipped parts.
    assert len(done.stdout.splitlines()) >= 2 + len(report["rows"])
    return report["rows"]


# --- the measurements


@pytest.mark.slow
def test_the_start_of_a_world(tmp_path: Path, among_hosts: list[str]) -> None:
    plot = ["--plot", "out.png"] if has_matplotlib() else []
    options = ["--sizes", "3", "2", "--rounds", "2", "--timeout", "60", *among_hosts, *plot]
    here = ["torch_ring", "gloo"] if why_no_mpi() else ["torch_ring", "gloo", "mpi"]
    expected = [(1, size, library) for size in (2, 3) for library in here]
    if "2" in among_hosts[:2]:
        expected += [(2, 4, "torch_ring"), (2, 4, "gloo")]
    rows = rows_of(*options, folder=tmp_path, jobs=len(expected))
    assert [(row["hosts"], row["ranks"], row["library"]) for row in rows] == expected
    ours = {(row["hosts"], row["ranks"]): row for row in rows if row["library"] == "torch_ring"}
    for row in rows:
        assert row["error"] is None
        assert row["rounds"] == 2
        assert 0 < row["least_s"] <= row["seconds"] <= row["most_s"]
        assert row["mib_a_rank"] > 1
        if row["library"] == "torch_ring":
            assert row["ratio"] is None
        else:
            seconds = ours[row["hosts"], row["ranks"]]["seconds"]
            assert row["ratio"] == pytest.approx(row["seconds"] / seconds)
    if plot:
        assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


def has_matplotlib() -> bool:
    try:
        import matplotlib
    except ImportError:
        return False
    return bool(matplotlib)


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


# --- failures


FORKED = """
import os, sys, time
from waiting_ranks import WorldError, forked

def body(line):
    line.report(pid=os.getpid())
    line.wait()
    if line.rank != 1:
        line.report()
    time.sleep(100)

with forked(3, body, lambda rank: {}) as ranks:
    print(*(report["pid"] for report in ranks.gather(10)), flush=True)
    ranks.open_gate()
    try:
        ranks.gather(0.5)
    except WorldError as error:
        sys.exit(str(error))
"""


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_ranks_end_with_a_program_that_is_killed(tmp_path: Path) -> None:
    text = FORKED.replace("ranks.gather(0.5)", "time.sleep(100)")
    with started("-c", text, folder=tmp_path) as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(alive(pids)) == 3
        program.kill()
        program.wait()
        assert eventually(lambda: not alive(pids), END_S)


def test_variables_that_fail_end_the_program_and_no_rank_goes_on_as_it(tmp_path: Path) -> None:
    text = FORKED.replace("lambda rank: {}", "lambda rank: {'RANK': [0][rank]}")
    text = text.replace(
        "with forked", "import atexit; atexit.register(print, 'ended')\nwith forked"
    )
    done = python("-c", text, folder=tmp_path, jobs=1)
    assert done.returncode == 1
    assert "IndexError" in done.stderr.splitlines()[-1]
    assert done.stdout == "ended\n"


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
@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("mpi", signal.SIGTERM),
        ("namespaces", signal.SIGINT),
    ],
)
def test_an_interrupted_program_leaves_nothing(
    tmp_path: Path, among_hosts: list[str], what: str, how: signal.Signals
) -> None:
    if what == "mpi" and (missing := why_no_mpi()):
        pytest.skip(missing)
    if what == "namespaces" and "2" not in among_hosts[:2]:
        pytest.skip("no network namespaces here")
    options = {
        "mpi": ["--sizes", "4", "--namespaces", "--peers", "mpi"],
        "namespaces": ["--sizes", *among_hosts, "--peers", "gloo"],
    }[what]
    with started(PROGRAM, *options, "--rounds", "1000", folder=tmp_path) as program:
        assert program.stdout is not None
        while "# hosts" not in program.stdout.readline():
            assert program.poll() is None
        # Then mpirun runs, or ranks do, in namespaces if there are any.
        of_kind = "mpirun" if what == "mpi" else PROGRAM
        assert eventually(lambda: of_kind in commands_of(descendants(program.pid)), END_S)
        if what == "namespaces":
            assert eventually(lambda: f"bench{program.pid}h1" in namespaces_now(), END_S)
        ranks = descendants(program.pid)
        program.send_signal(how)
        _, errors = program.communicate(timeout=END_S)
        assert program.returncode == 1
        assert errors.strip().splitlines()[-1] == "init_scale.py: ended"
        assert eventually(lambda: not alive(ranks))
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
