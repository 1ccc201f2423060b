# SPDX-License-Identifier: Apache-2.0
"""Measures the communication of an FSDP2 step of a small transformer, over ring and over gloo.

    torchrun --nproc-per-node 2 benchmarks/sharded_step.py --json sharded_step.json

Each block of the model is sharded among the ranks: a step gathers its parameters twice, and
reduce-scatters its gradients. Steps over ring, over ring with FSDP2's buffers in shared memory, and
over gloo take turns with a step whose collectives do nothing (torch's backend `fake`): the
difference is the time of communication.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from machine import log, machine, title, write_report
from peers import group_of, start_gloo, stop_gloo
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from turns import in_turns, seconds

import torch_ring as hvd

VARIANTS = ("fake", "gloo", "ring", "ring_shared")
"""The backends; "ring_shared" is ring with its memory for FSDP2's buffers."""

WORDS, LENGTH, BATCH = 1000, 64, 2
WIDTH, HEADS, BLOCKS = 256, 4, 4
TOLERANCE = 1e-5  # of weights after a step: the backends may add in different orders


@dataclass(frozen=True)
class Row:
    """A step over one backend; medians of the rounds."""

    variant: str
    parameters: int
    step_ms: float
    communication_ms: float  # the time beyond a step without communication
    of_gloo: float  # share of gloo's communication


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.words(text)
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(hidden)
        return scores


class Replica:
    """A sharded model and the step that trains it, always on the same batch."""

    def __init__(self, variant: str) -> None:
        group = group_of(variant.removesuffix("_shared"))
        mesh = DeviceMesh.from_group(group, "cpu")
        torch.manual_seed(0)
        self._model = Transformer()
        for module in (*self._model.blocks, self._model):
            sharded = fully_shard(module, mesh=mesh)
            if variant == "ring_shared":
                sharded.set_allocate_memory_from_process_group_for_comm(True)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        torch.manual_seed(1 + hvd.rank())
        self._text = torch.randint(WORDS, (BATCH, LENGTH + 1))

    def step(self) -> None:
        self._optimizer.zero_grad()
        scores = self._model(self._text[:, :-1])
        nn.functional.cross_entropy(scores.flatten(0, 1), self._text[:, 1:].flatten()).backward()
        self._optimizer.step()

    def weights(self) -> list[Tensor]:
        """Return this rank's parts of the parameters."""
        return [parameter.detach().to_local() for parameter in self._model.parameters()]  # type: ignore[attr-defined]

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="each variant is timed once a round")
    parser.add_argument("--steps", type=int, default=5, help="steps of a variant in a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args()


def difference(one: Replica, other: Replica) -> float:
    """Return the largest difference of two replicas' weights, on any rank."""
    pairs = zip(one.weights(), other.weights(), strict=True)
    most = max(float((mine - theirs).abs().max()) for mine, theirs in pairs)
    return float(hvd.allreduce(torch.tensor(most, dtype=torch.float64), op=hvd.Max))


def rows_of(times: dict[str, list[float]], parameters: int) -> list[Row]:
    communication = {
        variant: statistics.median(
            step - plain for step, plain in zip(times[variant], times["fake"], strict=True)
        )
        for variant in VARIANTS
    }
    return [
        Row(
            variant,
            parameters,
            step_ms=statistics.median(times[variant]) * 1e3,
            communication_ms=communication[variant] * 1e3,
            of_gloo=communication[variant] / communication["gloo"],
        )
        for variant in VARIANTS
    ]


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)  # a rank has a core
    hvd.init()
    start_gloo()
    facts = machine()
    replicas = {variant: Replica(variant) for variant in VARIANTS}
    for replica in replicas.values():
        replica.step()
    wrong = [
        variant
        for variant in ("ring", "ring_shared")
        if difference(replicas[variant], replicas["gloo"]) > TOLERANCE
    ]
    timed: dict[str, Callable[[], float]] = {
        variant: lambda replica=replica: seconds(replica.step, args.steps)
        for variant, replica in replicas.items()
    }
    rows = rows_of(in_turns(timed, args.rounds), replicas["fake"].parameters)
    log(title("an FSDP2 step", facts))
    log(f"#{'variant':>12}{'step':>10}{'communication':>15}{'of gloo':>10}")
    log(f"#{'':12}{'(ms)':>10}{'(ms)':>15}{'(%)':>10}")
    for row in rows:
        log(
            f"{row.variant:>13}{row.step_ms:>10.2f}{row.communication_ms:>15.2f}"
            f"{row.of_gloo * 100:>10.1f}"
        )
    write_report(args.json, facts, rows)
    if wrong:
        log(f"weights differ from those over gloo: {', '.join(wrong)}")
    dist.barrier()
    stop_gloo()
    hvd.shutdown()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
