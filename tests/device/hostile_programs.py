"""Programs that try to break running ahead: ranks differ in each pass, and events come between.

Each is a function from the number of ranks to a program as `random_programs` makes them. Parameter
0 always has a gradient on every rank with data, others where the program says.
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


# --- gradients that come and go


def many_equal_passes(size: int) -> Program:
    return program(size, nothing(size, 100), first=[1], momentum=0.5, sleeper=1)


def two_ranks_ask_in_one_pass(size: int) -> Program:
    """Two ranks have a new gradient each, in the same pass; a third one has none."""
    both: Branches = [[1], [2], []][:size]
    return program(size, [both, *nothing(size, 6), both, both])


def each_rank_has_another_or_no_data(size: int) -> Program:
    """No rank has the planned gradients in one pass: all average all branches at once."""
    differing: Branches = [[1], [2], None][:size]
    return program(size, [on_all(size), differing, *nothing(size, 4)], first=[3], momentum=0.5)


def every_rank_asks_in_its_own_pass(size: int) -> Program:
    """Rank 0 has a new gradient, rank 1 another one in the next pass, and so on."""
    return program(size, [only(number % size, size, 1 + number % 3) for number in range(9)])


def a_new_gradient_everywhere_behind_one_on_a_rank(size: int) -> Program:
    """A rank has a new gradient one pass before all ranks have another one."""
    everywhere = on_all(size, 2)
    return program(size, [only(1, size, 1), everywhere, everywhere, only(0, size, 1)])


def new_gradients_everywhere_in_turn(size: int) -> Program:
    """All ranks have a new gradient in a pass, and another one in the next pass."""
    return program(size, [on_all(size, i) for i in (1, 2, 3, 1, 2, 3)])


def new_gradients_everywhere_for_good(size: int) -> Program:
    return program(size, [on_all(size, 1)] * 12, momentum=0.5)


def missing_on_all_ranks_or_on_some(size: int) -> Program:
    """In some passes no rank has a planned gradient, in others only rank 0 has it."""
    gone = [on_all(size), on_all(size), only(0, size, 1), on_all(size, 1)]
    return program(size, gone * 3, first=[1], momentum=0.5)


def missing_where_gradients_add_up(size: int) -> Program:
    """In the passes before a step a planned gradient exists once, and stays as it is then."""
    rows = [on_all(size, 1), *nothing(size, 2)] * 4
    return program(size, rows, first=[1], passes_per_step=3, momentum=0.5)


def missing_and_zeroed(size: int) -> Program:
    rows = [on_all(size, 1), *nothing(size, 2)] * 4
    return program(size, rows, first=[1], clears=False, is_sum=True)


def alternating_from_the_start(size: int) -> Program:
    """A branch is used by another rank in each pass, and never by two."""
    turns = [only(number % size, size, 1, 2) for number in range(12)]
    return program(size, turns, first=[1, 2], momentum=0.5, keeps=True)


def passes_without_any_gradient(size: int) -> Program:
    """No rank has data in some passes: the optimizer steps with old gradients, or with none."""
    empty: Branches = [None] * size
    rows = [empty, on_all(size, 1), empty, empty, empty, *nothing(size, 2)]
    return program(size, rows, first=[1], momentum=0.5, clears=False)


def one_rank_without_data(size: int) -> Program:
    """In each pass one rank has no data."""
    rows = [
        [None if rank == number % size else [1] for rank in range(size)] for number in range(12)
    ]
    return program(size, rows, first=[1, 2], momentum=0.5)


def without_data_when_another_rank_asks(size: int) -> Program:
    """A rank skips the pass in which another one has a new gradient, and later passes."""
    asking: Branches = [[1] if rank == 0 else None if rank == 1 else [] for rank in range(size)]
    without: Branches = [None if rank == 1 else [] for rank in range(size)]
    return program(size, [asking, *[without] * 6])


def back_after_many_passes(size: int) -> Program:
    """A gradient long missing on all ranks leaves the plan at the next change; then one has it."""
    rows = [*nothing(size, 20), only(0, size, 2), *nothing(size, 20), only(1, size, 1)]
    return program(size, [*rows, *nothing(size, 3), only(0, size, 1)], first=[1])


def new_while_accumulating(size: int) -> Program:
    """The new gradient exists in one of the passes before a step, or in all of them."""
    rows = [only(0, size, 1), *nothing(size, 5), only(1, size, 2), only(1, size, 2)]
    return program(size, [*rows, *nothing(size, 4)], passes_per_step=2)


def new_beside_kept_zeros(size: int) -> Program:
    """zero_grad(set_to_none=False): gradients outside the plan are zeros, not missing."""
    return program(size, [only(number % size, size, 1, 2) for number in range(20)], clears=False)


def a_late_rank_asks(size: int) -> Program:
    """The other ranks are passes ahead of the rank that has new gradients."""
    return program(size, [only(1, size, 1), *nothing(size, 8)] * 2, sleeper=1)


def a_late_rank_is_asked(size: int) -> Program:
    return program(size, [only(1, size, 1), *nothing(size, 8)] * 2, sleeper=0)


# --- several optimizers


def an_optimizer_of_one_rank(size: int) -> Program:
    """The second optimizer has gradients on one rank alone after the first passes."""
    rows = [only(1, size, 2, 3)] * 10
    return program(size, rows, first=[1, 2, 3], owners=(0, 0, 1, 1), momentum=0.5)


def an_optimizer_that_one_rank_begins(size: int) -> Program:
    """The second optimizer has its first gradients late, and on one rank alone."""
    return program(size, [only(1, size, 2)] * 10, owners=(0, 0, 1, 1))


def two_optimizers_ask_in_one_pass(size: int) -> Program:
    rows = [[[1] if rank == 0 else [2, 3] for rank in range(size)], *nothing(size, 8)]
    return program(size, rows, owners=(0, 0, 1, 1))  # all have new gradients, and know it


def optimizers_in_turn(size: int) -> Program:
    """The optimizers of a GAN take passes and steps in turn; some passes have a new gradient."""
    rows = [on_all(size, 2)] * 24
    for number in (8, 9, 15):
        rows[number] = on_all(size, 2, 3)
    events = {number: {"steps": (number % 2,)} for number in range(24)}
    return program(size, rows, first=[2], owners=(0, 0, 1, 1), events=events)


# --- events


def ranks_that_join(size: int) -> Program:
    """A rank joins, and others have a new gradient without it; then all join in one pass."""
    rows: list[Branches] = []
    events: dict[int, dict[str, Any]] = {}
    for epoch in range(3):
        leaving = epoch % size
        absent: list[Branches] = [
            [None if rank == leaving else [] for rank in range(size)] for _ in range(5)
        ]
        absent[2] = [None if rank == leaving else [1 + epoch] for rank in range(size)]
        begin = len(rows)
        events |= {
            begin + number: {"absent": (leaving,), "joins": number == 4} for number in range(5)
        }
        events[begin + 9] = {"joins": True}
        rows += [*absent, *nothing(size, 4), on_all(size, 1)]
    return program(size, [*rows, *nothing(size, 4)], events=events)


def parameters_that_are_added(size: int) -> Program:
    """add_param_group() while passes are planned, and passes with the new gradients after it."""
    rows = [*nothing(size, 2), *[on_all(size, 3)] * 4, *nothing(size, 2), on_all(size, 2, 3)]
    return program(size, rows * 2, events={0: {"adds": (3,)}, 4: {"adds": (2,)}})


def cleared_by_hand(size: int) -> Program:
    """The program sets `grad` to None itself, where all ranks have new gradients, too."""
    rows = [on_all(size, 1 + number // 4) for number in range(12)]
    return program(size, rows, clears="by hand", momentum=0.5)


def calls_between_planned_passes(size: int) -> Program:
    """Process sets and optimizers come and go; a rank repeats a backward() that has failed."""
    events = {
        2: {"failing": 1},
        4: {"before": ("process set",)},
        8: {"failing": 0},
        10: {"before": ("optimizer",)},
        15: {"before": ("optimizer", "process set")},
    }
    return program(size, nothing(size, 20), first=[1], momentum=0.5, events=events)


HOSTILE: list[Callable[[int], Program]] = [
    many_equal_passes,
    two_ranks_ask_in_one_pass,
    each_rank_has_another_or_no_data,
    every_rank_asks_in_its_own_pass,
    a_new_gradient_everywhere_behind_one_on_a_rank,
    new_gradients_everywhere_in_turn,
    new_gradients_everywhere_for_good,
    missing_on_all_ranks_or_on_some,
    missing_where_gradients_add_up,
    missing_and_zeroed,
    alternating_from_the_start,
    passes_without_any_gradient,
    one_rank_without_data,
    without_data_when_another_rank_asks,
    back_after_many_passes,
    new_while_accumulating,
    new_beside_kept_zeros,
    a_late_rank_asks,
    a_late_rank_is_asked,
    an_optimizer_of_one_rank,
    an_optimizer_that_one_rank_begins,
    two_optimizers_ask_in_one_pass,
    optimizers_in_turn,
    ranks_that_join,
    parameters_that_are_added,
    cleared_by_hand,
    calls_between_planned_passes,
]


def ends(ending: str, first_groups: int, size: int) -> Program:
    """Return a program with rank 1's misdeed before the first planned pass, or after it.

    It has two parameters, both with gradients: steps would agree on one that has none, and ranks
    that have left out a step would go on together.
    """
    return program(size, [], first=[1], first_groups=first_groups, owners=(0, 0), ending=ending)
