# SPDX-License-Identifier: Apache-2.0
"""Compression of gradients: the compressors to choose from, and the interface for your own.

Open first: `stateful`, the interface of a compressor with a state; `casts` for one without.
"""

from torch_ring.compression.casts import (
    BF16Compressor,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)
from torch_ring.compression.int8 import Int8Compressor
from torch_ring.compression.powersgd import PowerSGDCompressor
from torch_ring.compression.stateful import StatefulCompressor

__all__ = [
    "BF16Compressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "NoneCompressor",
    "require_compressor",
]


class Compression:
    """The compressors to choose from. ``int8()`` and ``powersgd()`` make instances with a state."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    powersgd = PowerSGDCompressor


def require_compressor(given: object) -> None:
    """Raise ValueError, with what was typed and what to type, for a wrong ``compression=``."""
    is_stateful = isinstance(given, type) and issubclass(given, StatefulCompressor)
    if callable(getattr(given, "compress", None)) and not is_stateful:
        return
    ours = {name: each for name, each in vars(Compression).items() if not name.startswith("_")}
    name = next((name for name, each in ours.items() if given is each or given == name), "")
    typed = f"hvd.Compression.{name}" if name else getattr(given, "__name__", "")
    brackets = "()" if is_stateful or name in ("int8", "powersgd") else ""
    found = typed if is_stateful else repr(given)
    advice = typed if is_stateful or name else "hvd.Compression.fp16"
    raise ValueError(
        f"compression={found} is no compressor, as compression={advice}{brackets} would be"
    )
