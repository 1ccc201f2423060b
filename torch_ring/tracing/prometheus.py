"""metric_families: a Snapshot as Prometheus metrics; needs prometheus_client (extra: metrics)."""

from __future__ import annotations

from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from torch_ring.tracing.counters import Histogram, SetMetrics, Snapshot

__all__ = ["metric_families"]

_OF_OPERATIONS = (  # name, documentation, attribute of OperationCounts
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
_OF_SETS = (  # name, documentation, attribute of SetMetrics
    ("inline_operations", "Operations whose data travelled with the agreement.", "inlined"),
    ("fused_operations", "Operations that were reduced in one buffer with others.", "fused"),
    ("agreement_rounds", "Rounds in which the ranks have agreed.", "rounds"),
)
_OF_MESSAGES = (  # name, documentation, attribute of MessageCounts
    ("messages", "Messages between two ranks that have ended, failed ones too.", "messages"),
    ("failed_messages", "Messages that have failed.", "failed"),
    ("message_bytes", "Bytes of the messages that have arrived, or were sent.", "bytes"),
)
_OF_MEMORY = (  # name, documentation, attribute of MemoryUse
    ("shared_memory", "Memory of the host in use by this rank's tensors and sets.", "shared_bytes"),
    (
        "kept_gradient_memory",
        "Of the shared memory, what is kept for the next gradients.",
        "kept_gradient_bytes",
    ),
    ("kept_result_memory", "Private memory kept for the next results.", "kept_result_bytes"),
)


def metric_families(snapshot: Snapshot) -> list[Metric]:
    """Return the metrics of one rank, with their samples. All names begin with torch_ring_."""
    rank = str(snapshot.rank)
    families = [
        _counter(name, text, _by_operation(snapshot, rank, attribute), ["process_set", "operation"])
        for name, text, attribute in _OF_OPERATIONS
    ]
    for name, text, attribute in _OF_SETS:
        samples = [([rank, label], getattr(each, attribute)) for label, each in _named(snapshot)]
        families.append(_counter(name, text, samples, ["process_set"]))
    for name, text, attribute in _OF_MESSAGES:
        samples = [
            ([rank, label, way], getattr(counts, attribute))
            for label, each in _named(snapshot)
            for way, counts in each.messages.items()
        ]
        families.append(_counter(name, text, samples, ["process_set", "direction"]))
    families.append(_lags(snapshot, rank))
    families.append(
        _counter(
            "data_connections",
            "Data connections that this rank has made or accepted.",
            [([rank], snapshot.connections)],
        )
    )
    for name, text, attribute in _OF_MEMORY:
        families.append(_gauge(f"{name}_bytes", text, rank, getattr(snapshot.memory, attribute)))
    families.append(_gauge("world_size", "The number of ranks.", rank, snapshot.size))
    return families


def _named(snapshot: Snapshot) -> list[tuple[str, SetMetrics]]:
    """Return process sets by their number, and groups of torch.distributed by their name."""
    groups = [(f"group {name}", each) for name, each in snapshot.groups.items()]
    return [*((str(number), each) for number, each in snapshot.sets.items()), *groups]


def _by_operation(
    snapshot: Snapshot, rank: str, attribute: str
) -> list[tuple[list[str], int | float]]:
    return [
        ([rank, name, operation], getattr(counts, attribute))
        for name, each in _named(snapshot)
        for operation, counts in each.operations.items()
    ]


def _counter(
    name: str,
    text: str,
    samples: list[tuple[list[str], int | float]],
    labels: list[str] | None = None,
) -> Metric:
    family = CounterMetricFamily(f"torch_ring_{name}", text, labels=["rank", *(labels or [])])
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _gauge(name: str, text: str, rank: str, value: int) -> Metric:
    family = GaugeMetricFamily(f"torch_ring_{name}", text, labels=["rank"])
    family.add_metric([rank], value)
    return family


def _lags(snapshot: Snapshot, rank: str) -> Metric:
    family = HistogramMetricFamily(
        "torch_ring_arrival_lag_seconds",
        "Of each operation that was agreed on, how long this rank has waited for the last one.",
        labels=["rank", "process_set"],
    )
    for name, each in _named(snapshot):
        family.add_metric([rank, name], _buckets(each.lag), each.lag.sum_s)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    """Return upper bounds and the cumulative counts below them, as Prometheus needs them."""
    bounds = [floatToGoString(bound) for bound in (*histogram.bounds_s, float("inf"))]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
