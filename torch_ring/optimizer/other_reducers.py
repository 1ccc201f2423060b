"""warn_of_ddp, refuse_sharded: parameters whose gradients torch reduces already."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator

import torch.distributed
from torch import Tensor

__all__ = ["refuse_sharded", "warn_of_ddp"]

_log = logging.getLogger("torch_ring")


def warn_of_ddp(parameters: Iterable[Tensor]) -> None:
    """Warn if DistributedDataParallel averages the gradients of some parameters, too.

    Parameters do not know of it, so it is looked for among all objects of the process, if
    torch.distributed has several ranks.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if torch.distributed.get_world_size() == 1:
        return
    own = set(map(id, parameters))
    shared = {id(parameter) for parameter in _of_ddp()} & own
    if shared:
        _log.warning(
            "DistributedDataParallel averages the gradients of %d of the %d parameters of this "
            "DistributedOptimizer, too: they travel twice. Train the model itself (`ddp.module`), "
            "or do not wrap the optimizer",
            len(shared),
            len(own),
        )


def _of_ddp() -> Iterator[Tensor]:
    """Yield the parameters of all living DistributedDataParallel modules of several ranks."""
    from torch.nn.parallel import DistributedDataParallel

    for found in gc.get_objects():
        if not issubclass(type(found), DistributedDataParallel):
            continue
        group = getattr(found, "process_group", None)  # missing if the constructor has failed
        if group is not None and group.size() > 1:
            yield from found.parameters()


def refuse_sharded(names: Iterable[tuple[str, Tensor]]) -> None:
    """Check that every parameter is whole on this rank.

    Raises:
        ValueError: for a parameter of which FSDP or tensor parallelism gives each rank a part.
    """
    for name, parameter in names:
        is_dtensor = hasattr(parameter, "device_mesh") and hasattr(parameter, "placements")
        if is_dtensor or getattr(parameter, "_fsdp_flattened", False):
            kind = "a DTensor" if is_dtensor else "a parameter of FullyShardedDataParallel"
            raise ValueError(
                f"'{name}' is {kind}: this rank has only a part of it, and torch reduces its "
                "gradient already. Do not wrap its optimizer, or do not shard the model"
            )
