# SPDX-License-Identifier: Apache-2.0
"""Random training programs whose ranks differ in each pass: they are made to break running ahead.

`program_runs` plays them. The loss is a sum of parameters times small integers, so gradients do not
depend on weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch_ring as hvd

Uses = Mapping[int, int]  # parameters, in the order of their use -> factors

FIRST_STEPS = 4  # after which passes are planned
CALLS = ("host", "late host", "device", "gather", "optimizer", "process set")


@dataclass(frozen=True)
class Step:
    """The passes before a step of optimizers, and that step.

    Attributes:
        passes: in each pass the uses of each rank. None: it has no data, and calls no backward().
        alone: the number of first passes under no_sync().
        clears: the argument of zero_grad(). None: it is not called. "by hand": the program sets
            each `grad` to None.
        steps: the optimizers that step, in this order. None: all.
        calls: the user's other calls, before the passes.
        late: the rank that is late for the first pass.
        failing: the rank whose first backward() fails before any gradient, and is repeated.
        overflowing: the rank whose loss is infinite in the first pass.
        reduces: whether synchronize() comes before any read of gradients.
        clips: the largest norm of gradients.
        absent: the ranks that have called join(), and do nothing.
        joins: whether all ranks call join() afterwards, and go on with the weights of the last.
    """

    passes: tuple[tuple[Uses | None, ...], ...]
    alone: int = 0
    clears: bool | str | None = True
    steps: tuple[int, ...] | None = None
    calls: tuple[str, ...] = ()
    late: int | None = None
    failing: int | None = None
    overflowing: int | None = None
    reduces: bool = False
    clips: float | None = None
    absent: tuple[int, ...] = ()
    joins: bool = False


@dataclass
class Program:
    """A program.

    Attributes:
        owners: the optimizer of each parameter.
        options: of DistributedOptimizer.
        scales: whether a GradScaler is used.
        keeps: whether the program keeps gradients, which keep their values.
    """

    name: str
    size: int
    shapes: Sequence[tuple[int, ...]]
    owners: Sequence[int]
    options: dict[str, Any] = field(default_factory=dict)
    momentum: float = 0.0
    scales: bool = False
    keeps: bool = False
    steps: list[Step] = field(default_factory=list)


def make_program(seed: int, size: int) -> Program:
    """Return the program of a seed for a number of ranks.

    In every second one the ranks know the gradients to expect: each exists on some rank in every
    pass. In the others a rank may use a branch that was not used in the passes before.
    """
    draw = random.Random(f"{seed} of {size}")
    count = draw.randint(3, 8)
    owners = [index % draw.choice([1, 1, 2]) for index in range(count)]
    scales, op = draw.random() < 0.3, draw.choice([hvd.Average] * 5 + [hvd.Sum])
    made = Program(
        str(seed),
        size,
        [draw.choice([(), (1,), (3,), (2, 5), (7, 3), (40,), (300,)]) for _ in range(count)],
        owners,
        {
            "op": op,
            "backward_passes_per_step": draw.choice([1, 1, 1, 2]),
            "groups": draw.choice([0, 0, 0, 2]),
            "gradient_predivide_factor": draw.choice([1.0, 2.0]) if op == hvd.Average else 1.0,
            # A device divides float16 before it adds: a third would be rounded. A large scale
            # makes float16 infinite.
            "compression": hvd.Compression.fp16
            if draw.random() < 0.2 and size == 2 and not scales
            else hvd.Compression.none,
        },
        momentum=draw.choice([0.0, 0.5]),
        scales=scales,
        keeps=draw.random() < 0.2,
    )
    made.steps += _Author(made, draw).steps()
    return made


class _Author:
    """Writes the steps of a program."""

    def __init__(self, made: Program, draw: random.Random) -> None:
        self.made, self.draw = made, draw
        self.ranks = range(made.size)
        self.optimizers = sorted(set(made.owners))
        self.together = made.options["backward_passes_per_step"]
        self.is_steady = draw.random() < 0.5
        self.roots = sorted({made.owners.index(owner) for owner in self.optimizers})
        self.known = list(range(len(made.shapes)))
        if self.is_steady:  # others are new to all ranks in the same step
            some = draw.sample(self.known, draw.randrange(len(self.known)))
            self.known = sorted({*self.roots, *some})
        self.density = draw.choice([0.3, 0.6, 0.9, 1.0])  # the share of them that a rank uses
        self.all_stepped = True

    def steps(self) -> Iterable[Step]:
        yield from self._equal(FIRST_STEPS)
        length = self.draw.choice([5, 10, 20])
        may_join = not (self.made.momentum or self.made.scales or self.together > 1)
        for number in range(length):
            yield self._any_step()
            if self.is_steady and number == length // 2:
                self.known = list(range(len(self.made.shapes)))
                yield from self._equal(1)
            elif self.draw.random() < 0.25:  # passes are planned again
                yield from self._equal(self.draw.choice([4, 6]))
            if may_join and self.draw.random() < 0.2:
                yield from self._joining()

    def _equal(self, count: int) -> Iterable[Step]:
        """Return steps in which every rank has the same gradients in every pass."""
        self.all_stepped = True
        used = self.known
        if not self.is_steady:
            used = sorted({*self.roots, *(i for i in self.known if self.draw.random() < 0.7)})
        for _ in range(count):
            passes = tuple(self._pass(used, 1.0) for _ in range(self.together))
            reduces = self.made.scales and self.together > 1
            yield Step(passes, clears=self.draw.random() < 0.7, reduces=reduces)

    def _joining(self) -> Iterable[Step]:
        """Return steps after which all ranks join, some of them earlier."""
        absent = self.draw.sample(self.ranks, self.draw.randrange(self.made.size))
        for left in reversed(range(self.draw.choice([1, 2, 4]))):
            uses = list(self._pass(self.known, self.density))
            for rank in absent:
                uses[rank] = None
            yield Step((tuple(uses),), absent=tuple(absent), joins=left == 0)
        yield from (replace(step, clears=True) for step in self._equal(1))

    def _any_step(self) -> Step:
        """Return a step.

        Between two steps all ranks end equally many passes that synchronise, but a rank may leave
        out the only one.
        """
        draw, made = self.draw, self.made
        count, alone = draw.choice([(1, 0)] * 4 + [(2, 0), (2, 2), (3, 2)])
        if self.together > 1:
            count, alone = draw.choice([1, self.together]), 0
        skips = self.together > 1 or alone > 0 or count == 1
        passes = tuple(self._pass(self.known, self.density, skips) for _ in range(count))
        is_plain = count == self.together == 1 and None not in passes[0]
        may_keep = self.all_stepped and self.together == 1 and made.options["op"] != hvd.Sum
        may_keep = may_keep and not made.scales
        clears = draw.choice([True] * 6 + [False] * 3 + ["by hand"] + [None] * may_keep)
        stepping = 1 if draw.random() < 0.3 else len(self.optimizers)  # in turn as a GAN's
        self.all_stepped = stepping == len(self.optimizers)
        clips = draw.choice([None, None, 8.0])
        return Step(
            passes,
            alone,
            clears,
            tuple(draw.sample(self.optimizers, stepping)),
            tuple(call for call in CALLS if draw.random() < 0.08),
            late=self._rank(0.1),
            failing=self._rank(0.1) if is_plain and clears else None,
            overflowing=self._rank(0.15) if made.scales else None,
            reduces=not is_plain and (clips is not None or made.scales),
            clips=clips,
        )

    def _pass(
        self, known: Sequence[int], density: float, may_skip: bool = False
    ) -> tuple[Uses | None, ...]:
        draw = self.draw
        uses: list[Uses | None] = []
        for _ in self.ranks:
            chosen = [i for i in known if draw.random() < density]
            chosen = chosen or [draw.choice(known)]
            if draw.random() < 0.5:
                draw.shuffle(chosen)  # the order of readiness
            uses.append({i: self.made.size * draw.choice([-2, -1, 1, 2]) for i in chosen})
        missing = set(known).difference(*uses) if self.is_steady else ()
        rank = draw.choice(self.ranks)
        uses[rank] = {**uses[rank], **dict.fromkeys(missing, self.made.size)}
        if may_skip and draw.random() < 0.1:
            uses[draw.choice(self.ranks)] = None
        if may_skip and draw.random() < 0.03:
            uses = [None for _ in self.ranks]
        return tuple(uses)

    def _rank(self, chance: float) -> int | None:
        return self.draw.choice(self.ranks) if self.draw.random() < chance else None
