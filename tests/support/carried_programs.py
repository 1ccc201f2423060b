"""Programs that add gradients to averaged ones, against one process."""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

import torch_ring as hvd

__all__ = ["Ranks", "add_exactly", "train_at_random"]

ZEROS = ["to none", "to zero", "by hand", "in memory of the program"]
SIZES = (1, 7, 300)  # of the parameters; with DIRECT the last gradient lies in a block
DIRECT = {"TORCH_RING_DIRECT_GRADIENT_BYTES": "1024", "TORCH_RING_BUCKET_BYTES": "256"}


def uneven(parameter: Tensor, number: int) -> Tensor:
    """Return numbers of this rank, whose sums are rounded."""
    generator = torch.Generator().manual_seed(100 * number + hvd.rank())
    numbers = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return (numbers * 10.0 ** (number % 4 - 2)).to(parameter.device)


def add_exactly(op: hvd.ReduceOp, device: str, how: str, **options: Any) -> None:
    """The sum of averaged passes is exactly the sum of their averages, also if it was changed.

    Args:
        op: of the optimizer.
        device: of the parameters.
        how: "" or the place of the gradients.
        options: others of DistributedOptimizer.
    """
    dtype = torch.complex64 if how == "complex" else torch.float32
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype, device=device)) for n in SIZES]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=op, **options)

    def backward(number: int) -> None:
        products = [(p * uneven(p, number).conj()).real.sum() for p in parameters]
        sum(products).backward()

    for _ in range(3):
        averages = []
        for number in range(4):
            optimizer.zero_grad()
            backward(number)
            averages.append([p.grad.clone() for p in parameters])
            optimizer.step()
        optimizer.zero_grad()
        if how == "in the program's memory":
            flat = torch.zeros(sum(SIZES), dtype=dtype, device=device)
            for p, part in zip(parameters, flat.split(SIZES), strict=True):
                p.grad = part
        expected = [torch.zeros_like(p) for p in parameters]
        for number, average in enumerate(averages):
            backward(number)
            expected = [e + a for e, a in zip(expected, average, strict=True)]
            for p, e in zip(parameters, expected, strict=True):
                assert torch.equal(p.grad, e), (number, (p.grad - e).abs().max())
            if number == 1:  # what each rank does to an average stays its own
                for p, e in zip(parameters, expected, strict=True):
                    p.grad.mul_(1 + hvd.rank())
                    e.mul_(1 + hvd.rank())
        optimizer.step()


@dataclass
class Ranks:
    """One parameter's gradient on all ranks: a part that is averaged, and an open one.

    Attributes:
        averaged: by rank; None: there is none.
        open: by rank, not reduced yet; None: there is none.
        changed: by rank, whether the program has changed both parts together.
        is_stale: whether no pass has reduced it since the last step.
        is_written: whether the program has written to it since then.
    """

    averaged: list[float | None] = field(default_factory=lambda: [None] * hvd.size())
    open: list[float | None] = field(default_factory=lambda: [None] * hvd.size())
    changed: list[bool] = field(default_factory=lambda: [False] * hvd.size())
    is_stale: bool = True
    is_written: bool = False

    def value(self, rank: int) -> float:
        return (self.averaged[rank] or 0.0) + (self.open[rank] or 0.0)

    def multiply(self, factor: float) -> None:
        """Multiply it on all ranks. The program's change of both parts counts as an open one."""
        for rank in range(hvd.size()):
            average, mine = self.averaged[rank], self.open[rank]
            if mine is not None:
                self.open[rank] = factor * self.value(rank) - (average or 0.0)
                self.changed[rank] = average is not None
            elif average is not None:
                self.averaged[rank] = factor * average
                self.is_written = self.is_stale

    def reduce(self, op: hvd.ReduceOp) -> None:
        """Reduce the open parts, if there are any."""
        size = hvd.size()
        if all(part is None for part in self.open):
            return
        total = sum(part or 0.0 for part in self.open) / (1 if op == hvd.Sum else size)
        both = zip(self.averaged, self.open, strict=True)
        if not any(a is not None and o is not None for a, o in both):
            self.averaged = [0.0] * size  # no rank has added to an average
        elif None in self.averaged or len(set(self.changed)) > 1:
            self.averaged = [sum(a or 0.0 for a in self.averaged) / size] * size
        self.averaged = [(a or 0.0) + total for a in self.averaged]
        self.open = [None] * size
        self.changed = [False] * size
        self.is_stale = self.is_written = False

    def reduce_in_step(self, op: hvd.ReduceOp) -> None:
        """The same in step(), which sends again what was averaged in an earlier step."""
        for rank in range(hvd.size()):
            average = self.averaged[rank]
            if self.is_stale and self.open[rank] is None and average is not None:
                again = hvd.size() if op == hvd.Sum and not self.is_written else 1
                self.open[rank], self.averaged[rank] = average / again, None
        self.reduce(op)
        self.is_stale = True


