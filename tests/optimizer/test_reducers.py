# SPDX-License-Identifier: Apache-2.0
"""Reducers: some disappear during an iteration over them."""

import gc

import pytest

from torch_ring.errors import RingError
from torch_ring.optimizer.reducer import Reducer, Reducers


def fail(why: str) -> None:
    raise RingError(why)


def three() -> tuple[Reducers, list[Reducer]]:
    """Reducers without parameters: only their existence counts."""
    reducers, held = Reducers(1, fail), [Reducer.__new__(Reducer) for _ in range(3)]
    for index, reducer in enumerate(held):
        reducers.add(index, reducer)
    return reducers, held


def test_they_go_while_others_are_looked_at() -> None:
    reducers, held = three()
    assert [index for index, _ in reducers.items()] == [0, 1, 2]
    seen = []
    for index, _ in reducers.items():
        reducers.remove(1)
        seen.append(index)
    assert seen == [0, 1, 2]
    assert reducers.values() == [held[0], held[2]]
    assert 1 not in reducers


def test_one_that_nobody_holds_is_gone() -> None:
    reducers, held = three()
    del held[0]
    assert reducers.values() == held
    held[0].itself = held[0]
    del held[0]
    assert len(reducers.values()) == 2  # garbage, not collected yet
    gc.collect()
    assert reducers.values() == held
    assert reducers.get(0) is None
    with pytest.raises(KeyError):
        reducers[1]


def test_one_that_is_gone_is_named() -> None:
    reducers, held = three()
    reducers.remove(1)
    assert reducers.named(2) is held[2]
    with pytest.raises(RingError, match=r"^rank 1 has dropped the wrapped optimizer 1"):
        reducers.named(1)


def test_none_goes_while_it_is_held() -> None:
    reducers, held = three()
    assert reducers.pin() == held
    kept = held[2]
    reducers.remove(0)
    held.pop(1)
    gc.collect()
    assert [index for index, _ in reducers.items()] == [0, 1, 2]
    assert reducers[2] is kept
    assert reducers.named(0) is held[0]
    assert 1 in reducers
    reducers.unpin()
    assert reducers.values() == [kept]
    assert 1 not in reducers
