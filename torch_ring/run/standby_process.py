# SPDX-License-Identifier: Apache-2.0
"""The program of a standby process: imports torch, waits, and becomes a rank.

The process reads two lines from standard input: first the text of this file, and later, to become a
rank, the rank's variables. The program uses only the standard library; the modules that it imports
in advance may be missing.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import runpy
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

__all__ = ["READ_PROGRAM", "activation", "main", "program"]

READ_PROGRAM = (
    "import base64,sys;f=open(0,'rb',closefd=False);n={'__name__':'standby of torch_ring.run'};"
    "exec(base64.b64decode(f.readline()),n);n['main'](f)"
)


def program(text: bytes) -> bytes:
    """Return the first input of the process."""
    return base64.b64encode(text) + b"\n"


def activation(environment: Mapping[str, str]) -> bytes:
    """Return the input that makes the process a rank with these variables."""
    return base64.b64encode(json.dumps(dict(environment)).encode()) + b"\n"


def main(given: Any) -> None:
    """Wait, then run the program on the rest of the command line, as Python would."""
    arguments = sys.argv[1:]
    kind = arguments.pop(0) if arguments[0] in ("-m", "-c") else ""
    if sys.path[0] == "" and kind != "-c":  # otherwise python -I
        script = os.path.abspath(arguments[0])
        sys.path[0] = os.getcwd() if kind else os.path.dirname(script)
    _warm_up()
    line = given.readline()
    if not line:
        sys.exit(0)  # the job has ended
    os.environ.update(json.loads(base64.b64decode(line)))
    given.close()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(arguments[0], "<string>", "exec"), scope)
        return
    sys.argv = arguments
    if kind == "-m":
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


def _warm_up() -> None:
    """Import slow modules. If that fails, the rank will fail as it would without this."""
    with contextlib.suppress(Exception):
        torch = importlib.import_module("torch")
        importlib.import_module("torch_ring.api")
        importlib.import_module("torch.utils.data")
        # The first optimizer of a process imports many modules.
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
