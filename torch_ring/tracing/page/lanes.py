"""lanes_of: rows for operations that overlap in time on one rank."""

from __future__ import annotations

from heapq import heappop, heappush

from torch_ring.tracing.page.operation import Operation

__all__ = ["MOST_LANES", "lanes_of"]

MOST_LANES = 8  # or a hundred broadcasts at the start would leave a pixel for each later bar


def lanes_of(operations: list[Operation]) -> tuple[list[int], dict[int, int]]:
    """Return the lane of each operation, and the number of lanes of each rank.

    Operations come in the order of their submission; each takes the lowest lane that is free, so
    a rank has as many lanes as it had operations in flight at once, up to MOST_LANES, which later
    ones share: O(n log n).
    """
    busy: dict[int, list[tuple[float, int]]] = {}
    free: dict[int, list[int]] = {}
    count: dict[int, int] = {}
    lanes = []
    for each in operations:
        ends, unused = busy.setdefault(each.rank, []), free.setdefault(each.rank, [])
        while ends and ends[0][0] <= each.submitted:
            heappush(unused, heappop(ends)[1])
        if unused:
            lane = heappop(unused)
        else:
            lane = count.get(each.rank, 0)
            count[each.rank] = lane + 1
        heappush(ends, (each.finished, lane))
        lanes.append(lane)
    shown = {rank: min(lanes_of_rank, MOST_LANES) for rank, lanes_of_rank in count.items()}
    return [lane % MOST_LANES for lane in lanes], shown
