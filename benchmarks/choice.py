"""choose_allreduce: torch_ring's choice of an allreduce among hosts, and the times of each. Pure.

The choice is csrc/collective/choice.cc's, with its constants and in its integers: the benchmarks
run where no core is built. tests/cpp/choice_test.cc and tests/benchmarks/test_scaling_model.py hold
both to the same numbers.
"""

from __future__ import annotations

from steps import Link, ring_s

FEW_RANKS = 4
GATHERED_BYTES = 64 << 10
SEGMENT_BYTES = 256 << 10
CHUNK_BYTES = 1 << 20
ROUND_BYTES = 64 << 20
# Picoseconds: of a step, of a byte to the next rank and to any rank, and of a byte reduced.
LATENCY_PS, NEAR_PS, FAR_PS, REDUCTION_PS = 30_000_000, 400, 500, 100


def gathered_ps(size_bytes: int, ranks: int) -> int:
    steps = (ranks - 1).bit_length()
    arriving = size_bytes * (ranks - 1) * FAR_PS
    return steps * LATENCY_PS + arriving + size_bytes * ranks * REDUCTION_PS


def ring_ps(size_bytes: int, ranks: int) -> int:
    round_bytes = min(CHUNK_BYTES * ranks, ROUND_BYTES)
    exposed = min(min(size_bytes, round_bytes) // ranks, SEGMENT_BYTES)
    round_ps = (ranks - 1) * (2 * LATENCY_PS + exposed * REDUCTION_PS)
    around = 2 * (size_bytes - size_bytes // ranks) * NEAR_PS
    return in_rounds(round_ps, size_bytes, round_bytes) + around


def halving_ps(size_bytes: int, ranks: int) -> int:
    distances = (1 << step for step in range((ranks - 1).bit_length()))
    chunks = (min(distance, ranks - distance) for distance in distances)
    sent = (min(size_bytes, ROUND_BYTES) * number // ranks for number in chunks)
    round_ps = sum(2 * LATENCY_PS + min(part, SEGMENT_BYTES) * REDUCTION_PS for part in sent)
    across = 2 * (size_bytes - size_bytes // ranks) * FAR_PS
    return in_rounds(round_ps, size_bytes, ROUND_BYTES) + across


def in_rounds(round_ps: int, size_bytes: int, round_bytes: int) -> int:
    return round_ps + max(size_bytes - round_bytes, 0) * (round_ps // round_bytes)


def choose_allreduce(size_bytes: int, ranks: int) -> str:
    """Return "gathered", "ring" or "halving"."""
    if ranks <= FEW_RANKS:
        return "gathered" if size_bytes <= GATHERED_BYTES else "ring"
    times = {"ring": ring_ps(size_bytes, ranks), "halving": halving_ps(size_bytes, ranks)}
    if size_bytes <= GATHERED_BYTES:
        times = {"gathered": gathered_ps(size_bytes, ranks)} | times
    return min(times, key=times.__getitem__)  # of equal ones the first


def allreduce_s(size_bytes: float, ranks: int, link: Link, chosen: str) -> float:
    """Return the time of the chosen algorithm on a link.

    A byte to a rank far away takes as much longer on any link as on the choice's.
    """
    steps = (ranks - 1).bit_length()
    per_byte_s = FAR_PS / NEAR_PS / link.bandwidth
    if chosen == "gathered":
        return steps * link.latency_s + (ranks - 1) * size_bytes * per_byte_s
    if chosen == "halving":
        return 2 * (steps * link.latency_s + (ranks - 1) / ranks * size_bytes * per_byte_s)
    return ring_s(size_bytes, ranks, link)
