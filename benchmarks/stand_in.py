"""The tests' stand-ins for a GPU and for NCCL, for benchmarks that count.

They count the requests to a GPU. Times on them are those of the host alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The stand-ins and the model are the tests'.
sys.path.append(str(Path(__file__).parent.parent / "tests/device"))
from device_double import DEVICE, NCCL_LIBRARY, Counts, load
from many_parameters import make_parameters, zero_loss

__all__ = ["DEVICE", "Counts", "load_stand_ins", "make_parameters", "zero_loss"]


def load_stand_ins() -> None:
    """Make `DEVICE` a device of torch, and NCCL its stand-in. Call before hvd.init()."""
    if not NCCL_LIBRARY.exists():
        sys.exit("the stand-ins are not built: make doubles")
    load()
    os.environ["TORCH_RING_NCCL_LIBRARY"] = str(NCCL_LIBRARY)
