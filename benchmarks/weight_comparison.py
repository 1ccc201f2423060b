"""Measures the time of the ranks' own comparison of weights, relative to 1000 training steps.

    python benchmarks/weight_comparison.py

On one rank: the comparison adds only 8 bytes to a message that is sent anyway, and a step without
communication is the shortest.
"""

from __future__ import annotations

import functools
import statistics
import sys
import weakref

import torch
from machine import log, machine, title
from replicas import Replica
from turns import in_turns, seconds
from workloads import WORKLOADS

import torch_ring as hvd
from torch_ring.optimizer.weight_comparison import WeightComparison

MODELS = ("pinn", "500 parameters", "mnist", "resnet18")
EVERY = 1000  # steps
ROUNDS, STEPS, COMPARISONS = 11, 5, 2


def measure(name: str) -> str:
    workload = WORKLOADS[name]
    model = workload.make_model()
    replica = Replica(workload, "torch", model, workload.make_batch(workload.batch))
    named = {parameter: name for name, parameter in model.named_parameters()}
    comparison = WeightComparison(named, hvd.global_process_set, weakref.ref(replica.optimizer))

    def compare() -> None:
        comparison.take(EVERY, 0)
        assert comparison.snapshot is not None
        comparison.snapshot.summary()

    times = in_turns(
        {
            "step": functools.partial(seconds, replica.step, STEPS, 1),
            "comparison": functools.partial(seconds, compare, COMPARISONS, 1),
        },
        ROUNDS,
    )
    step, comparison_s = statistics.median(times["step"]), statistics.median(times["comparison"])
    share = statistics.median(
        c / (EVERY * s) for c, s in zip(times["comparison"], times["step"], strict=True)
    )
    return f"{name:>16}{len(named):>11}{step * 1e6:>12.1f}{comparison_s * 1e6:>12.1f}{share:>10.4%}"


def main() -> int:
    torch.set_num_threads(1)
    hvd.init()
    log(title("the comparison of weights", machine()))
    log(
        f"#{'model':>15}{'parameters':>11}{'step':>12}{'comparison':>12}{'share':>10}",
        f"#{'':26}{'(us)':>12}{'(us)':>12}{'of 1000':>10}",
    )
    for name in MODELS:
        try:
            log(measure(name))
        except ImportError as error:  # torchvision
            log(f"# {name}: {error}")
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
