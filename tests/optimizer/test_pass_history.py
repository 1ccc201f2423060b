"""PassHistory: the cycles that it finds, without ranks."""

from __future__ import annotations

import pytest

from torch_ring.optimizer.planned_pass import Gradients, PassHistory, union_of, without

A: Gradients = {0: 0b1}
B: Gradients = {0: 0b11}
C: Gradients = {0: 0b1, 1: 0b1}


def cycle_after(*passes: Gradients, repeats: int = 2) -> list[Gradients]:
    history = PassHistory()
    for gradients in passes:
        history.add(gradients)
    return list(history.cycle(repeats))


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ([], []),
        ([A, A], []),
        ([A, A, A], [A]),
        ([B, A, A, A], [A]),
        ([A, A, B], []),
        ([A, C, A, C, A], []),
        ([A, C, A, C, A, C], [A, C]),  # the next one is A again
        ([C, A, C, A, C, A], [C, A]),
        ([A, A, C] * 3, [A, A, C]),
        ([A, A, C] * 2 + [A, A, B], []),
        ([*[A] * 7, C] * 3, [*[A] * 7, C]),
        ([*[A] * 8, C] * 4 + [A, A, A], [A]),  # too long a cycle, but it ends like a short one
        ([{}, {}, {}, {}], []),
    ],
)
def test_cycles(passes, expected):
    assert cycle_after(*passes) == expected


def test_more_repeats():
    assert cycle_after(*[A] * 8, repeats=8) == []
    assert cycle_after(*[A] * 9, repeats=8) == [A]
    assert cycle_after(*[A, C] * 8, repeats=8) == []
    assert cycle_after(*[A, C] * 9, repeats=8) == [A, C]


def test_an_empty_pass_interrupts():
    assert cycle_after(A, A, {}, A, A) == []
    assert cycle_after(A, A, {}, A, A, A) == [A]


def test_clear():
    history = PassHistory()
    for _ in range(3):
        history.add(A)
    history.clear()
    assert list(history.cycle(2)) == []


def test_sets_of_gradients():
    assert union_of([A, B, C]) == {0: 0b11, 1: 0b1}
    assert union_of([]) == {}
    assert without(C, A) == {1: 0b1}
    assert without(B, A) == {0: 0b10}
    assert without(A, B) == {}
