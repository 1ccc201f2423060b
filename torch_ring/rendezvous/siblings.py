"""why_not_alone: signs that a process which no launcher has started is one of several."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping

__all__ = ["why_not_alone"]

# Variables of a rank that are set by launchers which are not in `LAUNCHERS`.
_OTHER_RANKS = (
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
    "JSM_NAMESPACE_RANK",
)
_TORCHRUN = "or type `torchrun --nproc-per-node 2 train.py`"


def why_not_alone(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why a process without a launcher is probably meant to be one of several ranks.

    Returns:
        A clause for the log, which says what to type. None for ``python train.py``, and for helpers
        of such a process: workers of a DataLoader or of a pool are daemons, and a spawned process
        may import a main module that calls init() at its top.
    """
    process = multiprocessing.current_process()
    if process.daemon or getattr(process, "_inheriting", False):
        return None
    if multiprocessing.parent_process() is not None:
        return (
            "multiprocessing has started it, and RANK is not set. Give each process its number, as "
            f"in init(rank=rank, size=2), {_TORCHRUN}"
        )
    for variable in _OTHER_RANKS:
        if variable in environment:
            return (
                f"{variable} is set, by a launcher that torch_ring does not know. Give each "
                f"process its number, as in init(rank=int(os.environ['{variable}']), size=2), "
                f"{_TORCHRUN}"
            )
    tasks = environment.get("SLURM_NTASKS", "")
    if tasks.isdecimal() and int(tasks) > 1:
        return f"SLURM_NTASKS={tasks}, and srun has not started it. Type `srun python train.py`"
    if "MASTER_ADDR" in environment:
        return (
            "MASTER_ADDR is set, and RANK and WORLD_SIZE are not. Set them in each process, "
            f"{_TORCHRUN}"
        )
    return None
