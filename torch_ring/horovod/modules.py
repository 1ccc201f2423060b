# SPDX-License-Identifier: Apache-2.0
"""Finder: finds modules of torch_ring under the names of Horovod's modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["Finder"]

# Horovod's modules -> ours, with their submodules. Ours are imported when a program asks for one.
_OURS = {
    "horovod.torch": "torch_ring",
    "horovod.runner": "torch_ring.run",
    "horovod.common.elastic": "torch_ring.elastic",
    "horovod.common.exceptions": "torch_ring.errors",
    "horovod.common.process_sets": "torch_ring.world",
    "horovod.common.util": "torch_ring.mpi_ops",  # nccl_built() and the like
}
_EMPTY = "horovod.common"
_NOT_HERE = ("horovod.keras", "horovod.mxnet", "horovod.ray", "horovod.spark", "horovod.tensorflow")


class Finder:
    """Finds the modules below ``horovod``: the same objects as torch_ring's, not copies.

    It is the first in `sys.meta_path`. Other finders would look for ``horovod.torch.mpi_ops`` in
    the folder of ``horovod.torch``, which is torch_ring's, and load mpi_ops.py once more.
    """

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return the spec of a module; None if it is not Horovod's, or torch_ring has none.

        Args:
            name: the module's name.
            *_: its package's path, and the module that is reloaded, if any.
        """
        ours = _ours(name)
        has_one = name == _EMPTY or name.startswith(_NOT_HERE)
        if not has_one and (ours is None or importlib.util.find_spec(ours) is None):
            return None
        return ModuleSpec(name, _Loader(), is_package=True)


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make a module; `exec_module` replaces it by ours."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        ours = _ours(name)
        if ours is not None:
            sys.modules[name] = found = importlib.import_module(ours)
            if ours == "torch_ring":
                _ = found.__all__  # loads its names, or raises the expected ImportError
        elif name != _EMPTY:
            text = f"torch_ring takes the place of horovod.torch, and has no {name}"
            raise ImportError(text, name=name)


def _ours(name: str) -> str | None:
    """Return the name of torch_ring's module for one of Horovod's, if there is one."""
    for theirs, ours in _OURS.items():
        if name == theirs or name.startswith(f"{theirs}."):
            return ours + name.removeprefix(theirs)
    return None
