# SPDX-License-Identifier: Apache-2.0
"""Native modules: ``torch_2_14/_C.*.so`` is the one for torch 2.14.

Torch's C++ interface changes with every minor version, and only then. A build from source makes the
module for the installed torch; a released wheel holds one for each version.

There are none for macOS and Windows: there `one_rank.py` is the module, for a world of one rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from torch_ring.errors import InvalidArgumentError

__all__ = ["NEEDS_LINUX", "find_native_module", "is_for_one_rank", "require_one_rank"]

_platform: str = sys.platform  # typed, or mypy would not check the code for other systems
_SYSTEM = {"darwin": "macOS", "win32": "Windows"}.get(_platform, _platform)

NEEDS_LINUX = f"needs Linux, and this is {_SYSTEM}, where a process trains alone (docs/install.md)"
"""The end of an error's text."""


def is_for_one_rank() -> bool:
    """Return whether this system has no native module, so that a process trains alone."""
    return _platform != "linux"


def require_one_rank(ranks: int, source: str) -> None:
    """Raise InvalidArgumentError if there is no native module, and `source` wants several ranks."""
    if is_for_one_rank() and ranks > 1:
        raise InvalidArgumentError(f"{source}: a job of {ranks} ranks {NEEDS_LINUX}")


class _NativeFinder:
    """Finds the ``torch_ring._C`` for the installed torch, when it is imported."""

    @staticmethod
    def find_spec(
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG004
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of the native module; None for every other module."""
        if name != "torch_ring._C":
            return None
        if is_for_one_rank():
            return spec_from_file_location(name, Path(__file__).with_name("one_rank.py"))
        return PathFinder.find_spec(name, [folder_of_module()], target)


def find_native_module() -> None:
    """Put the finder of ``torch_ring._C`` before all others. A second call does nothing."""
    if _NativeFinder not in sys.meta_path:
        sys.meta_path.insert(0, _NativeFinder)


def folder_of_module() -> str:
    """Return the folder of the native module for the installed torch and this Python.

    Raises:
        ImportError: there is none; the message gives the command to type, in one line.
    """
    import torch

    return find_module(Path(__file__).parent, torch.__version__)


def find_module(modules: Path, torch_version: str) -> str:
    """Return the folder below `modules` that has the module for a version of torch.

    Raises:
        ImportError: there is none.
    """
    major, minor = torch_version.split(".")[:2]
    folder = modules / f"torch_{major}_{minor}"
    if any((folder / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return str(folder)
    build = "with `pip install .` in torch_ring's source directory"
    built = sorted(
        tuple(map(int, path.parent.name.split("_")[1:])) for path in modules.glob("torch_*/_C.*.so")
    )
    if not built:
        raise _refusal(f"torch_ring is not built: build it {build}")
    if (int(major), int(minor)) in built:
        python = "{}.{}".format(*sys.version_info)
        raise _refusal(
            f"torch_ring was built for another Python, and this is {python}: build it {build}"
        )
    versions = ", ".join(dict.fromkeys("{}.{}".format(*each) for each in built))
    raise _refusal(
        f"torch_ring was built for torch {versions}, and this is torch {torch_version}: build it "
        f"again {build}"
    )


def _refusal(text: str) -> ImportError:
    """Return an error that `python -m torch_ring` shows without a traceback."""
    return ImportError(text, name="torch_ring")
