# SPDX-License-Identifier: Apache-2.0
"""``python -m torch_ring.horovod``: Python, where ``import horovod`` finds torch_ring."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch_ring.config.horovod_path import install
from torch_ring.errors import InvalidArgumentError

__all__ = ["main", "plain_command"]

_MODULE = "torch_ring.horovod"


def plain_command(command: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return a command without ``-m torch_ring.horovod``, its interpreter's options kept.

    Args:
        command: such as ``python -u -m torch_ring.horovod -m train --lr 1``.
        arguments: those after the module: ``-m train --lr 1``.
    """
    options = list(command[: len(command) - len(arguments)])
    options[-1] = options[-1].removesuffix(_MODULE)  # if option and module are one word
    if not options[-1]:
        options.pop()
    options[-1] = options[-1].removesuffix("m")  # other options may precede it, as in -um
    if options[-1] == "-":
        options.pop()
    return [*options, *arguments]


def main() -> None:
    """Replace this process by Python with the rest of the command line.

    Raises:
        SystemExit: Horovod is installed, a setting is wrong, or Python ignores PYTHONPATH.
    """
    if sys.flags.ignore_environment:
        sys.exit(f"{_MODULE}: python -E and -I ignore PYTHONPATH, by which horovod is found")
    try:
        install()
    except (ImportError, InvalidArgumentError) as error:
        sys.exit(f"{_MODULE}: {error}")
    command = plain_command(sys.orig_argv, sys.argv[1:])
    os.execv(sys.executable, [sys.executable, *command[1:]])


if __name__ == "__main__":
    main()
