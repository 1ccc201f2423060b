# SPDX-License-Identifier: Apache-2.0
"""Reducers: none disappears while it is held."""

import gc

from torch_ring.errors import RingError
from torch_ring.optimizer.reducer import Reducer, Reducers


def fail(why: str) -> None:
    raise RingError(why)


def test_none_goes_while_it_is_held() -> None:
    reducers, held = Reducers(1, fail), [Reducer.__new__(Reducer) for _ in range(3)]
    for index, reducer in enumerate(held):
        reducers.add(index, reducer)
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
