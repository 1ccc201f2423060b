# SPDX-License-Identifier: Apache-2.0
"""Programs that try to break running ahead: ranks differ in each pass, and events come between.

They are programs as `random_programs` makes them. Parameter 0 always has a gradient on every rank
with data, others where the program says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from random_programs import FIRST_GROUPS, Group, Pass, Program

Branches = Sequence[Iterable[int] | None]  # by rank: the parameters besides 0. None: no data


def program(
    size: int,
    middle: Iterable[Branches],
    *,
    first: Iterable[int] = (),
    first_groups: int = FIRST_GROUPS,
    events: dict[int, dict[str, Any]] | None = None,
    clears: bool | str = True,
    owners: Sequence[int] = (0, 0, 0, 0),
    sleeper: int | None = None,
    **options: Any,
) -> Program:
    """Return a program of one pass a step, or of `passes_per_step`.

    Args:
        middle: the branches of each pass.
        first: the parameters that all ranks have in the first passes, besides 0.
        events: by the row of `middle`, attributes of its group.
        sleeper: the rank that is late for every fifth pass.
        options: attributes of the program.
    """
    written = Program(
        -1, size, "hostile", [(3,), (2, 5), (40,), (7, 3)][: len(owners)], list(owners), **options
    )
    together = written.passes_per_step
    before = first_groups * together
    rows = [*[[list(first)] * size] * before, *middle]
    passes = [
        Pass(
            tuple(
                None if branch is None else {i: size * (i + rank + 1) for i in {0, *branch}}
                for rank, branch in enumerate(row)
            ),
            sleeper=sleeper if number % 5 == 4 else None,
        )
        for number, row in enumerate(rows)
    ]
    optimizers = range(written.optimizers)
    for begin in range(0, len(passes), together):
        part = tuple(passes[begin : begin + together])
        group = Group((), (clears,) * len(optimizers), (), part, (), False, "", tuple(optimizers))
        written.groups.append(replace(group, **(events or {}).get(begin - before, {})))
    return written


def only(rank: int, size: int, *branches: int) -> list[list[int]]:
    """Return the branches of a pass in which one rank has some."""
    return [list(branches) if other == rank else [] for other in range(size)]


def on_all(size: int, *branches: int) -> Branches:
    return [list(branches)] * size


def nothing(size: int, passes: int) -> list[Branches]:
    return [on_all(size)] * passes


def missing_on(rank: int, size: int, *others: int) -> Branches:
    """Return a pass in which one rank has no data, and the others have some branches."""
    return [None if other == rank else list(others) for other in range(size)]


def ranks_that_join(size: int) -> Program:
    """A rank joins, and others have a new gradient without it; then all join in one pass."""
    rows: list[Branches] = []
    events: dict[int, dict[str, Any]] = {}
    for epoch in range(3):
        leaving = epoch % size
        absent = [missing_on(leaving, size) for _ in range(5)]
        absent[2] = missing_on(leaving, size, 1 + epoch)
        begin = len(rows)
        events |= {
            begin + number: {"absent": (leaving,), "joins": number == 4} for number in range(5)
        }
        events[begin + 9] = {"joins": True}
        rows += [*absent, *nothing(size, 4), on_all(size, 1)]
    return program(size, [*rows, *nothing(size, 4)], events=events)


def optimizers_in_turn(size: int) -> Program:
    """The optimizers of a GAN take passes and steps in turn; some passes have a new gradient."""
    rows = [on_all(size, 2, *[3] * (number in (8, 9, 15))) for number in range(24)]
    events = {number: {"steps": (number % 2,)} for number in range(24)}
    return program(size, rows, first=[2], owners=TWO, events=events)


TWO = (0, 0, 1, 1)  # the optimizer of each parameter
HALF = {"momentum": 0.5}

# By their names, programs of a number of ranks n.
HOSTILE: dict[str, Callable[[int], Program]] = {
    # --- gradients that come and go
    "many_equal_passes": lambda n: program(n, nothing(n, 100), first=[1], sleeper=1, **HALF),
    # Two ranks have a new gradient each, in the same pass; a third one has none.
    "two_ranks_ask_in_one_pass": lambda n: program(
        n, [[[1], [2], []][:n], *nothing(n, 6), *[[[1], [2], []][:n]] * 2]
    ),
    # No rank has the planned gradients in one pass: all average all branches at once.
    "each_rank_has_another_or_no_data": lambda n: program(
        n, [on_all(n), [[1], [2], None][:n], *nothing(n, 4)], first=[3], **HALF
    ),
    # Rank 0 has a new gradient, rank 1 another one in the next pass, and so on.
    "every_rank_asks_in_its_own_pass": lambda n: program(
        n, [only(number % n, n, 1 + number % 3) for number in range(9)]
    ),
    # A rank has a new gradient one pass before all ranks have another one.
    "a_new_gradient_everywhere_behind_one_on_a_rank": lambda n: program(
        n, [only(1, n, 1), on_all(n, 2), on_all(n, 2), only(0, n, 1)]
    ),
    # All ranks have a new gradient in a pass, and another one in the next pass.
    "new_gradients_everywhere_in_turn": lambda n: program(
        n, [on_all(n, i) for i in (1, 2, 3, 1, 2, 3)]
    ),
    "new_gradients_everywhere_for_good": lambda n: program(n, [on_all(n, 1)] * 12, **HALF),
    # In some passes no rank has a planned gradient, in others only rank 0 has it.
    "missing_on_all_ranks_or_on_some": lambda n: program(
        n, [on_all(n), on_all(n), only(0, n, 1), on_all(n, 1)] * 3, first=[1], **HALF
    ),
    # In the passes before a step a planned gradient exists once, and stays as it is then.
    "missing_where_gradients_add_up": lambda n: program(
        n, [on_all(n, 1), *nothing(n, 2)] * 4, first=[1], passes_per_step=3, **HALF
    ),
    "missing_and_zeroed": lambda n: program(
        n, [on_all(n, 1), *nothing(n, 2)] * 4, first=[1], clears=False, is_sum=True
    ),
    # A branch is used by another rank in each pass, and never by two.
    "alternating_from_the_start": lambda n: program(
        n, [only(i % n, n, 1, 2) for i in range(12)], first=[1, 2], keeps=True, **HALF
    ),
    # No rank has data in some passes: the optimizer steps with old gradients, or with none.
    "passes_without_any_gradient": lambda n: program(
        n,
        [[None] * n, on_all(n, 1), *[[None] * n] * 3, *nothing(n, 2)],
        first=[1],
        clears=False,
        **HALF,
    ),
    "one_rank_without_data": lambda n: program(
        n, [missing_on(number % n, n, 1) for number in range(12)], first=[1, 2], **HALF
    ),
    # A rank skips the pass in which another one has a new gradient, and later passes.
    "without_data_when_another_rank_asks": lambda n: program(
        n, [[[1], None, []][:n], *[missing_on(1, n)] * 6]
    ),
    # A gradient long missing on all ranks leaves the plan at the next change; then one has it.
    "back_after_many_passes": lambda n: program(
        n,
        [
            *(*nothing(n, 20), only(0, n, 2)),
            *(*nothing(n, 20), only(1, n, 1)),
            *(*nothing(n, 3), only(0, n, 1)),
        ],
        first=[1],
    ),
    # The new gradient exists in one of the passes before a step, or in all of them.
    "new_while_accumulating": lambda n: program(
        n,
        [only(0, n, 1), *nothing(n, 5), only(1, n, 2), only(1, n, 2), *nothing(n, 4)],
        passes_per_step=2,
    ),
    # zero_grad(set_to_none=False): gradients outside the plan are zeros, not missing.
    "new_beside_kept_zeros": lambda n: program(
        n, [only(number % n, n, 1, 2) for number in range(20)], clears=False
    ),
    # The other ranks are passes ahead of the rank that has new gradients.
    "a_late_rank_asks": lambda n: program(n, [only(1, n, 1), *nothing(n, 8)] * 2, sleeper=1),
    "a_late_rank_is_asked": lambda n: program(n, [only(1, n, 1), *nothing(n, 8)] * 2, sleeper=0),
    # --- several optimizers
    # The second optimizer has gradients on one rank alone after the first passes.
    "an_optimizer_of_one_rank": lambda n: program(
        n, [only(1, n, 2, 3)] * 10, first=[1, 2, 3], owners=TWO, **HALF
    ),
    # The second optimizer has its first gradients late, and on one rank alone.
    "an_optimizer_that_one_rank_begins": lambda n: program(n, [only(1, n, 2)] * 10, owners=TWO),
    # All have new gradients, and know it.
    "two_optimizers_ask_in_one_pass": lambda n: program(
        n, [[[1], *[[2, 3]] * (n - 1)], *nothing(n, 8)], owners=TWO
    ),
    "optimizers_in_turn": optimizers_in_turn,
    # --- events
    "ranks_that_join": ranks_that_join,
    # add_param_group() while passes are planned, and passes with the new gradients after it.
    "parameters_that_are_added": lambda n: program(
        n,
        [*nothing(n, 2), *[on_all(n, 3)] * 4, *nothing(n, 2), on_all(n, 2, 3)] * 2,
        events={0: {"adds": (3,)}, 4: {"adds": (2,)}},
    ),
    # The program sets `grad` to None itself, where all ranks have new gradients, too.
    "cleared_by_hand": lambda n: program(
        n, [on_all(n, 1 + number // 4) for number in range(12)], clears="by hand", **HALF
    ),
    # Process sets and optimizers come and go; a rank repeats a backward() that has failed.
    "calls_between_planned_passes": lambda n: program(
        n,
        nothing(n, 20),
        first=[1],
        events={
            2: {"failing": 1},
            4: {"before": ("process set",)},
            8: {"failing": 0},
            10: {"before": ("optimizer",)},
            15: {"before": ("optimizer", "process set")},
        },
        **HALF,
    ),
}


def hostile(name: str, size: int) -> Program:
    return replace(HOSTILE[name](size), kind=name)


def ends(ending: str, first_groups: int, size: int) -> Program:
    """Return a program with rank 1's misdeed before the first planned pass, or after it.

    It has two parameters, both with gradients: steps would agree on one that has none, and ranks
    that have left out a step would go on together.
    """
    return program(size, [], first=[1], first_groups=first_groups, owners=(0, 0), ending=ending)
