# SPDX-License-Identifier: Apache-2.0
"""Starts programs under real launchers: torchrun and the mpirun of every installed MPI."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
DEADLINE_S = 120


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without any launcher's traces."""
    launchers = ("OMPI_", "PMI", "SLURM_", "MASTER_", "TORCHELASTIC_", "RANK", "WORLD_", "LOCAL_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    folder = "OMPI_MCA_btl_sm_backing_directory"  # conftest.py sets it
    clean.update({folder: os.environ[folder]} if folder in os.environ else {})
    return clean | {"OMP_NUM_THREADS": "1", "TORCH_RING_INIT_TIMEOUT": "40", **more}


def start_program(command: list[str], **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=clean_environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(process: subprocess.Popen[str], jobs: int = 1) -> str:
    """Return the output of a process that runs `jobs` jobs one after another."""
    try:
        output, _ = process.communicate(timeout=jobs * DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"{process.args} did not end:\n{output}")
    return output


def processes_with(variable: str) -> dict[int, str]:
    """Return the living processes with NAME=VALUE in their environments: their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = command.decode(errors="replace")
    return found


def mpirun_command(name: str) -> list[str]:
    """Return the command that starts two ranks with the MPI of that name, or skip."""
    candidates = (
        str(Path(sys.executable).parent / "mpirun"),
        str(Path(sys.prefix) / "mpich" / "bin" / "mpiexec"),  # where `make test-all` installs MPICH
        shutil.which("mpirun.openmpi"),
        shutil.which("mpiexec.hydra"),
    )
    for path in candidates:
        if path is None or not os.path.exists(path):
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        if name == "Open MPI" and "Open MPI" in version:
            return [path, "--allow-run-as-root", "--oversubscribe", "-np", "2"]
        if name == "MPICH" and "HYDRA" in version:
            return [path, "-np", "2"]
    pytest.skip(f"{name} is not installed")
