# SPDX-License-Identifier: Apache-2.0
"""The program of a rank that calls a function of `run`.

The text of this file is sent to the rank. It uses only the standard library, so that a rank needs
torch_ring only if its function does.
"""

from __future__ import annotations

import base64
import importlib
import os
import pickle
import sys
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["READ_PROGRAM", "main", "packed"]

READ_PROGRAM = (
    "import base64,sys;f=open(0,'rb',closefd=False);n={'__name__':'rank of torch_ring.run'};"
    "exec(base64.b64decode(f.readline()),n);n['main'](f,int(sys.argv[1]))"
)


def packed(program: bytes, path: list[str], call: bytes) -> bytes:
    """Return the rank's input: the program, the folders of modules, a pickled call."""
    folders = [os.path.abspath(folder) for folder in path]  # "" is the launcher's folder
    lines = [base64.b64encode(part) for part in (program, pickle.dumps(folders), call)]
    return b"\n".join(lines) + b"\n"


def main(given: Any, result_fd: int) -> None:
    """Call the function; write its result, or its error, as one pickle."""
    folders = pickle.loads(base64.b64decode(given.readline()))
    sys.path += [folder for folder in folders if folder not in sys.path]
    sys.argv = [""]
    outcome: dict[str, Any]
    try:
        func, args, kwargs = pickle.loads(base64.b64decode(given.readline()))
        outcome = {"result": _pickled(func(*args, **kwargs))}
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            outcome = {"result": pickle.dumps(None)}
        else:
            outcome = {"traceback": traceback.format_exc(), "error": _pickled_error(error)}
    with open(result_fd, "wb") as file:
        file.write(pickle.dumps(outcome))
    if "result" not in outcome:
        sys.exit(1)


def _pickled(value: Any) -> bytes:
    try:
        pickler = importlib.import_module("cloudpickle")
    except ImportError:
        pickler = pickle
    return bytes(pickler.dumps(value))


def _pickled_error(error: BaseException) -> bytes:
    try:
        data = _pickled(error)
        pickle.loads(data)  # classes whose constructors take other arguments fail here
    except Exception:
        return b""
    return data
