# SPDX-License-Identifier: Apache-2.0
"""advice: measures the part of a step that waits for gradients between hosts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch_ring._C import OperationRecord

__all__ = ["AFTER_STEPS", "advice"]

AFTER_STEPS = 20
"""The number of steps of an optimizer after which the ranks judge its waits."""

_LEAST_SHARE = 1 / 3  # of a step
_LEAST_MS = 10  # milliseconds a step: a shorter wait is not worth advice

_END = re.compile(r"backward\.(\d+)")
_GRADIENTS = re.compile(r"gradients\.\d+\.(\d+)\..+")


def advice(records: Sequence[OperationRecord], steps: int, passes: int, hosts: int) -> str | None:
    """Return a line for a user whose steps wait for the network; None: they wait little or never.

    The flight recorder has the times, so nothing is measured for this. If data move after this rank
    has ended its backward pass, the rank waits for them. Late ranks do not distort this: gradients
    move only when all ranks have them.

    Args:
        records: the process set's last records; the last half of the passes is judged.
        steps: the number of steps of its optimizers.
        passes: the number of agreed passes in these steps.
        hosts: the number of hosts of its ranks.
    """
    ends: dict[int, int] = {}  # for each pass, the time when this rank had its gradients
    moves: dict[int, list[OperationRecord]] = {}
    for record in records:
        if record.state != "finished":
            continue
        if found := _END.fullmatch(record.name):
            if ends and int(found[1]) <= next(reversed(ends)):  # passes count anew after join()
                ends.clear()
                moves.clear()
            ends[int(found[1])] = record.submitted_ns
        elif found := _GRADIENTS.fullmatch(record.name):
            moves.setdefault(int(found[1]), []).append(record)
    judged = list(ends)[len(ends) // 2 :]
    if len(judged) < 2 or min(steps, passes) < 1:
        return None
    waiting_ns = travelling_ns = sent_bytes = 0
    for number, following in pairwise(judged):
        times = []
        for record in moves.get(number, ()):
            if record.transport in ("tcp", "shm+tcp") and record.finished_ns <= ends[following]:
                times.append((record.agreed_ns, record.finished_ns))
                sent_bytes += _sent(record, hosts)
        travelling_ns += _covered(times)
        waiting_ns += _covered((max(begin, ends[number]), end) for begin, end in times)
    counted = len(judged) - 1
    steps_a_pass = steps / passes
    step_ms = (ends[judged[-1]] - ends[judged[0]]) / counted / steps_a_pass / 1e6
    waiting_ms = waiting_ns / counted / steps_a_pass / 1e6
    if waiting_ms < _LEAST_MS or waiting_ms < _LEAST_SHARE * step_ms:
        return None
    megabytes = sent_bytes / counted / steps_a_pass / 1e6
    rate = 1e3 * sent_bytes / travelling_ns
    return (
        f"steps take {_seconds(step_ms)}, of which {_seconds(waiting_ms)} "
        f"({100 * waiting_ms / step_ms:.0f} %) wait for gradients from other hosts, "
        f"{megabytes:.3g} MB a step at {rate:.3g} MB/s: docs/slow-links.md says how to send less"
    )


def _sent(record: OperationRecord, hosts: int) -> int:
    """Return the bytes that a host sends to others with the algorithms for large tensors."""
    if record.operation == "allreduce":
        return 2 * record.bytes * (hosts - 1) // hosts
    return record.bytes * (hosts - 1)


def _covered(times: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of the (begin, end) intervals."""
    total = until = 0
    for begin, end in sorted(times):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"
