"""build_report, version: what torch_ring was built with, in the words of horovodrun."""

from __future__ import annotations

import importlib
import sys

__all__ = ["build_report", "version"]


def version() -> str:
    """Return torch_ring's version."""
    return str(sys.modules["torch_ring"].__version__)  # its __init__ stands above all rooms


def build_report() -> str:
    """Return a report whose lines are those of ``horovodrun --check-build``."""
    built = importlib.import_module("torch_ring.capabilities")  # it needs torch
    parts = {
        "Available Frameworks": {"TensorFlow": False, "PyTorch": True, "MXNet": False},
        "Available Controllers": {"MPI": built.mpi_built(), "Gloo": built.gloo_built()},
        "Available Tensor Operations": {
            "NCCL": bool(built.nccl_built()),
            "DDL": built.ddl_built(),
            "CCL": built.ccl_built(),
            "MPI": built.mpi_built(),
            "Gloo": built.gloo_built(),
        },
    }
    lines = [f"torch_ring v{version()}:"]
    for title, features in parts.items():
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if there else ' '}] {name}" for name, there in features.items()]
    lines += [
        "",
        'By "Gloo" scripts for Horovod mean transports without MPI: shared memory and TCP.',
        "`python -m torch_ring` tries them.",
    ]
    return "\n".join(lines)
