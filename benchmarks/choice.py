"""choose_allreduce: torch_ring's choice of an allreduce among hosts, and the times of each. Pure.

It is the choice of csrc/collective/choice.cc, with the same constants and integer arithmetic, since
the benchmarks also run without a built core. tests/cpp/choice_test.cc and
tests/benchmarks/test_scaling_model.py hold both to the same numbers.
"""

from __future__ import annotations

from steps import Link

FEW_RANKS = 4
SECTION_RANKS = 16
GATHERED_BYTES = 64 << 10
SEGMENT_BYTES = 256 << 10
CHUNK_BYTES = 1 << 20
ROUND_BYTES = 64 << 20
# Picoseconds for a step, for a byte to the next rank, to any rank, and for a reduced byte.
LATENCY_PS, NEAR_PS, FAR_PS, REDUCTION_PS = 30_000_000, 400, 500, 100


def gathered_ps(size_bytes: int, ranks: int) -> int:
    steps = (ranks - 1).bit_length()
    arriving = size_bytes * (ranks - 1) * FAR_PS
    return steps * LATENCY_PS + arriving + size_bytes * ranks * REDUCTION_PS


def levels_of(ranks: int) -> int:
    """Return the levels of a reduce-scatter in sections of at most SECTION_RANKS."""
    levels = 0
    while ranks > 1:
        ranks = -(-ranks // SECTION_RANKS)
        levels += 1
    return levels


def allgather_ps(size_bytes: int, ranks: int) -> dict[str, int]:
    received = size_bytes - size_bytes // ranks
    steps = (ranks - 1).bit_length()
    return {
        "ring": (ranks - 1) * LATENCY_PS + received * NEAR_PS,
        "doubling": steps * LATENCY_PS + received * FAR_PS,
    }


def choose_allgather(size_bytes: int, ranks: int) -> str:
    """Return "ring" or "doubling"."""
    if ranks <= FEW_RANKS:
        return "ring"
    times = allgather_ps(size_bytes, ranks)
    return min(times, key=times.__getitem__)  # a tie: the first


def round_bytes(ranks: int) -> int:
    return min(CHUNK_BYTES * ranks, ROUND_BYTES)


def scattered_ps(size_bytes: int, ranks: int) -> int:
    def round_ps(part: int) -> int:
        exchanged = levels_of(ranks) * LATENCY_PS + (part - part // ranks) * FAR_PS
        reduced = min(part // ranks, SEGMENT_BYTES) * ranks * REDUCTION_PS
        return exchanged + reduced + allgather_ps(part, ranks)[choose_allgather(part, ranks)]

    rounds, rest = divmod(size_bytes, round_bytes(ranks))
    return rounds * round_ps(round_bytes(ranks)) + (round_ps(rest) if rest else 0)


def choose_allreduce(size_bytes: int, ranks: int) -> str:
    """Return "gathered" or "scattered"."""
    if size_bytes > GATHERED_BYTES:
        return "scattered"
    few = ranks <= FEW_RANKS
    quicker = few or gathered_ps(size_bytes, ranks) <= scattered_ps(size_bytes, ranks)
    return "gathered" if quicker else "scattered"


def allreduce_s(size_bytes: float, ranks: int, link: Link, chosen: str) -> float:
    """Return the time of the chosen algorithm on a link.

    The ratio of the times to a far rank and to the next one is the same as in the choice.
    """
    steps = (ranks - 1).bit_length()
    far_s = FAR_PS / NEAR_PS / link.bandwidth
    if chosen == "gathered":
        return steps * link.latency_s + (ranks - 1) * size_bytes * far_s
    share_bytes = (ranks - 1) / ranks * size_bytes
    exchange_s = levels_of(ranks) * link.latency_s + share_bytes * far_s
    if choose_allgather(min(int(size_bytes), round_bytes(ranks)), ranks) == "ring":
        return exchange_s + (ranks - 1) * link.latency_s + share_bytes / link.bandwidth
    return exchange_s + steps * link.latency_s + share_bytes * far_s
