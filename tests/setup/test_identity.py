# SPDX-License-Identifier: Apache-2.0
"""The identity of a rank, from the made-up environment of every launcher."""

import os
import shutil
import subprocess

import pytest

from torch_ring.errors import InvalidArgumentError
from torch_ring.setup.launchers import (
    Identity,
    discover,
    is_of_inner_job,
    process_name,
    variables_of_launchers,
    watched_launcher,
    without_launchers,
)

TORCHS = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
TORCHRUN = TORCHS | {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "2"}
OURS = TORCHS | {"GROUP_WORLD_SIZE": "2", "TORCH_RING_RUN_ID": "0123"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "9",  # of the job; the step has fewer
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
IS_TORCHRUN = Identity(3, 4, 1, 2, "1", None, "torchrun", "run/2/4")
IS_OURS = Identity(3, 4, 1, 2, "1", 2, "torch_ring.run", "0123")
IS_OPEN_MPI = Identity(1, 2, 1, 2, None, None, "Open MPI", "prterun-host-17@1")
IS_HYDRA = Identity(2, 4, 0, 2, None, None, "Hydra")
IS_SRUN = Identity(5, 7, 1, None, "2", 4, "srun", "4711/0")


@pytest.mark.parametrize(
    ("environment", "identity"),
    [
        ({}, Identity()),
        (TORCHRUN, IS_TORCHRUN),
        (OURS, IS_OURS),
        (OURS | {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4"}, IS_OURS),
        (OPEN_MPI, IS_OPEN_MPI),
        (HYDRA, IS_HYDRA),
        (SRUN, IS_SRUN),
        (SRUN | TORCHRUN, IS_TORCHRUN),  # torchrun in srun
        (SRUN | OPEN_MPI, IS_OPEN_MPI),  # mpirun in srun
        (SRUN | HYDRA, IS_HYDRA),  # its proxies are started by srun
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "7"}, IS_SRUN),  # srun --mpi=pmi2
        ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}, Identity()),  # shell of salloc
        (SRUN | {"SLURM_STEP_ID": "4294967290"}, Identity()),  # interactive step
        (SRUN | {"WORLD_SIZE": "7"}, IS_SRUN),  # set by hand
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, Identity(1, 2, launcher="horovodrun")),
        ({"RANK": "0", "WORLD_SIZE": "2"}, Identity(0, 2, launcher="env")),
    ],
)
def test_identity_from_each_launcher(environment, identity):
    assert discover(environment) == identity


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not: set both, or neither"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not"),
        (
            {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_ELASTIC": "1"},
            "the elastic driver of horovodrun has started this process.*python -m torch_ring.run",
        ),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4: ranks count from 0"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1': must be a whole number"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, "WORLD_SIZE='four': must be a whole number"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
        (
            SRUN | {"WORLD_SIZE": "8"},
            r"WORLD_SIZE=8, but SLURM_STEP_NUM_TASKS=7 \(srun\): unset WORLD_SIZE",
        ),
        (
            OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "2"},
            r"RANK=0, but OMPI_COMM_WORLD_RANK=1 \(Open MPI\): unset RANK",
        ),
    ],
)
def test_incomplete_and_contradicting_variables_are_named(environment, message):
    with pytest.raises(InvalidArgumentError, match=message):
        discover(environment)


def test_arguments_go_before_variables():
    assert discover(OPEN_MPI, rank=0, size=4) == Identity(0, 4, launcher="init")
    assert discover(OPEN_MPI, rank=1, size=2) == IS_OPEN_MPI
    assert discover({}, rank=0, size=1) == Identity(launcher="init")
    assert discover({"RANK": "0"}, rank=1, size=2) == Identity(1, 2, launcher="init")
    moved = discover(TORCHRUN, local_rank=0, local_size=1)
    assert (moved.local_rank, moved.local_size, moved.node) == (0, 1, None)
    for wrong in ({"rank": 0}, {"rank": 2, "size": 2}, {"local_rank": 3, "local_size": 3}):
        with pytest.raises(InvalidArgumentError, match="rank"):
            discover(TORCHRUN, **wrong)


