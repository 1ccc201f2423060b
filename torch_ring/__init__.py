"""torch_ring: data-parallel training of a PyTorch model on many processes.

``import torch_ring as hvd`` runs scripts written for ``horovod.torch``.

The public names are those of `torch_ring.api`, which needs torch. The first use of a name imports
both, so a launcher, which uses none of them, starts without torch. If torch is imported already,
the names are there at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from torch_ring.native import find_native_module

if TYPE_CHECKING:
    from torch_ring.api import *  # noqa: F403  for type checkers and editors
    from torch_ring.api import __all__ as __all__

__version__ = "0.1.0"

# Names of torch.distributed, for the error of a program that looks them up here.
_OURS = {
    "DDP": "DistributedOptimizer()",
    "DistributedDataParallel": "DistributedOptimizer()",
    "all_gather": "allgather()",
    "all_gather_object": "allgather_object()",
    "all_reduce": "allreduce()",
    "all_to_all": "alltoall()",
    "broadcast_object_list": "broadcast_object()",
    "destroy_process_group": "shutdown()",
    "get_local_rank": "local_rank()",
    "get_rank": "rank()",
    "get_world_size": "size()",
    "init_process_group": 'init(), or init_process_group("ring") of torch.distributed',
    "local_world_size": "local_size()",
    "new_group": "add_process_set()",
    "reduce_scatter": "reducescatter()",
    "world_size": "size()",
}

# Before other finders: an older version may have left a `_C` in the package's own folder.
find_native_module()


def _load() -> None:
    """Add the public names to this module.

    Raises:
        ImportError: there is no torch, or no native module for it; says which there are.
    """
    api = importlib.import_module("torch_ring.api")
    for name in ("__all__", *api.__all__):
        globals().setdefault(name, getattr(api, name))  # keep attributes set by a user


if not TYPE_CHECKING:  # a type checker would accept misspelt names as attributes

    def __getattr__(name: str) -> Any:
        # Import only the submodule: `import torch_ring.api` itself looks up submodules here.
        if not name.startswith("__") and importlib.util.find_spec(f"torch_ring.{name}"):
            return importlib.import_module(f"torch_ring.{name}")
        if name == "__all__" or not name.startswith("__"):
            _load()
            if name in globals():
                return globals()[name]
        advice = f": use {_OURS[name]}" if name in _OURS else ""
        raise AttributeError(
            f"module 'torch_ring' has no attribute {name!r}{advice}",
            name=name,
            obj=sys.modules[__name__],
        )


def __dir__() -> list[str]:
    """Return the public names and modules."""
    modules = {"compression", "optimizer", "sync_batch_norm"}  # the others are in __all__
    _load()
    return sorted({*globals()["__all__"], *modules, "__version__"} - {"_basics"})


_torch = sys.modules.get("torch")
# `import torch` itself may import this module, to register the backend of torch_ring/c10d.
if _torch is not None and not getattr(_torch.__spec__, "_initializing", False):
    _load()
