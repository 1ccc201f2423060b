# SPDX-License-Identifier: Apache-2.0
"""Facts shown by the self-test, and the program of its ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pool
import pytest
import torch
from launcher_commands import TORCHRUN, output_of, start_program
from on_ranks import on_ranks

import torch_ring as hvd
from torch_ring.config import Config
from torch_ring.self_test import command, machine, rank
from torch_ring.setup.network import address_of_interface


@on_ranks(2)
def test_a_wrong_sum_is_seen() -> None:
    rank._check(1000, "cpu")
    right = rank.allreduce

    def wrong(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        result = right(tensor, **options)
        result[7] += 1
        return result

    message = "the allreduce of 1000 elements is wrong in 1 of them, the first is element 7: 30"
    with mock.patch.object(rank, "allreduce", wrong), pytest.raises(RuntimeError, match=message):
        rank._check(1000, "cpu")


def test_versions_of_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher = tmp_path / "srun"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def found(script: str) -> str:
        launcher.write_text(f"#!/bin/sh\n{script}\n")
        launcher.chmod(0o755)
        return str(machine._launcher("srun"))

    for said, version in (
        ("HYDRA build details:\n    Version:       4.2.1\n", "HYDRA build details: Version: 4.2.1"),
        ("mpirun (Open MPI) 5.0.8\n\nReport bugs", "mpirun (Open MPI) 5.0.8"),
    ):
        assert found(f"[ $1 = --version ] && printf '{said}'") == f"{version}; {launcher}"
    refused = found("echo no configuration >&2; exit 3")
    assert "does not say its version: Command" in refused
    assert capfd.readouterr().err == ""


def test_a_run_without_shared_memory_says_why() -> None:
    why = "[torch_ring] rank 1 has no shared memory, so all ranks use TCP: `ulimit -v` allows 9 MiB"
    run = {
        **{"asked_transport": "auto", "ranks": 2, "failure": None, "transport": "tcp"},
        **{"gloo_problem": "torch has no gloo", "allreduce": []},
        "log": [why, "[torch_ring] 2 ranks, by TCP over 127.0.0.1"],
    }
    assert command.run_in_words(run).splitlines() == [
        "2 ranks, auto              allreduce is right, by tcp",
        f"                           {why}",
        "  gloo                     not compared: torch has no gloo",
    ]


def test_a_machine_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown value is no error; a kernel without IPv6 has no list of it."""

    def refuse(*args: Any, **options: Any) -> str:
        raise FileNotFoundError("there is no /proc")

    monkeypatch.setattr(Path, "read_text", refuse)
    found = machine.facts(Config())
    unknown = ("load", "memory_kb", "memory_available_kb", "open_files")
    assert [found["machine"][name] for name in unknown] == [None] * 4
    assert found["nccl"]["path"] is None
    assert found["machine"]["cpus_of_container"] is None
    monkeypatch.setattr(machine, "cpu_quota", lambda: 2.5)
    assert machine.facts(Config())["machine"]["cpus_of_container"] == 2.5
    assert re.search(r"^  load +none$", "\n".join(command._in_words(found)), re.MULTILINE)
    with pytest.raises(hvd.InvalidArgumentError, match="no-such-interface"):
        address_of_interface("no-such-interface")


def be_launched(arguments: list[str]) -> tuple[int, str]:
    """Run the self-test as one of a job's ranks; the last rank finds a wrong sum."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.ExitStack() as stack:
        if os.environ["RANK"] == "1":
            wrong = mock.Mock(side_effect=RuntimeError("the allreduce of 1 elements is wrong"))
            stack.enter_context(mock.patch.object(rank, "_check", wrong))
        return command.main(arguments), output.getvalue()


def test_a_launched_rank_that_fails_fails_all() -> None:
    (first, said), (second, silent) = pool.run(
        be_launched, 2, args=[["--launched", "--json"]], initialized=False
    )
    assert (first, second, silent) == (1, 1, "")
    found = json.loads(said)
    assert (found["passed"], found["runs"]) == (False, [])
    assert "rank 1" in found["problems"][0]


# --- the ranks of a launcher


@pytest.mark.slow
def test_ranks_of_a_launcher() -> None:
    process = start_program([*TORCHRUN, "--nproc-per-node", "2", "-m", "torch_ring", "--launched"])
    output = output_of(process)
    assert process.returncode == 0, output
    line = r"^2 ranks, launched  +allreduce is right, by 2 ranks on one host, by shared memory$"
    assert len(re.findall(line, output, re.MULTILINE)) == 1, output
    assert re.search(r"^  1024 KB  +torch_ring \S+ us \(\S+ GB/s\)$", output, re.MULTILINE), output
    assert output.count("self-test passed\n") == 1
