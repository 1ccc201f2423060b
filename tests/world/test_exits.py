# SPDX-License-Identifier: Apache-2.0
"""Exits of interpreters: the other ranks' errors, and harmless threads and launchers."""

import os
import shlex
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


@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        ("raise_in_a_library", 1, FAILED),
        ("exit_with_a_code", 3, "left: exit code 3 after FileNotFoundError: [Errno 2] No such"),
        ("exit_with_success", 0, "has left: it called shutdown() or exited. All ranks must"),
        ("in_a_process", 0, FAILED),
    ],
)
def test_the_other_ranks_hear_why_a_rank_left(how, status, reason):
    ranks = start_ranks(str(PROGRAM), how)
    output, own = map(output_of, ranks)
    assert [rank.returncode for rank in ranks] == [0, status], own
    assert "PeerLostError: rank 0: allreduce 'doomed' float32 [3] Average: rank 1 (pid " in output
    assert reason in output, output


@pytest.mark.parametrize(
    ("how", "fail"),
    [
        # The thread needs longer to return from its call than the interpreter needs to exit.
        ("leave_a_thread", "waited:1:2:sleep=1500"),
        ("train_in_a_thread", ""),
    ],
)
def test_a_daemon_thread_in_a_collective_does_not_spoil_the_exit(how, fail):
    ranks = start_ranks(str(PROGRAM), how, TORCH_RING_FAIL=fail)
    for rank in ranks:
        output = output_of(rank)
        assert rank.returncode == 0, output
        assert "terminate" not in output, output
        assert "FATAL" not in output, output


VARIABLES = {
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "{}",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "exits-{pid}",
    },
    "hydra_pmi_proxy": {
        "PMI_RANK": "{}",
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": "{}",
        "MPI_LOCALNRANKS": "2",
    },
    "slurmstepd": {
        "SLURM_PROCID": "{}",
        "SLURM_LOCALID": "{}",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "exits-{pid}",
        "SLURM_STEP_ID": "0",
    },
}


def output_below(name: str, folder: Path, seconds: int, watches: str) -> str:
    """Return the output of ranks whose launcher they kill: a shell of its name."""
    variables = VARIABLES.get(name, VARIABLES["mpirun"])
    program = shlex.join([sys.executable, str(PROGRAM), "kill_the_launcher", str(seconds)])
    script = ""
    for rank in range(2):
        values = {key: value.format(rank, pid=os.getpid()) for key, value in variables.items()}
        script += " ".join(f"{key}={value}" for key, value in values.items()) + f" {program} &\n"
    shell = folder / name
    shell.symlink_to(shutil.which("bash") or "bash")
    job = start_program(
        [str(shell), "-c", script + "wait"],
        PYTHONPATH=PYTHONPATH,
        TORCH_RING_EXIT_WITH_LAUNCHER=watches,
    )
    return output_of(job)  # after the ranks have ended, too, which hold the other end


@pytest.mark.parametrize("launcher", [*VARIABLES, "torchrun"])
def test_ranks_end_with_a_launcher_that_was_killed(launcher, tmp_path):
    if launcher == "torchrun":
        command = [*TORCHRUN, "--nproc-per-node", "2", str(PROGRAM), "kill_the_launcher", "60"]
        output = output_of(start_program(command, PYTHONPATH=PYTHONPATH))
    else:
        output = output_below(launcher, tmp_path, 60, "1")
    assert "goes on" not in output, output
    for rank in range(2):
        assert f"[torch_ring] rank {rank} (pid " in output, output
    assert output.count(f": {launcher} (pid ") == 2, output
    assert output.count("which has started it, has died. TORCH_RING_EXIT_WITH_LAUNCHER=0") == 2


@pytest.mark.parametrize(("launcher", "watches"), [("mpirun", "0"), ("bash", "1")])
def test_ranks_outlive_a_launcher_if_told_and_a_shell(launcher, watches, tmp_path):
    output = output_below(launcher, tmp_path, 1, watches)
    assert output.count("goes on: [1.0, 1.0, 1.0]") == 2, output
    assert "has died" not in output


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
