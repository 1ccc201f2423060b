# SPDX-License-Identifier: Apache-2.0
"""Programs that add gradients to averaged ones, against one process."""

from __future__ import annotations

import contextlib
import functools
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
        is_stale: whether no pass has reduced it since the last step.
        is_written: whether the program has written to it since then.
        tells_writes: whether step() can know that; not of a sparse gradient.
    """

    averaged: list[float | None] = field(default_factory=lambda: [None] * hvd.size())
    open: list[float | None] = field(default_factory=lambda: [None] * hvd.size())
    is_stale: bool = True
    is_written: bool = False
    tells_writes: bool = True

    @property
    def has_both(self) -> bool:
        """Whether it has an averaged part and an open one on some rank."""
        both = zip(self.averaged, self.open, strict=True)
        return any(a is not None and o is not None for a, o in both)

    def value(self, rank: int) -> float:
        return (self.averaged[rank] or 0.0) + (self.open[rank] or 0.0)

    def multiply(self, factor: float) -> None:
        """Multiply it on all ranks. With a change of both parts, all of it is open."""
        for rank in range(hvd.size()):
            average, mine = self.averaged[rank], self.open[rank]
            if mine is not None:
                self.open[rank], self.averaged[rank] = factor * self.value(rank), None
            elif average is not None:
                self.averaged[rank] = factor * average
                self.is_written = self.is_stale and self.tells_writes

    def reduce(self, op: hvd.ReduceOp, joined: int | None = None) -> None:
        """Reduce the open parts, if there are any. A rank may have joined."""
        size = hvd.size()
        active = [rank for rank in range(size) if rank != joined]
        if all(self.open[rank] is None for rank in active):
            return
        if joined is not None:  # as if it had what the others have
            other = active[0]
            self.averaged[joined], self.open[joined] = self.averaged[other], None
        total = sum(part or 0.0 for part in self.open) / (1 if op == hvd.Sum else size)
        if not self.has_both:
            self.averaged = [0.0] * size  # no rank has added to an average
        elif None in self.averaged:
            self.averaged = [sum(self.averaged[r] or 0.0 for r in active) / len(active)] * size
        self.averaged = [(a or 0.0) + total for a in self.averaged]
        self.open = [None] * size
        self.is_stale = self.is_written = False

    def reduce_in_step(self, op: hvd.ReduceOp, joined: int | None = None) -> None:
        """The same in step(), which sends again what was averaged in an earlier step."""
        active = [rank for rank in range(hvd.size()) if rank != joined]
        for rank in active:
            average = self.averaged[rank]
            if self.is_stale and self.open[rank] is None and average is not None:
                of_sum = hvd.size() if op == hvd.Sum else 1
                again = 1 if self.is_written else of_sum * len(active) / hvd.size()
                self.open[rank], self.averaged[rank] = average / again, None
        self.reduce(op, joined)
        self.is_stale = True


def _note(reached: list[int], index: int, _: Tensor) -> None:
    reached.append(index)


def _fail_after(reached: list[int], _: Tensor) -> None:
    if reached:
        raise ArithmeticError


class Program:
    """A random program on this rank, and the gradients of all ranks that it should have.

    Args:
        seed: of the program.
        op: of the optimizer.
        device: of the parameters.
        options: others of DistributedOptimizer.
    """

    def __init__(self, seed: int, op: hvd.ReduceOp, device: str, **options: Any) -> None:
        self.choice = random.Random(seed)
        self.op, self.size, self.me = op, hvd.size(), hvd.rank()
        self.parameters = [
            nn.Parameter(torch.zeros(n, dtype=torch.float64, device=device)) for n in SIZES
        ]
        self.parameters.append(nn.Parameter(torch.zeros(5, dtype=torch.complex128, device=device)))
        if device == "cpu":
            self.parameters.append(nn.Parameter(torch.zeros(4, 2, dtype=torch.float64)))  # sparse
        self.optimizer = hvd.DistributedOptimizer(SGD(self.parameters, lr=0.25), op=op, **options)
        self.gradients = [Ranks(tells_writes=p.dim() == 1) for p in self.parameters]
        self.weights = [0.0 for _ in self.parameters]
        self.joined: int | None = None
        self.reached: list[int] = []
        for index, parameter in enumerate(self.parameters):
            # No reference to this object, which goes with its last use: else ranks would drop its
            # optimizer at different times.
            hook = functools.partial(_note, self.reached, index)
            parameter.register_post_accumulate_grad_hook(hook)

    @property
    def is_here(self) -> bool:
        """Whether this rank has not joined."""
        return self.joined != self.me

    def zero(self, ranks: list[int], how: str) -> None:
        """Zero the gradients of some ranks."""
        if self.me in ranks and self.is_here:
            if how in ("by hand", "in memory of the program"):
                for p in self.parameters:
                    given = torch.zeros(2, *p.shape, dtype=p.dtype, device=p.device)[1]
                    p.grad = None if how == "by hand" or p.dim() == 2 else given
            else:
                self.optimizer.zero_grad(set_to_none=how == "to none")
        for rank in ranks:
            for gradient in self.gradients:
                gradient.averaged[rank] = None
                keeps_zero = how == "to zero" and gradient.open[rank] is not None
                gradient.open[rank] = 0.0 if keeps_zero else None

    def backward(self, how: str) -> None:
        """Take a pass, in which each rank has gradients of some parameters.

        Args:
            how: "alone": under no_sync(); "fail": a hook fails on all ranks.
        """
        live = [i for i, p in enumerate(self.parameters) if p.requires_grad]
        factors: list[dict[int, int]] = []
        for _ in range(self.size):
            chosen = self.choice.sample(live, self.choice.randint(min(2, len(live)), len(live)))
            factors.append({i: self.choice.randint(-4, 4) for i in chosen})
        self.reached.clear()
        if self.is_here:
            losses = [self._term(i) * factor for i, factor in factors[self.me].items()]
            for loss in losses if how == "fail" else ():
                loss.register_hook(functools.partial(_fail_after, self.reached))
            with self.optimizer.no_sync() if how == "alone" else contextlib.nullcontext():
                if how == "fail":
                    with contextlib.suppress(ArithmeticError):
                        sum(losses).backward()
                else:
                    sum(losses).backward()
        reached = hvd.allgather_object(self.reached) if how == "fail" else factors
        for rank in range(self.size):
            for i in reached[rank]:
                mine = self.gradients[i].open
                mine[rank] = (mine[rank] or 0.0) + factors[rank][i]

    def _term(self, index: int) -> Tensor:
        parameter = self.parameters[index]
        if parameter.dim() == 2:  # of which only the last row has a gradient
            last = torch.tensor([3])
            return torch.nn.functional.embedding(last, parameter, sparse=True).sum() * 1.0
        return parameter.real.sum() * 1.0

    def freeze(self) -> None:
        """Freeze a parameter on all ranks, or thaw it."""
        parameter = self.choice.choice(self.parameters[1:])
        parameter.requires_grad_(not parameter.requires_grad)

    def join(self) -> None:
        """One rank joins; the others go on for a while, and join, too."""
        self.joined = self.choice.randrange(self.size)
        if not self.is_here:
            hvd.join()
        done = []
        for _ in range(self.choice.randint(1, 4)):
            what = self.choice.choice(["pass", "pass", "alone", "clip", "step", "zero"])
            done.append(what)
            self.play(what)
            if self.is_here:
                self.check(f"without rank {self.joined}: {done}")
        if self.is_here:
            hvd.join()
        other = (self.joined + 1) % self.size  # which has taken the steps
        self.joined = None
        hvd.broadcast_parameters({str(i): p for i, p in enumerate(self.parameters)}, other)
        self.weights = hvd.allgather_object(self.weights)[other]
        self.zero(list(range(self.size)), "to none")

    def play(self, what: str) -> None:
        """Play one part of the program."""
        if what == "pass" and self.joined is None and self.choice.random() < 0.15:
            self.zero(
                [self.choice.randrange(self.size)], self.choice.choice(["to none", "by hand"])
            )
        if what == "fail" and sum(p.requires_grad for p in self.parameters) < 2:
            return  # it fails after a first gradient
        if what in ("pass", "alone", "fail"):
            self.backward(what)
            for gradient in self.gradients if what == "pass" else ():
                gradient.reduce(self.op, self.joined)
        elif what == "clip":
            factor = self.choice.choice([0.0, 0.5, 3.0])
            for p, gradient in zip(self.parameters, self.gradients, strict=True):
                if gradient.has_both and self.op == hvd.Sum:
                    factor = 0.0  # another change is refused
                gradient.multiply(factor)
                if p.grad is not None and self.is_here:
                    p.grad.mul_(factor)
        elif what == "zero":
            self.zero(list(range(self.size)), self.choice.choice(ZEROS))
        elif what == "freeze":
            self.freeze()
        elif what == "join":
            self.join()
        else:
            if self.is_here:
                self.optimizer.step()
            for i, gradient in enumerate(self.gradients):
                gradient.reduce_in_step(self.op, self.joined)
                rank = self.me if self.is_here else (self.me + 1) % self.size
                self.weights[i] -= 0.25 * gradient.value(rank)

    def check(self, text: str) -> None:
        """Compare the gradients and weights of this rank."""
        for i, p in enumerate(self.parameters):
            grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            found = [each.flatten()[-1].real.item() for each in (grad, p)]
            wanted = [self.gradients[i].value(self.me), self.weights[i]]
            is_close = all(map(functools.partial(math.isclose, abs_tol=1e-9), found, wanted))
            assert is_close, f"{text}, parameter {i}, {p.grad}, {self.gradients[i]}: {found}"


def train_at_random(
    seed: int, op: hvd.ReduceOp, device: str, *, may_fail: bool = False, **options: Any
) -> None:
    """Passes, changes of gradients between them, failures, a rank that joins, in any order.

    Args:
        seed: of the program.
        op: of the optimizer.
        device: of the parameters.
        may_fail: whether passes may fail: not where buckets are sent early.
        options: others of DistributedOptimizer.
    """
    program = Program(seed, op, device, **options)
    kinds = ["pass"] * 5 + ["alone"] * 2 + ["clip", "step", "step", "zero", "freeze", "join"]
    kinds += ["fail"] if may_fail else []
    done: list[str] = []
    for _ in range(30):
        what = program.choice.choice(kinds)
        done.append(what)
        program.play(what)
        program.check(f"program {seed}, after {done}")
