# SPDX-License-Identifier: Apache-2.0
"""Runs programs as ranks in processes of the pool, as a launcher would."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pool
import torch

import torch_ring as hvd

ROOT = Path(__file__).parents[2]
DEADLINE_S = 150  # a hang, not a slow machine


@dataclass(frozen=True)
class Run:
    """The end of a script on one rank: its argument of sys.exit(), and its output."""

    code: str | int | None
    output: str


def forget_modules(folder: str | Path) -> None:
    """Let the next import of a module in a folder, or below, load the one of another example."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{folder}{os.sep}"):
            del sys.modules[name]


def run_script(script: str, arguments: list[str], folder: str) -> Run:
    """Run ``cd folder; python script arguments`` in this process."""
    os.chdir(folder)
    forget_modules(ROOT / "examples")  # of another example, whose functions ran here without this
    sys.argv = [script, *arguments]
    beside = str(Path(script).parent)
    sys.path.insert(0, beside)
    code = None
    # Tests run in parallel: one thread a rank, even if the script would use all cores.
    one_thread = mock.patch("torch.set_num_threads")
    with one_thread, contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as exit_:
            code = exit_.code
        finally:
            # The next script in this process finds the state of a fresh process.
            hvd.shutdown()
            torch.set_default_dtype(torch.float32)
            sys.path.remove(beside)
            forget_modules(beside)
    return Run(code, output.getvalue())


def run(
    script: Path, *arguments: str, folder: Path, size: int = 2, env: dict[str, str] | None = None
) -> list[Run]:
    """Run a script on `size` ranks; return its end on each of them."""
    return pool.run(
        run_script,
        size,
        args=(str(script), list(arguments), str(folder)),
        transport="",
        env=env,
        deadline_s=DEADLINE_S,
        initialized=False,
        kind="script",
    )
