# SPDX-License-Identifier: Apache-2.0
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


def run_hello(environments: Sequence[Mapping[str, str]]) -> str:
    """Return the script's output in this rank's environment."""
    given = environments[int(os.environ["RANK"])]
    os.environ.clear()
    os.environ.update(given)
    sys.argv = [HELLO]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(HELLO, run_name="__main__")
    return output.getvalue()


def test_srun_environment():
    step = {
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "localhost,elsewhere",
    }
    environments = [
        clean_environment(**step, SLURM_PROCID=str(rank), SLURM_NODEID=str(rank))
        for rank in range(2)
    ]
    assert_all_said_hello(pool.run(run_hello, 2, args=(environments,), initialized=False), 2)
