# SPDX-License-Identifier: Apache-2.0
"""Random training programs: all ranks' actions in every step, the same for the same seed.

Gradients do not depend on weights: the loss is a sum of parameters times small integers, which are
multiples of the number of ranks. So every sum and every average is exact, in any order of addition,
and weights can be compared bit by bit.

A program is of one of two kinds. In a STEADY one, every gradient exists on some rank in every pass
but two, or it comes for the first time on all ranks at once: the ranks know the gradients to
expect. In a WILD one, some ranks use branches for the first time before others do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

STEADY, WILD = "steady", "wild"

SHAPES: list[tuple[int, ...]] = [(), (1,), (3,), (2, 5), (7, 3), (40,), (16, 8), (300,)]
FIRST_GROUPS = 4  # groups in which every gradient of a steady program exists on some rank
# Additional calls of the user; after the passes only if all ranks have ended one: if a rank has
# skipped it, the others wait for its step.
BEFORE = [
    "host allreduce",
    "device allreduce",
    "device allgather",
    "evaluate",
    "host async",
    "process set",
    "optimizer",
]
AFTER = ["host allreduce", "evaluate", "broadcast object"]

Uses = dict[int, int]  # parameters, in the order of their use -> factors


@dataclass(frozen=True)
class Pass:
    """One backward pass.

    Attributes:
        uses: of each rank. None: it has no data, and calls no backward().
        synchronizes: False under no_sync().
        sleeper: the rank that sleeps first, if any.
        overflowing: the rank whose loss is infinite, if any.
    """

    uses: tuple[Uses | None, ...]
    synchronizes: bool = True
    sleeper: int | None = None
    overflowing: int | None = None


@dataclass(frozen=True)
class Group:
    """The passes before a step, and the step.

    Attributes:
        changes: (rank, parameter, requires_grad): parameters that are frozen and unfrozen.
        clears: by optimizer, the argument of zero_grad(). None: it is not called. "by hand": the
            program sets each `grad` to None.
        before: the user's calls before the passes, and `after` after them.
        passes: the passes of each rank.
        reduces: whether synchronize() comes before any read of gradients.
        clips: "value", "norm" or "".
        steps: the optimizers that take a step.
        adds: the parameters that are added to their optimizers first.
        failing: the rank whose first backward() fails before any gradient, and is repeated.
        absent: the ranks that have called join(), and do nothing.
        joins: whether all ranks call join() afterwards, and go on with the weights of the last.
    """

    changes: tuple[tuple[int, int, bool], ...]
    clears: tuple[bool | str | None, ...]
    before: tuple[str, ...]
    passes: tuple[Pass, ...]
    after: tuple[str, ...]
    reduces: bool
    clips: str
    steps: tuple[int, ...]
    adds: tuple[int, ...] = ()
    failing: int | None = None
    absent: tuple[int, ...] = ()
    joins: bool = False


@dataclass
class Program:
    """A program.

    Attributes:
        doubles: the parameters that are float64.
        owners: the optimizer of each parameter.
        casts: Compression.fp16.
        scales: GradScaler.
        bucket_groups: `groups` of DistributedOptimizer.
        keeps: whether the program keeps gradients, which keep their values.
        ending: rank 1's misdeed after all groups, of `program_runs.ENDINGS`: all get an error.
    """

    seed: int
    size: int
    kind: str
    shapes: list[tuple[int, ...]]
    owners: list[int]
    doubles: set[int] = field(default_factory=set)
    passes_per_step: int = 1
    momentum: float = 0.0
    is_sum: bool = False
    predivide: float = 1.0
    casts: bool = False
    scales: bool = False
    bucket_groups: int = 0
    keeps: bool = False
    ending: str = ""
    groups: list[Group] = field(default_factory=list)

    @property
    def optimizers(self) -> int:
        return max(self.owners) + 1

    def __str__(self) -> str:
        head = {name: value for name, value in vars(self).items() if name != "groups"}
        lines = [f"    {number}: {group}" for number, group in enumerate(self.groups)]
        return "\n".join([f"program: {head}", *lines])


def make_program(seed: int, size: int, kind: str | None = None) -> Program:
    """Return the program of a seed for a number of ranks."""
    rng = random.Random(f"{seed} of {size}")
    kind = kind or rng.choice([STEADY, WILD])
    count = rng.randint(3, 8)
    optimizers = rng.choice([1, 1, 2])
    owners = [index % optimizers for index in range(count)]
    rng.shuffle(owners)
    is_sum = rng.random() < 0.15
    program = Program(
        seed,
        size,
        kind,
        [rng.choice(SHAPES) for _ in range(count)],
        owners,
        doubles={index for index in range(count) if rng.random() < 0.15},
        passes_per_step=rng.choice([1, 1, 1, 2]),
        momentum=rng.choice([0.0, 0.5]),
        is_sum=is_sum,
        predivide=2.0 if not is_sum and rng.random() < 0.1 else 1.0,
        # A device divides float16 before it adds: a third would be rounded.
        casts=rng.random() < 0.2 and size in (1, 2, 4),
        scales=rng.random() < 0.3,
        bucket_groups=rng.choice([0, 0, 0, 2]),
        keeps=rng.random() < 0.2,
        ending="leaves" if rng.random() < 0.1 else "",
    )
    program.groups = list(_Author(program, rng).groups())
    return program


class _Author:
    """Writes the groups of a program."""

    def __init__(self, program: Program, rng: random.Random) -> None:
        self.program = program
        self.rng = rng
        self.ranks = range(program.size)
        self.parameters = range(len(program.shapes))
        # Branches without a gradient in the first groups; they differ between optimizers.
        count = rng.choice([0, 1, 1, 2])
        known = [program.owners.index(number) for number in range(program.optimizers)]
        rest = [index for index in self.parameters if index not in known]
        self.new = set(rng.sample(rest, min(count, len(rest))))
        self.trainable = [set(self.parameters) - self.new for _ in self.ranks]
        self.all_stepped = True
        self.may_lack = 2  # passes of a steady program in which no rank has some gradient
        # The share of parameters that a rank uses. With 1.0 it uses all, so ranks may differ.
        self.density = rng.choice([0.3, 0.6, 0.9, 1.0])

    def groups(self) -> Iterator[Group]:
        frozen = tuple((rank, index, False) for rank in self.ranks for index in sorted(self.new))
        for number in range(FIRST_GROUPS):
            yield self._full_group(frozen if number == 0 else ())
        if self.program.kind == STEADY:
            yield from self._steady_groups()
        else:
            yield from self._wild_groups()
        if self.program.ending:
            yield self._full_group(())

    def _steady_groups(self) -> Iterator[Group]:
        length = self.rng.choice([4, 8, 16])
        unfreezing = self.rng.randrange(length)
        for number in range(length):
            if number == unfreezing and self.new:
                changes = tuple((rank, i, True) for rank in self.ranks for i in sorted(self.new))
                self._apply(changes)
                yield self._full_group(changes)
            yield self._any_group(self._changes(steady=True))
            yield from self._quiet_groups()

    def _wild_groups(self) -> Iterator[Group]:
        for _ in range(self.rng.choice([5, 10, 10, 20])):
            yield self._any_group(self._changes(steady=False))
            yield from self._joined_groups()
            yield from self._quiet_groups()

    def _joined_groups(self) -> Iterator[Group]:
        """Return, now and then, groups after which all ranks join, some of them earlier."""
        program = self.program
        simple = program.momentum == 0 and not program.scales and program.passes_per_step == 1
        if not simple or self.rng.random() > 0.2:
            return
        number = self.rng.choice([1, 2, 4])
        absent = tuple(self.rng.sample(self.ranks, self.rng.randrange(program.size)))
        for left in reversed(range(number)):
            group = self._full_group(())
            passes = tuple(
                replace(
                    each, uses=tuple(None if r in absent else u for r, u in enumerate(each.uses))
                )
                for each in group.passes
            )
            clears = (True,) * program.optimizers
            yield replace(group, passes=passes, clears=clears, absent=absent, joins=left == 0)
        yield replace(self._full_group(()), clears=clears)

    def _quiet_groups(self) -> Iterator[Group]:
        """Return, now and then, identical groups, so that hosts begin to run ahead."""
        if self.rng.random() < 0.25:
            for _ in range(self.rng.choice([4, 6, 10])):
                yield self._full_group(())

    def _apply(self, changes: tuple[tuple[int, int, bool], ...]) -> None:
        for rank, index, requires_grad in changes:
            (self.trainable[rank].add if requires_grad else self.trainable[rank].discard)(index)
        self.new -= {index for _, index, requires_grad in changes if requires_grad}

    def _changes(self, *, steady: bool) -> tuple[tuple[int, int, bool], ...]:
        """Return the parameters to freeze and unfreeze, on one rank or on all."""
        if self.rng.random() < 0.6:
            return ()
        choices = [index for index in self.parameters if not steady or index not in self.new]
        index, requires_grad = self.rng.choice(choices), self.rng.random() < 0.6
        everybody = self.rng.random() < 0.4
        whose = list(self.ranks) if everybody else [self.rng.choice(self.ranks)]
        changes = tuple(
            (rank, index, requires_grad)
            for rank in whose
            if requires_grad or len(self.trainable[rank]) > 1
        )
        if steady and not requires_grad and len(self._owners(index)) <= len(changes):
            return ()  # a gradient that no rank would have afterwards
        self._apply(changes)
        return changes

    def _owners(self, index: int) -> list[int]:
        return [rank for rank in self.ranks if index in self.trainable[rank]]

    def _uses(self, rank: int, density: float) -> Uses:
        mine = sorted(self.trainable[rank])
        chosen = [index for index in mine if self.rng.random() < density] or [self.rng.choice(mine)]
        if self.rng.random() < 0.5:
            self.rng.shuffle(chosen)  # the order of readiness
        return {index: self._factor() for index in chosen}

    def _factor(self) -> int:
        return self.program.size * self.rng.choice([-2, -1, 1, 2])

    def _sleeper(self) -> int | None:
        return self.rng.choice(self.ranks) if self.rng.random() < 0.1 else None

    def _full_group(self, changes: tuple[tuple[int, int, bool], ...]) -> Group:
        """Return a group in which every rank has all gradients in every pass."""
        passes = tuple(
            Pass(tuple(self._uses(rank, 1.0) for rank in self.ranks), sleeper=self._sleeper())
            for _ in range(self.program.passes_per_step)
        )
        self.all_stepped = True
        everything = range(self.program.optimizers)
        return Group(
            changes,
            tuple(self.rng.random() < 0.7 for _ in everything),
            (),
            passes,
            (),
            self.program.scales and self.program.passes_per_step > 1,
            "",
            tuple(everything),
        )

    def _any_group(self, changes: tuple[tuple[int, int, bool], ...]) -> Group:
        program, rng = self.program, self.rng
        passes = self._passes()
        is_plain = len(passes) == 1 and passes[0].synchronizes and None not in passes[0].uses
        is_plain = is_plain and program.passes_per_step == 1
        clears = self._clears()
        steps = list(range(program.optimizers))
        if len(steps) == 2 and rng.random() < 0.3:
            steps = [rng.choice(steps)]  # as a GAN's optimizers do in turn
        rng.shuffle(steps)
        self.all_stepped = len(steps) == program.optimizers
        clips = rng.choice(["", "value", "norm"])
        reads = bool(clips) or program.scales
        failing = rng.choice(self.ranks) if is_plain and all(clears) else None
        return Group(
            changes,
            clears,
            tuple(what for what in BEFORE if rng.random() < 0.08),
            passes,
            tuple(what for what in AFTER if is_plain and rng.random() < 0.12),
            (reads and not is_plain) or rng.random() < 0.2,
            clips,
            tuple(steps),
            failing=failing if rng.random() < 0.1 else None,
        )

    def _clears(self) -> tuple[bool | str | None, ...]:
        """Gradients are kept over a step if all optimizers have taken it."""
        program = self.program
        may_keep = self.all_stepped and not (program.scales or program.is_sum)
        may_keep = may_keep and program.passes_per_step == 1
        if may_keep and self.rng.random() < 0.15:
            return (None,) * program.optimizers
        if self.rng.random() < 0.1:
            return ("by hand",) * program.optimizers
        return tuple(self.rng.random() < 0.7 for _ in range(program.optimizers))

    def _passes(self) -> tuple[Pass, ...]:
        """Return the passes of a group.

        Between two steps all ranks end equally many passes that synchronise, but a rank may leave
        out the only one.
        """
        rng, passes_per_step = self.rng, self.program.passes_per_step
        if passes_per_step > 1:
            count = rng.choice([passes_per_step, passes_per_step, 1])
            passes = [self._pass(may_skip=True) for _ in range(count)]
            return self._complete(passes)
        way = rng.choice(["one", "one", "one", "one", "many", "no_sync", "only no_sync"])
        if way == "one":
            return self._complete([self._pass(may_skip=True)])
        if way == "many":
            several = [self._pass(may_skip=False) for _ in range(rng.randint(2, 3))]
            return tuple(self._complete([each])[0] for each in several)
        passes = [self._pass(may_skip=True, synchronizes=False) for _ in range(2)]
        if way == "no_sync":
            passes.append(self._pass(may_skip=True))
        return self._complete(passes)

    def _complete(self, passes: list[Pass]) -> tuple[Pass, ...]:
        """In a steady program, give each gradient that is missing in these passes to some rank."""
        used = {index for each in passes for uses in each.uses for index in uses or ()}
        missing = set(self.parameters) - self.new - used
        if self.program.kind != STEADY or not missing:
            return tuple(passes)
        if self.may_lack and self.rng.random() < 0.1:
            self.may_lack -= 1
            return tuple(passes)
        *before, last = passes
        uses = [dict(each) if each is not None else None for each in last.uses]
        for index in sorted(missing):
            rank = self.rng.choice(self._owners(index))
            uses[rank] = {**(uses[rank] or {}), index: self._factor()}
        return (*before, replace(last, uses=tuple(uses)))

    def _pass(self, *, may_skip: bool, synchronizes: bool = True) -> Pass:
        rng = self.rng
        uses: list[Uses | None] = [self._uses(rank, self.density) for rank in self.ranks]
        if may_skip and rng.random() < 0.1:
            uses[rng.choice(self.ranks)] = None
        if may_skip and rng.random() < 0.03:
            uses = [None for _ in self.ranks]
        overflowing = rng.choice(self.ranks) if self.program.scales else None
        if rng.random() > 0.15 or overflowing is None or uses[overflowing] is None:
            overflowing = None
        return Pass(tuple(uses), synchronizes, self._sleeper(), overflowing)
