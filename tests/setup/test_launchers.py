"""The same script, unchanged, under every installed launcher."""

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pool
import pytest
from launcher_commands import TORCHRUN, clean_environment, mpirun_command, output_of, start_program
from ports import free_port

import torch_ring as hvd

HELLO = str(Path(__file__).parent / "hello.py")
pytestmark = pytest.mark.launcher


def assert_all_said_hello(outputs: str | Sequence[str], size: int) -> None:
    output = "".join(outputs)
    for rank in range(size):
        assert f"rank {rank} of {size}: torch" in output, output


@pytest.mark.slow
def test_torchrun_with_two_nodes_on_one_machine():
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = [
        start_program(
            [
                *TORCHRUN,
                *("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, HELLO),
            ]
        )
        for node in range(2)
    ]
    outputs = [output_of(node) for node in nodes]
    assert_all_said_hello(outputs, 2)
    assert "".join(outputs).count("2 ranks on one host, by shared memory") == 1, outputs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Open MPI", "MPICH"])
def test_mpirun_without_and_with_mpi4py(name):
    output = output_of(
        start_program([*mpirun_command(name), sys.executable, HELLO, "--without-mpi4py-first"])
    )
    assert_all_said_hello(output, 2)
    assert output.count(" works") == 4, output


# --- processes of the pool, with the environment of a launcher


def run_hello(environments: Sequence[Mapping[str, str]], *arguments: str) -> str:
    """Return the script's output, or the reason of its end, in this rank's environment."""
    given = environments[int(os.environ["RANK"])]
    os.environ.clear()
    os.environ.update(given)
    sys.argv = [HELLO, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            runpy.run_path(HELLO, run_name="__main__")
        except hvd.InvalidArgumentError as error:
            return str(error)
    return output.getvalue()


def run_hello_in(environments: Sequence[Mapping[str, str]], *arguments: str) -> list[str]:
    return pool.run(
        run_hello,
        len(environments),
        args=([clean_environment(**more) for more in environments], *arguments),
        initialized=False,
    )


def launcher_environment(launcher: str, rank: int) -> dict[str, str]:
    """Return a launcher's variables for one of two ranks on two hosts."""
    if launcher == "srun":
        return {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": str(rank),
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "SLURM_STEP_NODELIST": "localhost,elsewhere",
        }
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    }


def test_without_a_launcher():
    assert_all_said_hello(run_hello_in([{}]), 1)


def test_srun_environment():
    assert_all_said_hello(
        run_hello_in([launcher_environment("srun", rank) for rank in range(2)]), 2
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            launcher_environment("Open MPI", rank=0),
            "2 ranks of Open MPI may be on several hosts: set MASTER_ADDR (rank 0's host",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "the 2 ranks of RANK and WORLD_SIZE may be on several hosts: set MASTER_ADDR",
        ),
    ],
)
def test_without_an_address(environment, message):
    (output,) = run_hello_in([environment], "--without-mpi4py-first")
    assert message in output
    assert "127.0.0.1 if all are on this one" in output