def train_at_random(seed: int, op: hvd.ReduceOp, device: str, **options: Any) -> None:
    """Passes, also under no_sync(), and changes of gradients between them, in any order.

    Args:
        seed: of the program.
        op: of the optimizer.
        device: of the parameters.
        options: others of DistributedOptimizer.
    """
    choice, size, me = random.Random(seed), hvd.size(), hvd.rank()
    parameters = [nn.Parameter(torch.zeros(n, dtype=torch.float64, device=device)) for n in SIZES]
    parameters.append(nn.Parameter(torch.zeros(5, dtype=torch.complex128, device=device)))
    kinds = range(len(parameters))
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.25), op=op, **options)
    gradients = [Ranks() for _ in kinds]
    weights = [0.0 for _ in kinds]
    done = []

    def zero(ranks: list[int], how: str) -> None:
        if me in ranks:
            if how in ("by hand", "in memory of the program"):
                for p in parameters:
                    given = torch.zeros(2, *p.shape, dtype=p.dtype, device=device)[1]
                    p.grad = None if how == "by hand" else given
            else:
                optimizer.zero_grad(set_to_none=how == "to none")
        for rank in ranks:
            for gradient in gradients:
                gradient.averaged[rank] = None
                gradient.changed[rank] = False
                keeps_zero = how == "to zero" and gradient.open[rank] is not None
                gradient.open[rank] = 0.0 if keeps_zero else None

    def backward(is_alone: bool) -> None:
        losses = []
        for rank in range(size):
            for i in choice.sample(kinds, choice.randint(1, len(kinds))):
                factor = choice.randint(-4, 4)
                gradients[i].open[rank] = (gradients[i].open[rank] or 0.0) + factor
                losses += [parameters[i].real.sum() * factor] if rank == me else []
        with optimizer.no_sync() if is_alone else contextlib.nullcontext():
            sum(losses).backward()

    for _ in range(30):
        what = choice.choice(["pass"] * 5 + ["alone"] * 2 + ["clip", "step", "step", "zero"])
        if what == "pass":
            if choice.random() < 0.15:
                zero([choice.randrange(size)], choice.choice(["to none", "by hand"]))
                what = "pass after one rank has dropped its gradients"
            backward(is_alone=False)
            for gradient in gradients:
                gradient.reduce(op)
        elif what == "alone":
            backward(is_alone=True)
        elif what == "clip":
            factor = choice.choice([0.5, 2.0])
            for p, gradient in zip(parameters, gradients, strict=True):
                gradient.multiply(factor)
                if p.grad is not None:
                    p.grad.mul_(factor)
        elif what == "zero":
            zero(list(range(size)), choice.choice(ZEROS))
        else:
            optimizer.step()
            for i, gradient in enumerate(gradients):
                gradient.reduce_in_step(op)
                weights[i] -= 0.25 * gradient.value(me)
        done.append(what)
        for i, p in enumerate(parameters):
            text = f"program {seed}, parameter {i}, {gradients[i]}, after {done}"
            found = 0.0 if p.grad is None else p.grad[-1].real.item()
            assert math.isclose(found, gradients[i].value(me), abs_tol=1e-9), text
            assert math.isclose(p[-1].real.item(), weights[i], abs_tol=1e-9), text
