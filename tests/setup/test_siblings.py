# SPDX-License-Identifier: Apache-2.0
"""The warning of init() if a process without a launcher is probably one of several."""

import multiprocessing
import os
from collections.abc import Callable

import pytest
import torch
from launcher_commands import clean_environment
from logs import logged
from on_ranks import on_ranks

import torch_ring as hvd
from torch_ring.setup.launchers import why_not_alone

SLURM_BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({"PMIX_RANK": "1"}, ["PMIX_RANK is set", "init(rank=int(os.environ['PMIX_RANK']), size"]),
        ({"MV2_COMM_WORLD_RANK": "1"}, ["MV2_COMM_WORLD_RANK is set", "torchrun"]),
        (SLURM_BATCH, ["SLURM_NTASKS=8", "`srun python train.py`"]),
        ({"MASTER_ADDR": "host0"}, ["RANK and WORLD_SIZE are not", "`torchrun --nproc-per-node 2"]),
    ],
)
def test_half_of_a_launchers_variables(environment, parts):
    reason = why_not_alone(environment)
    assert reason is not None
    assert all(part in reason for part in parts), reason


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"},
        {"PYTEST_XDIST_WORKER": "gw0", "PYTEST_XDIST_WORKER_COUNT": "8"},
    ],
)
def test_an_ordinary_process(environment):
    assert why_not_alone(environment) is None


def warnings_of(init: Callable[[], object]) -> list[str]:
    """Return the log of `init` in an environment without a launcher."""
    environment = dict(os.environ)
    os.environ.clear()
    os.environ.update(clean_environment())
    try:
        with logged() as messages:
            init()
            hvd.shutdown()
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return messages


@on_ranks(1, initialized=False)
def test_a_process_of_multiprocessing() -> None:
    """The pool's processes come from multiprocessing, like mp.spawn's."""
    assert multiprocessing.parent_process() is not None
    assert warnings_of(hvd.init) == [
        "no launcher was found: this process trains alone (size 1), but multiprocessing has "
        "started it, and RANK is not set. Give each process its number, as in init(rank=rank, "
        "size=2), or type `torchrun --nproc-per-node 2 train.py`"
    ]
    assert warnings_of(lambda: hvd.init(rank=0, size=1)) == []


class Worker(torch.utils.data.Dataset):
    """A data set whose items are the log of init() in a worker."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> list[str]:
        return warnings_of(hvd.init)


@on_ranks(1, initialized=False)
def test_a_worker_of_a_data_loader() -> None:
    loader = torch.utils.data.DataLoader(
        Worker(), num_workers=1, batch_size=None, multiprocessing_context="fork"
    )
    assert list(loader) == [[]]


@on_ranks(2)
def test_init_as_another_rank() -> None:
    for arguments, text in [
        ({}, []),
        ({"rank": hvd.rank(), "size": 2}, []),
        (
            {"rank": 0, "size": 4},
            [
                f"init(rank=0, size=4) does nothing: this process is rank {hvd.rank()} of 2 "
                "already. Call shutdown() first"
            ],
        ),
    ]:
        with logged() as messages:
            hvd.init(**arguments)
        assert messages == text


@on_ranks(2, env={"TORCH_RING_TIMOUT": "10"})
def test_a_misspelt_setting_is_told_once() -> None:
    hvd.shutdown()
    with logged() as messages:
        hvd.init()
    expected = "TORCH_RING_TIMOUT (do you mean TORCH_RING_TIMEOUT?)"
    assert (expected in str(messages)) == (hvd.rank() == 0)
