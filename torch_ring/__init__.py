"""torch_ring: data-parallel training of a PyTorch model on many processes.

``import torch_ring as hvd`` runs scripts written for ``horovod.torch``.

The public names are those of `torch_ring.api`. They come with torch, and so with the first use of
one of them, unless torch is there already: a launcher, which needs none of them, starts without
torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from torch_ring.native import find_native_module

if TYPE_CHECKING:
    from torch_ring.api import *  # noqa: F403  what type checkers and editors see
    from torch_ring.api import __all__ as __all__

__version__ = "0.1.0"

# Before other finders: an older version may have left a `_C` in the package's own folder.
find_native_module()


def _load() -> None:
    """Make the public names this module's.

    Raises:
        ImportError: there is no torch, or no native module for it; says which there are.
    """
    api = importlib.import_module("torch_ring.api")
    for name in ("__all__", *api.__all__):
        globals().setdefault(name, getattr(api, name))  # not in place of what a user has put there


if not TYPE_CHECKING:  # to which misspelt names would be names

    def __getattr__(name: str) -> Any:
        # A module is imported alone: those behind the public names come by here, too.
        if not name.startswith("__") and importlib.util.find_spec(f"torch_ring.{name}"):
            return importlib.import_module(f"torch_ring.{name}")
        if name == "__all__" or not name.startswith("__"):
            _load()
            if name in globals():
                return globals()[name]
        raise AttributeError(
            f"module 'torch_ring' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )


def __dir__() -> list[str]:
    """Return the names and modules that are meant to be used."""
    modules = {"compression", "optimizer", "sync_batch_norm"}  # the others are in __all__
    _load()
    return sorted({*globals()["__all__"], *modules, "__version__"} - {"_basics"})


_torch = sys.modules.get("torch")
# `import torch` may be what imports this, for the backend that torch_ring/c10d registers there.
if _torch is not None and not getattr(_torch.__spec__, "_initializing", False):
    _load()
