# SPDX-License-Identifier: Apache-2.0
"""ShardedSampler: every sample once, also after a resume on another number of ranks."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import on_ranks

import torch_ring as hvd
from torch_ring.data import ShardedSampler


class Rank(hvd.ProcessSet):
    """A process set as one of its ranks sees it, without the others."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(range(size))
        self._rank = rank

    def rank(self) -> int:
        return self._rank


def samplers(size: int, length: int, **options: object) -> list[ShardedSampler]:
    return [ShardedSampler(length, process_set=Rank(rank, size), **options) for rank in range(size)]


@given(
    length=st.integers(0, 40),
    size=st.integers(1, 5),
    options=st.fixed_dictionaries(
        {}, optional={"shuffle": st.booleans(), "drop_last": st.booleans()}
    ),
)
def test_every_sample_is_taken_once(length, size, options):
    """In training, where drop_last is the default, all ranks get equally many."""
    ranks = samplers(size, length, **options)
    shares = [list(sampler) for sampler in ranks]
    assert [len(share) for share in shares] == [len(sampler) for sampler in ranks]
    taken = sorted(chain(*shares))
    if options.get("drop_last", options.get("shuffle", True)):
        assert [len(share) for share in shares] == [length // size] * size
        assert len(set(taken)) == len(taken)
    else:
        assert taken == list(range(length))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(
    length=st.integers(1, 60),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    batches=st.integers(0, 20),
    drop_last=st.booleans(),
)
def test_a_resume_repeats_and_skips_none(length, before, after, batch_size, batches, drop_last):
    """Another number of ranks gets the rest of the epoch, although workers had fetched it all."""
    ranks = samplers(before, length, drop_last=drop_last, seed=3)
    trained = []
    for sampler in ranks:
        sampler.set_epoch(2)
        share = list(sampler)
        for first in range(0, len(share), batch_size)[:batches]:
            trained += share[first : first + batch_size]
            sampler.advance(batch_size)
    state = ranks[0].state_dict()
    resumed = samplers(after, length, drop_last=drop_last, seed=3)
    for sampler in resumed:
        sampler.load_state_dict(state)
    if state["epoch"] == 3:  # all ranks had trained on all of their shares
        assert state["consumed"] == 0
        assert len(trained) > length - (before if drop_last else 1)
        return
    assert state["consumed"] == len(trained)
    rest = [list(sampler) for sampler in resumed]
    assert [len(share) for share in rest] == [len(sampler) for sampler in resumed]
    both = [*trained, *chain(*rest)]
    assert len(set(both)) == len(both)
    assert len(both) > length - (after if drop_last else 1)


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        (sampler,) = samplers(1, 50, seed=seed)
        sampler.set_epoch(epoch)
        return tuple(sampler)

    orders = {order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert order(1, 2) == order(1, 2)
    assert order(0, 0) != tuple(range(50))


def test_epochs_follow_one_another():
    (sampler,) = samplers(1, 10)
    first = list(sampler)
    assert list(sampler) == first  # nothing was advanced: an evaluation may be repeated
    sampler.advance(4)
    assert len(sampler) == 10  # of the present pass
    sampler.set_epoch(0)  # it is already there
    assert sampler.consumed == 4
    assert list(sampler) == first[4:]
    assert len(sampler) == 6
    sampler.advance(6)
    assert (sampler.epoch, sampler.consumed, len(sampler)) == (1, 0, 10)
    assert sorted(sampler) == list(range(10))
    sampler.advance(3)
    sampler.set_epoch(5)
    assert (sampler.epoch, sampler.consumed) == (5, 0)


@pytest.mark.parametrize(("after", "drop_last"), [(1, True), (12, False), (300, True)])
def test_the_size_may_change_under_a_sampler(after, drop_last):
    """After shutdown() and init() the same sampler gives its state in a world of another size."""
    sampler, *others = samplers(8, 1000, drop_last=drop_last)
    seen = [index for each in (sampler, *others) for index in list(each)[:100]]
    sampler.advance(100)
    sampler.process_set = Rank(0, after)
    state = sampler.state_dict()
    assert state["consumed"] == sampler.consumed == 800
    ranks = samplers(after, 1000, drop_last=drop_last)
    for each in ranks:
        each.load_state_dict(state)
    rest = sorted(index for each in ranks for index in each)
    assert len(rest) == 200 - (200 % after if drop_last else 0)
    assert set(rest).isdisjoint(seen)


def test_the_state_of_another_sampler_is_refused():
    state = ShardedSampler(10, seed=1, process_set=Rank(0, 1)).state_dict()
    for other in (
        ShardedSampler(11, seed=1, process_set=Rank(0, 1)),
        ShardedSampler(10, seed=2, process_set=Rank(0, 1)),
        ShardedSampler(10, seed=1, shuffle=False, process_set=Rank(0, 1)),
    ):
        with pytest.raises(ValueError, match="of a sampler with"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="-1 samples"):
        ShardedSampler(-1)


@on_ranks(2)
def test_a_rank_outside_of_the_set_has_no_samples() -> None:
    sampler = ShardedSampler(23, process_set=hvd.add_process_set([0]))
    if hvd.rank() == 0:
        assert sorted(sampler) == list(range(23))
    else:
        with pytest.raises(ValueError, match="is not in"):
            len(sampler)