def test_launchers_that_tell_of_one_node():
    assert discover(OPEN_MPI).on_one_node()
    assert discover(SRUN | {"SLURM_STEP_NUM_NODES": "1"}).on_one_node()
    assert not discover(HYDRA).on_one_node()
    assert not discover(SRUN).on_one_node()


@pytest.mark.parametrize(
    ("counts", "node", "tasks"),
    [
        ("4(x2),3", "1", 4),
        ("4(x2),3", "2", 3),
        ("4(x2),3", "3", None),
        ("", "0", None),
        ("4(x", "0", None),
        ("4", "gpu01", None),
    ],
)
def test_tasks_of_a_node_of_slurm(counts, node, tasks):
    srun = SRUN | {"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": node, "SLURM_LOCALID": "0"}
    assert discover(srun).local_size == tasks


def test_tasks_of_a_node_of_a_heterogeneous_step():
    """Slurm 22.05 sorts the lists by name: of `srun -w n2 -n1 ... : -w n1 -n2 ...`."""
    lists = {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NODELIST": "n[1-2]"}
    for number, name, local_rank, tasks in (("0", "n2", "0", 1), ("1", "n1", "1", 2)):
        place = {"SLURM_NODEID": number, "SLURMD_NODENAME": name, "SLURM_LOCALID": local_rank}
        assert discover(SRUN | lists | place).local_size == tasks


@pytest.mark.parametrize("variables", [TORCHRUN, OURS, OPEN_MPI, HYDRA, SRUN])
def test_an_environment_without_its_launcher(variables):
    environment = {"HOME": "/root", **variables}
    assert variables_of_launchers(environment) == variables
    assert without_launchers(environment) == {"HOME": "/root"}


@pytest.mark.parametrize("inner", ["TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_ranks_of_a_launcher_inside_an_elastic_process_are_none_of_it(inner: str) -> None:
    assert process_name({"TORCH_RING_PROCESS": "0.1"}) == "0.1"
    assert process_name({"TORCH_RING_PROCESS": "0.1", inner: "0"}) == ""


@pytest.mark.parametrize(("rank", "size"), [(None, None), (2, 3)])
def test_a_process_of_an_elastic_job_is_none_of_a_job_inside_it(rank, size) -> None:
    own = {"TORCH_RING_RUN_ID": "7", "RANK": "2", "WORLD_SIZE": "3"}
    own |= {"HOROVOD_RANK": "2", "HOROVOD_SIZE": "3", "TORCH_RING_PROCESS": "2.1"}
    assert not is_of_inner_job(own, rank, size)
    for other in ({"RANK": "0"}, {"WORLD_SIZE": "2"}):
        assert is_of_inner_job(own | other)
        assert process_name(own | other) == ""
    assert is_of_inner_job(own, 0, 2)


@pytest.mark.parametrize(
    ("launcher", "parent", "is_watched"),
    [
        ("torchrun", "pt_elastic", True),
        ("Open MPI", "mpirun", True),
        ("Hydra", "hydra_pmi_proxy", True),
        ("srun", "slurmstepd", True),
        ("srun", "bash", False),  # a shell between them
        ("env", "mpirun", False),
    ],
)
def test_a_parent_is_watched_that_is_the_launcher(
    launcher, parent, is_watched, monkeypatch, tmp_path
):
    """tests/world/test_exits.py lets ranks end with it."""
    program = tmp_path / parent
    program.symlink_to(shutil.which("bash") or "bash")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([str(program), "-c", "echo; read"], **pipes) as process:
        process.stdout.readline()  # it has its name
        monkeypatch.setattr(os, "getppid", lambda: process.pid)
        fd, line = watched_launcher(Identity(3, 4, launcher=launcher))
        assert (fd >= 0, "rank 3" in line) == (is_watched, is_watched)
        if is_watched:
            os.close(fd)
        process.kill()
