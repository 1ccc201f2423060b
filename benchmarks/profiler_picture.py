"""Draws what torch.profiler shows of a training step of ResNet-18 on two ranks.

    torchrun --nproc-per-node 2 benchmarks/profiler_picture.py docs/profiler.png

The traces, which Perfetto opens, are written beside the picture with --traces DIR.
TORCH_RING_TRANSPORT=tcp shows buckets that are reduced during the backward pass.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torchvision.models import resnet18

import torch_ring as hvd

WARM_UP_STEPS = 4  # buckets are planned again after the first passes
PHASES = {"forward": "#9ecae1", "backward": "#6baed6", "optimizer": "#3182bd"}
COLLECTIVE = "#e6550d"

Span = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("--traces", type=Path, metavar="DIR", help="keep the traces there")
    args = parser.parse_args()
    hvd.init()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(hvd.broadcast_object(str(args.traces or scratch), root_rank=0))
        folder.mkdir(parents=True, exist_ok=True)
        train(folder / f"rank{hvd.rank()}.json")
        hvd.barrier()
        if hvd.rank() == 0:
            draw(
                [spans_in(folder / f"rank{rank}.json") for rank in range(hvd.size())], args.picture
            )
        hvd.barrier()  # the folder is rank 0's


def train(trace: Path) -> None:
    """Train a few steps, of which the last one is traced."""
    torch.manual_seed(hvd.rank())
    model = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    images, labels = torch.randn(8, 3, 96, 96), torch.randint(10, (8,))

    def step() -> None:
        optimizer.zero_grad()
        with record_function("forward"):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()

    for _ in range(WARM_UP_STEPS):
        step()
    hvd.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    profiler.export_chrome_trace(str(trace))


def spans_in(trace: Path) -> list[Span]:
    """Return the phases of the step and the collectives, in milliseconds from the step's begin."""
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [
        {"name": event["name"], "begin": event["ts"] / 1e3, "ms": event["dur"] / 1e3}
        for event in events
        if event.get("ph") == "X"
        and (event["name"] in PHASES or event["name"].startswith("torch_ring: "))
        and not event["name"].startswith("torch_ring: agreed ")
    ]
    first = min(span["begin"] for span in spans)
    return [span | {"begin": span["begin"] - first} for span in spans]


def draw(ranks: list[list[Span]], picture: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 1.2 + 1.1 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    ticks = {}
    for rank, spans in enumerate(ranks):
        for row, what in enumerate(("the step", "collectives")):
            place = -(2.4 * rank + row)
            ticks[place] = f"rank {rank}: {what}"
            for span in spans:
                color = PHASES.get(span["name"], COLLECTIVE)
                if (color == COLLECTIVE) != (row == 1):
                    continue
                bar = [(span["begin"], span["ms"])]
                axes.broken_barh(bar, (place - 0.4, 0.8), color=color, alpha=0.75, linewidth=0)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=color, label=name) for name, color in PHASES.items()]
    patches.append(Patch(color=COLLECTIVE, label="torch_ring: ..."))
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
