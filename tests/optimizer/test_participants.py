"""Participants: optimizers that go while others are looked at."""

import gc

import pytest

from torch_ring.errors import RingError
from torch_ring.optimizer.participants import Participants


class Optimizer:
    """All that `Participants` needs of one."""


def fail(why: str) -> None:
    raise RingError(why)


def three() -> tuple[Participants, list[Optimizer]]:
    participants, optimizers = Participants(1, fail), [Optimizer() for _ in range(3)]
    for index, optimizer in enumerate(optimizers):
        participants.add(index, optimizer)
    return participants, optimizers


def test_they_go_while_others_are_looked_at() -> None:
    participants, optimizers = three()
    assert [index for index, _ in participants.items()] == [0, 1, 2]
    seen = []
    for index, _ in participants.items():
        participants.remove(1)
        seen.append(index)
    assert seen == [0, 1, 2]
    assert participants.values() == [optimizers[0], optimizers[2]]
    assert 1 not in participants


def test_one_that_nobody_holds_is_gone() -> None:
    participants, optimizers = three()
    del optimizers[0]
    assert participants.values() == optimizers
    optimizers[0].itself = optimizers[0]
    del optimizers[0]
    assert len(participants.values()) == 2  # garbage, and not collected
    gc.collect()
    assert participants.values() == optimizers
    assert participants.get(0) is None
    with pytest.raises(KeyError):
        participants[1]


def test_one_that_is_gone_is_named() -> None:
    participants, optimizers = three()
    participants.remove(1)
    assert participants.named(2) is optimizers[2]
    with pytest.raises(RingError, match=r"^rank 1 has dropped the wrapped optimizer 1"):
        participants.named(1)


def test_none_goes_while_it_is_held() -> None:
    participants, optimizers = three()
    assert participants.hold() == optimizers
    kept = optimizers[2]
    participants.remove(0)
    optimizers.pop(1)
    gc.collect()
    assert [index for index, _ in participants.items()] == [0, 1, 2]
    assert participants[2] is kept
    assert participants.named(0) is optimizers[0]
    assert 1 in participants
    participants.let_go()
    assert participants.values() == [kept]
    assert 1 not in participants
