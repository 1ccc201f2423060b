# SPDX-License-Identifier: Apache-2.0
"""install, alias_variables: put a folder on Python's path whose ``horovod`` is torch_ring."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from torch_ring.config.settings import Config, let_programs_find_horovod
from torch_ring.errors import InvalidArgumentError

__all__ = ["alias_variables", "hidden_horovod", "install"]

_FOLDER = str(Path(__file__).parents[1] / "horovod" / "on_path")
_END = Path(_FOLDER).parts[-3:]  # the end of such a folder's path, in any copy of torch_ring


def install() -> None:
    """Let ``import horovod`` find torch_ring in this process, and in those that it starts.

    Call it before anything imports horovod. A second call does nothing.

    Raises:
        ImportError: Horovod is installed, and TORCH_RING_AS_HOROVOD is not force; or another module
            of this name has been imported.
    """
    problem = hidden_horovod(Config.from_environment())
    if problem is not None:
        raise ImportError(problem)
    there = sys.modules.get("horovod")
    if there is not None and not _is_alias(os.path.dirname(there.__file__ or "")):
        raise ImportError(f"horovod has been imported from {there.__file__}, and so stays")
    if _FOLDER not in sys.path:
        sys.path.insert(1, _FOLDER)  # after the program's own folder, as PYTHONPATH
    let_programs_find_horovod(_FOLDER)


def alias_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which ranks find torch_ring as horovod, if that is switched on.

    Args:
        environment: the environment of the ranks.

    Raises:
        InvalidArgumentError: Horovod is installed, and TORCH_RING_AS_HOROVOD is not force.
    """
    config = Config.from_environment(environment)
    if config.as_horovod == "0":
        return {}
    problem = hidden_horovod(config)
    if problem is not None:
        raise InvalidArgumentError(problem)
    found = dict(environment)
    let_programs_find_horovod(_FOLDER, found)
    return {"PYTHONPATH": found["PYTHONPATH"]}


def hidden_horovod(config: Config) -> str | None:
    """Return a sentence about the installed Horovod that the folder must not hide; None: no such.

    Args:
        config: says whether it may be hidden.
    """
    path = [folder for folder in sys.path if not _is_alias(folder)]
    for finder in sys.meta_path if config.as_horovod != "force" else ():
        spec = finder.find_spec("horovod", path)
        if spec is not None and spec.origin is not None:  # a folder without __init__.py has none
            return (
                f"Horovod is installed ({spec.origin}), and torch_ring does not hide it: uninstall "
                "it, or set TORCH_RING_AS_HOROVOD=force"
            )
    return None


def _is_alias(folder: str) -> bool:
    return Path(folder).parts[-3:] == _END
