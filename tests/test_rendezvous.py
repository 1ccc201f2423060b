"""Who am I: every launcher's environment, faked; and the settings."""

import pytest

from torch_ring.config import SETTINGS, Config
from torch_ring.errors import InvalidArgumentError, build_problem
from torch_ring.rendezvous import Identity, _address, discover, first_host, with_overrides

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
}


@pytest.mark.parametrize(
    ("environment", "identity"),
    [
        ({}, Identity()),
        (TORCHRUN, Identity(3, 4, 1, 2, "torchrun", "run/2")),
        (OPEN_MPI, Identity(1, 2, 1, 2, "Open MPI", "prterun-host-17@1")),
        (HYDRA, Identity(2, 4, 0, 2, "MPICH")),
        (SLURM, Identity(5, 7, 1, 2, "srun", "4711/0")),
        (
            SLURM | {"SLURM_NODEID": "3", "SLURM_LOCALID": "0"},
            Identity(5, 7, 0, 1, "srun", "4711/0"),
        ),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, Identity()),
        (SLURM | TORCHRUN, Identity(3, 4, 1, 2, "torchrun", "run/2")),
        (
            {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"},
            Identity(1, 2, 1, 2, "horovodrun"),
        ),
    ],
)
def test_every_launcher(environment, identity):
    assert discover(environment) == identity


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 is not in WORLD_SIZE=4"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, "WORLD_SIZE='four': must be a whole number"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below the 2 processes"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "is not understood"),
    ],
)
def test_contradictions_are_named(environment, message):
    with pytest.raises(InvalidArgumentError, match=message):
        discover(environment)


@pytest.mark.parametrize(
    ("hostlist", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-09,12]", "gpu07"),
        ("gpu[3,5],login", "gpu3"),
        ("a-b[001-100]", "a-b001"),
    ],
)
def test_first_host(hostlist, first):
    assert first_host(hostlist) == first


def test_where_the_ranks_meet():
    assert _address(discover(TORCHRUN), TORCHRUN) == ("10.0.0.1", 29500)
    assert _address(discover(OPEN_MPI), OPEN_MPI) is None
    assert _address(discover(OPEN_MPI), OPEN_MPI | {"MASTER_ADDR": "h"}) == ("h", 29400)
    host, port = _address(discover(SLURM), SLURM)
    assert host == "gpu07"
    assert 20_000 <= port < 30_000
    assert _address(discover(SLURM), SLURM | {"SLURM_STEP_ID": "1"}) != (host, port)
    assert _address(discover(SLURM), SLURM | {"MASTER_PORT": "9"}) == (host, 9)
    without = {k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}
    with pytest.raises(InvalidArgumentError, match="MASTER_ADDR is not"):
        _address(discover(without), without)


def test_arguments_win():
    identity = discover(TORCHRUN)
    assert with_overrides(identity, rank=0, size=None).rank == 0
    with pytest.raises(InvalidArgumentError, match="not below its size"):
        with_overrides(identity, rank=9)


def test_settings_have_defaults():
    assert Config.from_environment({}) == Config()
    assert {setting.field for setting in SETTINGS} == set(Config.__dataclass_fields__)


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("TORCH_RING_TRANSPORT", "TCP", "transport", "tcp"),
        ("TORCH_RING_TIMEOUT", "1.5", "timeout_s", 1.5),
        ("TORCH_RING_FUSION_WINDOW", "2", "fusion_window_s", 0.002),
        ("TORCH_RING_BUCKET_BYTES", "1000", "bucket_bytes", 1000),
        ("HOROVOD_FUSION_THRESHOLD", "1000", "fusion_threshold_bytes", 1000),
        ("HOROVOD_CYCLE_TIME", "5", "fusion_window_s", 0.005),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "7", "stall_warning_s", 7.0),
        ("HOROVOD_STALL_CHECK_DISABLE", "1", "stall_warning_s", 0.0),
        ("HOROVOD_LOG_LEVEL", "trace", "log_level", "debug"),
    ],
)
def test_settings(variable, text, field, value):
    assert getattr(Config.from_environment({variable: text}), field) == value


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("TORCH_RING_TRANSPORT", "rdma", "must be one of auto, shm, tcp"),
        ("TORCH_RING_TIMEOUT", "-1", "at least 0.1"),
        ("TORCH_RING_TIMEOUT", "nan", "at least 0.1"),
        ("TORCH_RING_BUCKET_BYTES", "1e6", "whole number of bytes"),
        ("HOROVOD_CYCLE_TIME", "fast", "must be a number"),
    ],
)
def test_bad_settings_name_variable_value_and_choice(variable, text, message):
    with pytest.raises(InvalidArgumentError, match=f"{variable}='{text}': .*{message}"):
        Config.from_environment({variable: text})


def test_another_torch_is_refused_in_one_line():
    assert build_problem("2.15.0+cu132", "2.15.1") is None
    problem = build_problem("2.15.0+cu132", "2.13.0+cpu")
    assert problem is not None
    assert "built for torch 2.15.0+cu132, and this is torch 2.13.0+cpu" in problem
    assert "pip install --no-build-isolation" in problem
    assert "\n" not in problem
