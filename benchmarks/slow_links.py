# SPDX-License-Identifier: Apache-2.0
"""Trains a language model of a million parameters over a slow network, with more and fewer bytes.

    python benchmarks/hosts.py --hosts 2 --ranks-per-host 2 --rate 20mbit --program slow_links.py
    python benchmarks/hosts.py --hosts 2 --ranks-per-host 2 --program slow_links.py -- \
        --steps 1920 --every 14 --compression int8 --outer-lr 0.8 --outer-momentum 0.6

The first command times steps in turns: DDP over gloo, `DistributedOptimizer`, and `DiLoCo` between
hosts with `DistributedOptimizer` inside each. The second one trains twice from the same weights on
the same batches, once with the gradients of all ranks in every step and once by DiLoCo, and
compares the losses. There the network is not slow, which changes only the duration. The learning
rate rises in the first steps, and then falls to 0 along half a cosine.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import log, machine, title, write_report
from peers import start_gloo, stop_gloo
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from turns import in_turns, medians, seconds

import torch_ring as hvd
from torch_ring.lr_schedules import cosine_decay

sys.path.append(str(Path(__file__).parent.parent / "examples" / "language_model"))
from model import GPT
from text import Text, Windows, python_manual

CONTEXT, WIDTH, LAYERS, HEADS = 64, 144, 4, 4  # 1.02 million parameters
BATCH = 6  # windows of a rank in a step
RATE, WARM_UP = 2e-3, 50  # steps
HELD_OUT = 256  # windows for validation
VARIANTS = ("ddp", "distributed", "diloco")


@dataclass(frozen=True)
class Step:
    """Steps of one variant; medians of the rounds."""

    variant: str
    step_ms: float
    tokens_per_s: float  # of all ranks
    sent_bytes: float  # by this host in a step


@dataclass(frozen=True)
class Training:
    """The end of a training."""

    variant: str
    steps: int
    loss: float  # on the validation windows, in nats per character
    sent_bytes: int  # by this host


class Trainer:
    """A model, its optimizer and this rank's batches."""

    def __init__(
        self, variant: str, windows: Windows, vocabulary: int, args: argparse.Namespace
    ) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = GPT(vocabulary, CONTEXT, LAYERS, HEADS, WIDTH)
        hvd.broadcast_parameters(self.model.state_dict(), 0)
        self._forward: Callable[[Tensor], Tensor] = self.model
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), RATE)
        if variant == "ddp":
            self._forward = DistributedDataParallel(self.model)
        elif variant == "distributed":
            optimizer = hvd.DistributedOptimizer(optimizer)
        else:
            inside, between = hvd.hierarchy()
            optimizer = hvd.DistributedOptimizer(optimizer, process_set=inside)
            outer = {"lr": args.outer_lr}
            if args.outer_momentum:
                outer |= {"momentum": args.outer_momentum, "nesterov": True}
            compression = getattr(hvd.Compression, args.compression)
            optimizer = hvd.DiLoCo(
                optimizer,
                outer_options=outer,
                every=args.every,
                compression=compression() if args.compression == "int8" else compression,
                process_set=between,
            )
        self.optimizer = optimizer
        self._schedule = LambdaLR(optimizer, functools.partial(factor, args.steps))
        self._windows = windows
        self._batches = self._endless()

    def _endless(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1)  # the same on all ranks and of all variants
        while True:
            order = torch.randperm(len(self._windows) - HELD_OUT, generator=generator)
            for joint in order.split(BATCH * hvd.size()):
                own = joint[hvd.rank() :: hvd.size()].tolist()
                if len(own) == BATCH:
                    yield torch.stack([self._windows[index] for index in own])

    def step(self) -> None:
        windows = next(self._batches)
        self.optimizer.zero_grad()
        logits = self._forward(windows[:, :-1])
        cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        self.optimizer.step()
        self._schedule.step()

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean loss of the validation windows. Collective."""
        first = len(self._windows) - HELD_OUT
        own = [self._windows[i] for i in range(first + hvd.rank(), first + HELD_OUT, hvd.size())]
        windows = torch.stack(own)
        logits = self.model(windows[:, :-1])
        return float(hvd.allreduce(cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())))


def factor(steps: int, step: int) -> float:
    """Return the factor of the learning rate in a training of `steps` steps; 1 in timed steps."""
    warm_up = min(1.0, (step + 1) / WARM_UP)
    return warm_up * cosine_decay(WARM_UP, steps)(step) if steps > WARM_UP else 1.0


def sent() -> int:
    """Return the bytes that this host, a network namespace, has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): values.split() for name, values in (x.split(":") for x in lines)}
    return sum(int(values[8]) for name, values in counts.items() if name != "lo")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=64, help="steps of a round of DiLoCo")
    parser.add_argument("--outer-lr", type=float, default=1.0, help="rate of its outer SGD")
    parser.add_argument("--outer-momentum", type=float, default=0.0, help="Nesterov's")
    parser.add_argument("--compression", choices=["none", "bf16", "int8"], default="none")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="only these")
    parser.add_argument("--steps", type=int, default=0, help="train so long, and compare losses")
    parser.add_argument("--rounds", type=int, default=3, help="each variant is timed once a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args()


def time_steps(trainers: dict[str, Trainer], rounds: int, every: int) -> list[Step]:
    """Time steps in turns: a whole round of DiLoCo, and a few steps of the others."""
    counts = dict.fromkeys(trainers, 3) | {"diloco": every}
    bytes_of = dict.fromkeys(trainers, 0)

    def timed(variant: str) -> float:
        before = sent()
        took = seconds(trainers[variant].step, counts[variant])
        bytes_of[variant] += sent() - before
        return took

    times = medians(in_turns({name: lambda name=name: timed(name) for name in trainers}, rounds))
    tokens = BATCH * CONTEXT * hvd.size()
    return [
        Step(name, 1e3 * took, tokens / took, bytes_of[name] / (counts[name] * (rounds + 1)))
        for name, took in times.items()
    ]


def train(trainer: Trainer, variant: str, steps: int) -> Training:
    before, started = sent(), time.monotonic()
    for step in range(steps):
        trainer.step()
        if (step + 1) % 64 == 0:
            log(f"# {variant}, step {step + 1}: {time.monotonic() - started:.0f} s")
    if variant == "diloco":
        trainer.optimizer.end_round()
    bytes_sent = sent() - before
    return Training(variant, steps, trainer.loss(), bytes_sent)


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)
    hvd.init()
    facts = machine()
    text = Text.of(python_manual())
    windows = Windows(text.characters, CONTEXT)

    def made(variant: str) -> Trainer:
        return Trainer(variant, windows, len(text.vocabulary), args)

    if args.steps:
        variants = args.variants or VARIANTS[1:]
        trained = [train(made(variant), variant, args.steps) for variant in variants]
        log(title(f"{args.steps} steps of a language model", facts))
        log(f"#{'variant':>12}{'loss':>10}{'sent (MB)':>12}{'loss, of all':>14}{'bytes':>10}")
        for each in trained:
            log(
                f"{each.variant:>13}{each.loss:>10.4f}{each.sent_bytes / 1e6:>12.2f}"
                f"{each.loss / trained[0].loss:>13.2%}"
                f"{each.sent_bytes / max(1, trained[0].sent_bytes):>11.2%}"
            )
        write_report(args.json, facts, trained)
        hvd.shutdown()
        return 0
    start_gloo()
    trainers = {variant: made(variant) for variant in args.variants or VARIANTS}
    steps = time_steps(trainers, args.rounds, args.every)
    log(title("a step of a language model", facts))
    log(f"#{'variant':>12}{'step (ms)':>12}{'tokens/s':>12}{'of DDP':>10}{'sent (MB)':>12}")
    for row in steps:
        log(
            f"{row.variant:>13}{row.step_ms:>12.1f}{row.tokens_per_s:>12.0f}"
            f"{row.tokens_per_s / steps[0].tokens_per_s:>9.2f}x{row.sent_bytes / 1e6:>12.3f}"
        )
    write_report(args.json, facts, steps)
    stop_gloo()
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
