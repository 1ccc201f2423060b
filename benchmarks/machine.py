# SPDX-License-Identifier: Apache-2.0
"""Reports: results in JSON files, with the machine and the command that they depend on."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import torch_ring as hvd

Facts = dict[str, str | int]


def machine() -> Facts:
    """Return the facts on which the numbers depend. Call after init()."""
    return computer() | {"ranks": hvd.size(), "hosts": hvd.cross_size()}


def computer() -> Facts:
    """Return the facts that need no init()."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load": f"{os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "torch_ring": hvd.__version__,
    }


def title(what: str, facts: Facts) -> str:
    """Return the line above a table."""
    return f"# {what}; " + ", ".join(f"{key} {value}" for key, value in facts.items())


def log(*lines: str) -> None:
    """Print on rank 0."""
    if hvd.rank() == 0:
        print(*lines, sep="\n", flush=True)


def write_report(path: Path | None, facts: Facts, rows: Sequence[Any], **others: Any) -> None:
    """Write rows and others, which are dataclasses, to a JSON file, with command and machine."""
    if hvd.rank() == 0:
        save(path, launcher(), facts, rows, **others)


def save(path: Path | None, start: str, facts: Facts, rows: Sequence[Any], **others: Any) -> None:
    """Write a report to a JSON file, if there is a path; `start` comes before this program."""
    if path:
        command = f"{start} {shlex.join(sys.argv)}"
        report = {"command": command, "machine": facts, "rows": rows, **others}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, default=asdict, indent=1) + "\n")


def launcher() -> str:
    """Return the command that has started the ranks."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return f"mpirun -np {hvd.size()} python"
    if hvd.cross_size() > 1:
        return f"{hvd.cross_size()} hosts: python"
    return f"torchrun --nproc-per-node {hvd.size()}"
