# SPDX-License-Identifier: Apache-2.0
"""registry_of: a world's counters as Prometheus metrics; needs prometheus_client (extra: metrics).

All names begin with torch_ring_, and all metrics have the label rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from torch_ring.tracing.counters import Histogram, snapshot_of
from torch_ring.world.join import World

__all__ = ["registry_of"]

# Name, documentation, and attribute of OperationCounts, SetMetrics, ...
_OF_OPERATIONS = (
    ("operations", "Operations that have ended, failed ones too.", "operations"),
    ("failed_operations", "Operations that have failed.", "failed"),
    ("operation_bytes", "Bytes of this rank's inputs.", "bytes"),
    (
        "operation_waiting_seconds",
        "Time from submission to agreement: for other ranks and the fusion window.",
        "waiting_s",
    ),
    (
        "operation_running_seconds",
        "Time from agreement to the end; on a device, to the launch.",
        "running_s",
    ),
)
_OF_SETS = (
    ("inline_operations", "Operations whose data travelled with the agreement.", "inlined"),
    ("fused_operations", "Operations that were reduced in one buffer with others.", "fused"),
    ("agreement_rounds", "Rounds in which the ranks have agreed.", "rounds"),
)
_OF_MESSAGES = (
    ("messages", "Messages between two ranks that have ended, failed ones too.", "messages"),
    ("failed_messages", "Messages that have failed.", "failed"),
    ("message_bytes", "Bytes of the messages that have arrived, or were sent.", "bytes"),
)
_CONNECTIONS = (
    "data_connections",
    "Data connections that this rank has made or accepted.",
    "connections",
)
_OF_MEMORY = (
    (
        "shared_memory_bytes",
        "Memory of the host in use by this rank's tensors and sets.",
        "shared_bytes",
    ),
    (
        "kept_gradient_memory_bytes",
        "Of the shared memory, what is kept for the next gradients.",
        "kept_gradient_bytes",
    ),
    (
        "kept_result_memory_bytes",
        "Private memory kept for the next results.",
        "kept_result_bytes",
    ),
)
_SIZE = ("world_size", "The number of ranks.", "size")

_Samples = list[tuple[list[str], Any]]  # values of the labels, and the object with the value


def registry_of(world: World) -> CollectorRegistry:
    """Return a registry that takes a snapshot of the world whenever it is asked."""
    registry = CollectorRegistry()
    registry.register(_Counters(world))
    return registry


class _Counters:
    def __init__(self, world: World) -> None:
        self._world = world

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one rank, with their samples."""
        snapshot = snapshot_of(self._world)
        rank = str(snapshot.rank)
        named = [
            *((str(number), each) for number, each in snapshot.sets.items()),
            *((f"group {name}", each) for name, each in snapshot.groups.items()),
        ]
        sets: _Samples = [([rank, name], each) for name, each in named]
        operations = [
            ([*labels, name], counts)
            for labels, each in sets
            for name, counts in each.operations.items()
        ]
        messages = [
            ([*labels, way], counts)
            for labels, each in sets
            for way, counts in each.messages.items()
        ]
        for row in _OF_OPERATIONS:
            yield _family(CounterMetricFamily, row, operations, "process_set", "operation")
        for row in _OF_SETS:
            yield _family(CounterMetricFamily, row, sets, "process_set")
        for row in _OF_MESSAGES:
            yield _family(CounterMetricFamily, row, messages, "process_set", "direction")
        yield _lags(sets)
        yield _family(CounterMetricFamily, _CONNECTIONS, [([rank], snapshot)])
        for row in _OF_MEMORY:
            yield _family(GaugeMetricFamily, row, [([rank], snapshot.memory)])
        yield _family(GaugeMetricFamily, _SIZE, [([rank], snapshot)])


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    row: tuple[str, str, str],
    samples: _Samples,
    *labels: str,
) -> Metric:
    name, text, attribute = row
    family = kind(f"torch_ring_{name}", text, labels=["rank", *labels])
    for values, counts in samples:
        family.add_metric(values, getattr(counts, attribute))
    return family


def _lags(sets: _Samples) -> Metric:
    family = HistogramMetricFamily(
        "torch_ring_arrival_lag_seconds",
        "Of each operation that was agreed on, how long this rank has waited for the last one.",
        labels=["rank", "process_set"],
    )
    for values, each in sets:
        family.add_metric(values, _buckets(each.lag), each.lag.sum_s)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    """Return upper bounds and the cumulative counts below them, as Prometheus needs them."""
    in_words: Callable[[float], str] = floatToGoString  # has no types
    bounds = [in_words(bound) for bound in (*histogram.bounds_s, float("inf"))]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
