# SPDX-License-Identifier: Apache-2.0
"""Exits of interpreters: the other ranks' errors, and harmless threads and launchers."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_commands import TORCHRUN, output_of, start_program
from ports import free_port

PROGRAM = Path(__file__).parent / "exits_program.py"
PYTHONPATH = os.pathsep.join(sys.path)
pytestmark = pytest.mark.slow


def start_ranks(*command: str, **more: str) -> list[subprocess.Popen[str]]:
    """Start both ranks of a job."""
    variables = {
        **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        **{"MASTER_PORT": str(free_port()), "PYTHONPATH": PYTHONPATH, **more},
    }
    return [
        start_program([sys.executable, *command], RANK=str(rank), LOCAL_RANK=str(rank), **variables)
        for rank in range(2)
    ]


LINE = next(
    number
    for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
    if line.endswith("# marked")
)
FAILED = f"left: AssertionError: no more data at exits_program.py:{LINE}"
REASONS = {
    "raise_in_a_library": (1, FAILED),
    "exit_with_a_code": (3, "left: exit code 3 after FileNotFoundError: [Errno 2] No such"),
    "exit_with_success": (0, "has left: it called shutdown() or exited. All ranks must"),
    "in_a_process": (0, FAILED),
}
"""Exits of rank 1: its status, and its reason, which rank 0 hears."""
THREADS = ["leave_a_thread", "train_in_a_thread"]
"""Exits during which a daemon thread is in a collective."""


@pytest.fixture(scope="module")
def ended() -> list[dict[str, tuple[str, int]]]:
    """By rank and by the way to exit: the output and the status."""
    found = []
    for rank in start_ranks(str(PROGRAM), ",".join([*REASONS, *THREADS])):
        parts = re.split(r"--- (\w+) has ended: (.*)\n", output_of(rank, jobs=2))
        outputs, ways, statuses = parts[:-1:3], parts[1::3], map(int, parts[2::3])
        found.append(dict(zip(ways, zip(outputs, statuses, strict=True), strict=True)))
    return found


@pytest.mark.parametrize("how", REASONS)
def test_the_other_ranks_hear_why_a_rank_left(ended, how):
    (output, own_status), (own, status) = (rank[how] for rank in ended)
    wanted, reason = REASONS[how]
    assert (own_status, status) == (0, wanted), own
    assert "PeerLostError: rank 0: allreduce 'doomed' float32 [3] Average: rank 1 (pid " in output
    assert reason in output, output


@pytest.mark.parametrize("how", THREADS)
def test_a_daemon_thread_in_a_collective_does_not_spoil_the_exit(ended, how):
    for output, status in (rank[how] for rank in ended):
        assert status == 0, output
        assert "terminate" not in output, output
        assert "FATAL" not in output, output


VARIABLES = {
    "OMPI_COMM_WORLD_RANK": "$rank",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "$rank",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": f"exits-{os.getpid()}",
}


@pytest.mark.parametrize(
    ("launcher", "watches", "ends"),
    [("mpirun", "1", True), ("torchrun", "1", True), ("mpirun", "0", False)],
)
def test_ranks_end_with_a_launcher_that_was_killed(launcher, watches, ends, tmp_path):
    """Not if they are told otherwise. tests/setup/test_identity.py has more launchers.

    The launcher, which a rank kills, is a shell of its name, or the real one.
    """
    program = [str(PROGRAM), "kill_the_launcher", "60" if ends else "1"]
    command = [*TORCHRUN, "--nproc-per-node", "2", *program]
    if launcher != "torchrun":
        shell = tmp_path / launcher
        shell.symlink_to(shutil.which("bash") or "bash")
        start = [*(f"{name}={value}" for name, value in VARIABLES.items()), sys.executable]
        script = f"for rank in 0 1; do {' '.join([*start, *program])} & done; wait"
        command = [str(shell), "-c", script]
    # Also that of ranks that outlive the launcher: they hold the other end.
    variables = {"PYTHONPATH": PYTHONPATH, "TORCH_RING_EXIT_WITH_LAUNCHER": watches}
    output = output_of(start_program(command, **variables))
    assert output.count("goes on: [1.0, 1.0, 1.0]") == (0 if ends else 2), output
    assert output.count(f": {launcher} (pid ") == (2 if ends else 0), output
    for rank in range(2) if ends else ():
        assert f"[torch_ring] rank {rank} (pid " in output, output


def test_a_process_that_exits_has_no_control_plane_any_more():
    """OpenSSL frees its memory then, which no other thread may use."""
    program = str(PROGRAM.with_name("exit_in_init_program.py"))
    tls = {"TORCH_RING_TLS": "1", "TORCH_RING_SECRET": "of this test"}
    ranks = start_ranks(program, TORCH_RING_TRANSPORT="tcp", **tls)
    try:
        begun, left = map(int, output_of(ranks[0]).split())
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode == 0
    assert begun > 0
    assert left == 0
