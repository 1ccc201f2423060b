"""Ranks of the launcher that die in the first init() of an elastic job."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from launched_jobs import LaunchedJob, run_job

pytestmark = pytest.mark.launcher

PROGRAM = [sys.executable, str(Path(__file__).with_name("first_init_program.py"))]
PATH = os.pathsep.join(filter(None, sys.path))


def run(*arguments: str, **variables: str) -> tuple[int, list[str], str]:
    """Run a job; return its exit code, the lines of its ranks, and its standard error."""
    code, out, errors = run_job(*arguments, PYTHONPATH=PATH, **variables)
    return code, lines_of(out), errors


def lines_of(out: str) -> list[str]:
    return sorted(line.partition(":")[2] for line in out.splitlines())


@pytest.mark.slow
def test_a_replacement_comes() -> None:
    arguments = ("-np", "2", "--min-np", "1", "--max-np", "2", *PROGRAM, "0:connecting")
    job = LaunchedJob(*arguments, PYTHONPATH=PATH, GROWS_TO="2")
    job.wait_for_error("rank 0 starts on localhost again")
    job.wait_for("process 0.2 is rank 1 of 2")
    assert job.wait() == 0, job.stderr
    job.require_nothing_left()
    assert lines_of(job.stdout) == ["process 0.2 is rank 1 of 2", "process 1.1 is rank 0 of 2"]


@pytest.mark.slow
def test_ranks_of_two_agents_begin() -> None:
    hosts = ("-H", "localhost:2,127.0.0.2:2", "--min-np", "2")
    code, lines, errors = run(*hosts, *PROGRAM, "0:memory", "3:before")
    assert code == 0, errors
    assert lines == ["process 1.1 is rank 0 of 2", "process 2.1 is rank 1 of 2"]


def test_too_few_are_left() -> None:
    code, lines, errors = run("-np", "2", "--min-np", "2", *PROGRAM, "1:arrived")
    assert (code, lines) == (128 + 9, [])
    assert "rank 1 on localhost was ended by SIGKILL: the other ranks are ended" in errors
    assert not re.search(r"\[0\].*\n.*Traceback", errors)
