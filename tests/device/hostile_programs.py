"""Programs that try to break running ahead: ranks have different gradients in each pass.

Each is a function from the number of ranks to a program as `random_programs` makes them. Parameter
0 always has a gradient on every rank with data, others where the program says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from random_programs import FIRST_GROUPS, STEADY, WILD, Group, Pass, Program

Branches = Sequence[Iterable[int] | None]  # by rank: the parameters besides 0. None: no data


def program(
    size: int,
    kind: str,
    middle: Iterable[Branches],
    *,
    first: Iterable[int] = (),
    owners: Sequence[int] = (0, 0, 0, 0),
    passes_per_step: int = 1,
    momentum: float = 0.0,
    set_to_none: bool = True,
    sleeper: int | None = None,
) -> Program:
    """Return a program of one pass a step, or of `passes_per_step`.

    Args:
        middle: the branches of each pass.
        first: the parameters that all ranks have in the first passes, besides 0.
        sleeper: the rank that is late for every fifth pass.
    """
    written = Program(
        seed=-1,
        size=size,
        kind=kind,
        shapes=[(3,), (2, 5), (40,), (7, 3)],
        doubles=set(),
        owners=list(owners),
        passes_per_step=passes_per_step,
        momentum=momentum,
        is_sum=False,
        predivide=1.0,
        casts=False,
        scales=False,
        bucket_groups=0,
    )
    rows = [[list(first)] * size for _ in range(FIRST_GROUPS * passes_per_step)]
    rows += [list(row) for row in middle]
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
    for begin in range(0, len(passes), passes_per_step):
        part = tuple(passes[begin : begin + passes_per_step])
        clears = tuple(set_to_none for _ in optimizers)
        written.groups.append(Group((), clears, (), part, (), False, "", tuple(optimizers)))
    return written


def only(rank: int, size: int, *branches: int) -> list[list[int]]:
    """Return the branches of a pass in which one rank has some."""
    return [list(branches) if other == rank else [] for other in range(size)]


def nothing(size: int, passes: int) -> list[Branches]:
    return [[[] for _ in range(size)]] * passes


def two_ranks_ask_in_one_pass(size: int) -> Program:
    """Two ranks have a new gradient each, in the same pass; a third one has none."""
    both: Branches = [[1], [2], []][:size]
    # With two ranks, all have new gradients, and know it.
    return program(size, WILD if size > 2 else STEADY, [both, *nothing(size, 6), both, both])


def two_ranks_ask_for_the_same(size: int) -> Program:
    """Ranks have the same new gradient, one pass after the other."""
    return program(size, WILD, [only(rank, size, 1) for rank in range(size)] * 3)


def every_rank_asks_in_its_own_pass(size: int) -> Program:
    """Rank 0 has a new gradient, rank 1 another one in the next pass, and so on."""
    passes = [only(number % size, size, 1 + number % 3) for number in range(9)]
    return program(size, WILD, passes)


def a_new_gradient_everywhere_behind_one_on_a_rank(size: int) -> Program:
    """A rank has a new gradient one pass before all ranks have another one."""
    everywhere: Branches = [[2] for _ in range(size)]
    return program(size, WILD, [only(1, size, 1), everywhere, everywhere, only(0, size, 1)])


def new_gradients_everywhere_in_turn(size: int) -> Program:
    """All ranks have a new gradient in a pass, and another one in the next pass."""
    return program(size, STEADY, [[[i] for _ in range(size)] for i in (1, 2, 3, 1, 2, 3)])


def unfrozen_on_one_rank_for_ever(size: int) -> Program:
    return program(size, WILD, [only(1, size, 1)] * 40)


def new_once_and_never_again(size: int) -> Program:
    """One rank has a new gradient in one pass."""
    return program(size, WILD, [only(size - 1, size, 3), *nothing(size, 30)])


def alternating_from_the_start(size: int) -> Program:
    """A branch is used by another rank in each pass, and never by two."""
    turns = [only(number % size, size, 1, 2) for number in range(12)]
    return program(size, STEADY, turns, first=[1, 2], momentum=0.5)


def alternating_later(size: int) -> Program:
    return program(size, WILD, [only(number % size, size, 1) for number in range(25)])


def passes_without_any_gradient(size: int) -> Program:
    """No rank has data in some passes: the optimizer steps with old gradients, or with none."""
    empty: Branches = [None] * size
    rows: list[Branches] = [empty, [[1]] * size, empty, empty, empty, *nothing(size, 2)]
    return program(size, STEADY, rows, first=[1], momentum=0.5, set_to_none=False)


def one_rank_without_data(size: int) -> Program:
    """In each pass one rank has no data; sometimes it alone has a new gradient in the next."""
    rows: list[Branches] = []
    for number in range(12):
        row: list[Iterable[int] | None] = [[1] for _ in range(size)]
        row[number % size] = None
        rows.append(row)
    return program(size, STEADY, rows, first=[1, 2], momentum=0.5)


def without_data_when_another_rank_asks(size: int) -> Program:
    """A rank skips the pass in which another one has a new gradient, and later passes."""
    rows: list[Branches] = [
        [[1] if rank == 0 else None if rank == 1 else [] for rank in range(size)]
    ]
    rows += [[[] if rank != 1 else None for rank in range(size)]] * 6
    return program(size, WILD, rows)


def an_optimizer_of_one_rank(size: int) -> Program:
    """The second optimizer has gradients on one rank alone after the first passes."""
    rows = [only(1, size, 2, 3)] * 10
    return program(size, STEADY, rows, first=[1, 2, 3], owners=(0, 0, 1, 1), momentum=0.5)


def an_optimizer_that_one_rank_begins(size: int) -> Program:
    """The second optimizer has its first gradients late, and on one rank alone."""
    return program(size, WILD, [only(1, size, 2)] * 10, owners=(0, 0, 1, 1))


def two_optimizers_ask_in_one_pass(size: int) -> Program:
    rows = [[[1] if rank == 0 else [2, 3] for rank in range(size)], *nothing(size, 8)]
    # All ranks have new gradients, and know it.
    return program(size, STEADY, rows, owners=(0, 0, 1, 1))


def back_after_many_passes(size: int) -> Program:
    """A gradient long missing on all ranks leaves the plan at the next change; then one has it."""
    rows = [*nothing(size, 20), only(0, size, 2), *nothing(size, 20), only(1, size, 1)]
    return program(size, WILD, [*rows, *nothing(size, 3), only(0, size, 1)], first=[1])


def new_while_accumulating(size: int) -> Program:
    """The new gradient exists in one of the passes before a step, or in all of them."""
    rows = [only(0, size, 1), *nothing(size, 5), only(1, size, 2), only(1, size, 2)]
    return program(size, WILD, [*rows, *nothing(size, 4)], passes_per_step=2)


def new_beside_kept_zeros(size: int) -> Program:
    """zero_grad(set_to_none=False): gradients outside the plan are zeros, not missing."""
    turns = [only(number % size, size, 1, 2) for number in range(20)]
    return program(size, WILD, turns, set_to_none=False)


def a_late_rank_asks(size: int) -> Program:
    """The other ranks are passes ahead of the rank that has new gradients."""
    return program(size, WILD, [only(1, size, 1), *nothing(size, 8)] * 2, sleeper=1)


def a_late_rank_is_asked(size: int) -> Program:
    return program(size, WILD, [only(1, size, 1), *nothing(size, 8)] * 2, sleeper=0)


def many_equal_passes(size: int) -> Program:
    return program(size, STEADY, nothing(size, 200), first=[1], momentum=0.5, sleeper=1)


HOSTILE: list[Callable[[int], Program]] = [
    two_ranks_ask_in_one_pass,
    two_ranks_ask_for_the_same,
    every_rank_asks_in_its_own_pass,
    a_new_gradient_everywhere_behind_one_on_a_rank,
    new_gradients_everywhere_in_turn,
    unfrozen_on_one_rank_for_ever,
    new_once_and_never_again,
    alternating_from_the_start,
    alternating_later,
    passes_without_any_gradient,
    one_rank_without_data,
    without_data_when_another_rank_asks,
    an_optimizer_of_one_rank,
    an_optimizer_that_one_rank_begins,
    two_optimizers_ask_in_one_pass,
    back_after_many_passes,
    new_while_accumulating,
    new_beside_kept_zeros,
    a_late_rank_asks,
    a_late_rank_is_asked,
    many_equal_passes,
]
