# SPDX-License-Identifier: Apache-2.0
"""Exits of programs: the other ranks' errors, and harmless threads and launchers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from exits_program import WATCHED
from launcher_commands import TORCHRUN, clean_environment, output_of, start_program
from ports import free_port

PROGRAM = Path(__file__).parent / "exits_program.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results():
    """Return by scenario the status and the output of each rank."""
    ended = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=clean_environment(TORCH_RING_TIMEOUT="20", PYTHONPATH=os.pathsep.join(sys.path)),
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
        start_new_session=True,  # its jobs are named by it
    )
    assert ended.returncode == 0
    return json.loads(ended.stdout)


LINE = next(
    number
    for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
    if line.endswith("# marked")
)


@pytest.mark.parametrize(
    ("scenario", "status", "reason"),
    [
        (
            "raise_in_a_library",
            1,
            f"left: AssertionError: no more data at exits_program.py:{LINE}",
        ),
        ("exit_with_a_code", 3, "left: exit code 3 after FileNotFoundError: [Errno 2] No such"),
        ("exit_with_success", 0, "has left: it called shutdown() or exited. All ranks must"),
        ("fail_in_a_process", 0, "left: KeyError: 'weights' at exits_program.py:"),
    ],
)
def test_the_other_ranks_hear_why_a_rank_left(results, scenario, status, reason):
    ((status0, output0), (status1, output1)) = results[scenario]
    assert status0 == 0, output0
    assert os.waitstatus_to_exitcode(status1) == status, output1
    assert "PeerLostError: rank 0: allreduce 'doomed' float32 [3] Average: rank 1 (pid " in output0
    assert reason in output0, output0


@pytest.mark.parametrize("scenario", ["leave_a_thread_waiting", "leave_a_thread_training"])
def test_a_daemon_thread_in_a_collective_does_not_spoil_the_exit(results, scenario):
    for status, output in results[scenario]:
        assert status == 0, output
        assert "terminate" not in output, output
        assert "FATAL" not in output, output


@pytest.mark.parametrize("launcher", WATCHED)
def test_ranks_end_with_a_launcher_that_was_killed(results, launcher):
    for rank, (status, output) in enumerate(results[f"{launcher} 1"]):
        assert status == signal.SIGTERM
        assert f"[torch_ring] rank {rank} (pid " in output, output
        assert f"ends: {launcher} (pid " in output, output
        assert "which has started it, has died. TORCH_RING_EXIT_WITH_LAUNCHER=0" in output


@pytest.mark.launcher
def test_ranks_end_with_an_agent_of_torchrun_that_was_killed():
    program = PROGRAM.with_name("orphaned_rank.py")
    agent = start_program(
        [*TORCHRUN, "--nproc-per-node", "2", str(program)], PYTHONPATH=os.pathsep.join(sys.path)
    )
    output = output_of(agent)  # after the ranks have ended, too, which hold the other end
    assert agent.returncode == -signal.SIGKILL, output
    assert "has outlived its agent" not in output
    for rank in range(2):
        assert f"[torch_ring] rank {rank} (pid " in output, output
    assert output.count(f"torchrun (pid {agent.pid}), which has started it, has died") == 2, output


@pytest.mark.parametrize("how", ["mpirun 0", "bash 1"])
def test_ranks_outlive_a_launcher_if_told_and_a_shell(results, how):
    for status, output in results[how]:
        assert status == 0, output
        assert "goes on: [1.0, 1.0, 1.0]" in output
        assert "has died" not in output


def test_a_process_that_exits_has_no_control_plane_any_more():
    """OpenSSL frees its memory then, which no other thread may use."""
    program = str(Path(__file__).with_name("exit_in_init_program.py"))
    variables = {
        **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        **{"MASTER_PORT": str(free_port()), "TORCH_RING_TRANSPORT": "tcp", "TORCH_RING_TLS": "1"},
        **{"TORCH_RING_SECRET": "of this test", "PYTHONPATH": os.pathsep.join(sys.path)},
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, program],
            env=clean_environment(RANK=str(rank), LOCAL_RANK=str(rank), **variables),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        begun, left = map(int, ranks[0].communicate(timeout=120)[0].split())
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode == 0
    assert begun > 0
    assert left == 0
