# SPDX-License-Identifier: Apache-2.0
"""The module ``horovod`` of a program that runs on torch_ring.

It is a package without files: `torch_ring.horovod.modules` finds its submodules.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch_ring.config import Config
from torch_ring.config.horovod_path import hidden_horovod
from torch_ring.horovod.modules import Finder

__path__: list[str] = []
__version__ = "0.28.1"  # the version of Horovod whose names torch_ring has

_problem = hidden_horovod(Config.from_environment())
if _problem is not None:
    raise ImportError(_problem, name="horovod")
sys.meta_path.insert(0, Finder())


def __getattr__(name: str) -> Any:
    if name == "run":
        return importlib.import_module("torch_ring.run").run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")
