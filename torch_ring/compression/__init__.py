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

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compression:
    """The compressors to choose from. ``int8()`` and ``powersgd()`` make instances with a state."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    powersgd = PowerSGDCompressor
