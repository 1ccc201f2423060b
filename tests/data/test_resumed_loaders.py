# SPDX-License-Identifier: Apache-2.0
"""Loaders that keep their state, by torchdata's protocol: each sample once, on other ranks too."""

from __future__ import annotations

import multiprocessing
from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool import error_of, run
from test_sharded_sampler import samplers

import torch_ring as hvd
from torch_ring.data import InputPipeline, ShardedSampler
from torch_ring.elastic import ElasticSampler

FORK = multiprocessing.get_context("fork")  # for workers of ranks, which are themselves forked


class Loader:
    """A loader that takes indices ahead, as torchdata's StatefulDataLoader does for its workers.

    It asks the sampler and the sampler's iterator for their states when it takes a batch, and hands
    these out when the loop gets that batch.
    """

    def __init__(self, sampler: Any, batch_size: int, ahead: int = 0, drop_last: bool = False):
        self.sampler = sampler
        self.batch_size = batch_size
        self.ahead = ahead
        self.drop_last = drop_last
        self.next_state: dict[str, Any] | None = None
        self.state: dict[str, Any] = {}

    def __len__(self) -> int:
        batches, left = divmod(len(self.sampler), self.batch_size)
        return batches + (left > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        state = self.next_state
        yield from self._continue()
        if state is not None and state["has_ended"] and self.next_state is None:
            yield from self._continue()

    def _continue(self) -> Iterator[list[int]]:
        indices, state, self.next_state = iter(self.sampler), self.next_state, None
        if state is not None:
            self.sampler.load_state_dict(state["sampler"])
            indices = iter(self.sampler)
            indices.load_state_dict(state["iterator"])
            if state["has_ended"]:
                return
        taken: deque[tuple[list[int], dict[str, Any]]] = deque()
        self.state = self._state(indices)
        while True:
            while len(taken) <= self.ahead:
                batch = list(islice(indices, self.batch_size))
                if len(batch) < (self.batch_size if self.drop_last else 1):
                    break
                taken.append((batch, self._state(indices)))
            if not taken:
                self.state = {**self.state, "has_ended": True}
                return
            batch, self.state = taken.popleft()
            yield batch

    def _state(self, indices: Any) -> dict[str, Any]:
        own, given_out = self.sampler.state_dict(), indices.state_dict()
        return {"sampler": own, "iterator": given_out, "has_ended": False}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_state = state


def all_agree() -> Any:
    """The ranks of these tests are objects of one process, which cannot ask one another."""
    return patch("torch_ring.data.sampler.require_same")


def interrupted(loaders: list[Loader], batches: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the samples that the ranks take in some batches, and their states."""
    seen, states = [], []
    for loader in loaders:
        batch_source = iter(loader)
        for batch in islice(batch_source, batches):
            seen += batch
        states.append(loader.state_dict())
    return seen, states


@given(
    length=st.integers(1, 60),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    batch_size=st.integers(1, 4),
    batches=st.integers(1, 20),
    ahead=st.integers(0, 3),
    options=st.fixed_dictionaries({"shuffle": st.booleans(), "drop_last": st.booleans()}),
)
def test_a_resume_repeats_and_skips_none(
    length, before, after, batch_size, batches, ahead, options
):
    ranks = samplers(before, length, seed=3, **options)
    for sampler in ranks:
        sampler.set_epoch(2)
    seen, states = interrupted([Loader(each, batch_size, ahead) for each in ranks], batches)
    shares = [len(range(rank, length, before)) for rank in range(before)]
    if len({min(-(-share // batch_size), batches) for share in shares}) == 1:
        assert len({str(state["iterator"]) for state in states}) == 1
    assert states[0]["iterator"]["size"] == before
    resumed = samplers(after, length, seed=3, **options)
    rest = []
    with all_agree():
        for sampler in resumed:
            loader = Loader(sampler, batch_size, ahead)
            loader.load_state_dict({**states[0], "has_ended": False})
            sampler.set_epoch(2)
            rest.append(list(loader))
            assert len(rest[-1]) == len(loader)
            assert sampler.epoch == 2
    rest = [list(chain(*share)) for share in rest]
    both = [*seen, *chain(*rest)]
    assert len(set(both)) == len(both)
    if options["drop_last"]:
        assert len({len(share) for share in rest}) == 1
        assert len(both) > length - max(before, after)
    else:
        assert sorted(both) == list(range(length))


@pytest.mark.parametrize("batches", [1, 3, 4, 5])
@pytest.mark.parametrize("is_counted", [False, True])
def test_the_epoch_after_a_resume_is_whole(batches, is_counted):
    """The loop counts its samples, or leaves that to the loader; at the end of an epoch, too."""

    def epoch(loader: Loader) -> list[int]:
        seen = []
        for batch in loader:
            seen += batch
            if is_counted:
                loader.sampler.advance(len(batch))
        return seen

    (sampler,) = samplers(1, 20)
    loader = Loader(sampler, 5, ahead=2)
    first, (state,) = interrupted([loader], batches)
    assert state["has_ended"] == (batches == 5)
    for epochs in ([0, 1, 2], [0, None, None]):  # as set_epoch() tells them, or in a row
        (resumed,) = samplers(1, 20)
        loader = Loader(resumed, 5, ahead=2)
        loader.load_state_dict(state)
        if batches < 5:
            assert sorted([*first[: 5 * batches], *epoch(loader)]) == list(range(20))
        for number in epochs[1:]:
            if number is not None:
                resumed.set_epoch(number)
            order = epoch(loader)
            assert sorted(order) == list(range(20))
            if number is not None:
                sampler.set_epoch(number)
                assert order == list(sampler)
    assert first == list(samplers(1, 20)[0])[: 5 * batches]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pipeline_counts_a_resumed_epoch(drop_last):
    (sampler,) = samplers(1, 11)
    _, (state,) = interrupted([Loader(sampler, 2, 2, drop_last)], 3)
    (sampler,) = samplers(1, 11)
    loader = Loader(sampler, 2, 2, drop_last)
    loader.load_state_dict(state)
    pipeline = InputPipeline(loader)
    for batches in (2, 5) if drop_last else (3, 6):
        epoch = sampler.epoch
        counts = []
        for _batch in pipeline:
            counts.append((sampler.epoch, sampler.consumed))
        assert len(counts) == batches
        begin = 11 - 2 * batches + (-1 if drop_last else 1)
        assert counts[0] == (epoch, begin + 2)
        assert counts[-1] == (epoch + 1, 0)


@given(
    length=st.integers(1, 40),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    batches=st.integers(1, 12),
    ahead=st.integers(0, 3),
)
def test_an_elastic_sampler_has_the_same_protocol(length, before, after, batches, ahead):
    world = SimpleNamespace(is_initialized=lambda: True)

    def elastic_samplers(size: int) -> Iterator[ElasticSampler]:
        for rank in range(size):
            world.rank, world.size = (lambda rank=rank: rank), (lambda: size)
            yield ElasticSampler(range(length), seed=1)

    with patch("torch_ring.elastic.sampler.world", world), all_agree():
        seen, states = [], []
        for sampler in elastic_samplers(before):
            taken, state = interrupted([Loader(sampler, 3, ahead)], batches)
            seen += taken
            states += state
        assert [state["iterator"] for state in states] == [states[0]["iterator"]] * before
        rest = []
        for sampler in elastic_samplers(after):
            loader = Loader(sampler, 3, ahead)
            loader.load_state_dict(states[0])
            rest += [list(chain(*loader))]
    assert len({len(share) for share in rest}) == 1
    if states[0]["has_ended"]:  # the next epoch
        seen = []
    counts = Counter([*seen, *chain(*rest)])
    assert sorted(counts) == list(range(length))
    assert sum(counts.values()) < length + before + after - 1


def load_states(states: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the error of continuing from this rank's state."""
    indices = iter(ShardedSampler(20))
    return error_of(lambda: indices.load_state_dict(states[hvd.rank()]))


def test_states_that_differ_are_refused():
    ranks = [iter(each) for each in samplers(2, 20)]
    list(islice(ranks[0], 4))
    list(islice(ranks[1], 2))
    far, near = (each.state_dict() for each in ranks)
    errors = run(load_states, 3, args=([far, near, far],))
    assert {name for name, _ in errors} == {"MismatchError"}
    for _, text in errors:
        assert "state is one of 2 ranks, of which 3 can continue only if all load the same" in text
        assert "rank 0: sample 8 of epoch 0; rank 1: sample 4 of epoch 0" in text
    assert run(load_states, 3, args=([far] * 3,)) == [("nothing", "")] * 3
    assert run(load_states, 2, args=([far, near],)) == [("nothing", "")] * 2
    assert run(load_states, 1, args=([near],)) == [("nothing", "")]
    (other,) = samplers(1, 20, seed=1)
    with pytest.raises(ValueError, match="of a sampler with seed=0"):
        iter(other).load_state_dict(far)


# --- with the real package


def real_loader(kind: str, workers: int, state: dict[str, Any] | None) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers}
    if workers:
        options |= {"multiprocessing_context": FORK, "prefetch_factor": 3}
    if kind == "split":
        loader = StatefulDataLoader(hvd.data.split(range(120), equal=False), **options)
    else:
        sampler = ShardedSampler(120, drop_last=False, seed=7)
        sampler.set_epoch(2)
        loader = StatefulDataLoader(range(120), sampler=sampler, **options)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def take_some(kind: str, workers: int) -> tuple[list[int], dict[str, Any]]:
    loader = real_loader(kind, workers, None)
    seen = []
    for batch in islice(loader, 5):
        seen += batch.tolist()
    return seen, loader.state_dict()


def take_the_rest(kind: str, workers: int, state: dict[str, Any]) -> list[int]:
    loader = real_loader(kind, workers, state)
    rest = list(chain(*(batch.tolist() for batch in loader)))
    if kind == "sampler":
        assert loader.sampler.epoch == 2
        loader.sampler.set_epoch(3)
    whole = list(chain(*(batch.tolist() for batch in loader)))
    assert sorted(chain(*hvd.allgather_object(whole))) == list(range(120))
    return rest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sampler", "split"])
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_resumes_on_other_ranks(kind, workers):
    pytest.importorskip("torchdata", reason="pip install '.[integrations]'")
    before = run(take_some, 2, args=(kind, workers))
    seen = [index for share, _ in before for index in share]
    assert len(seen) == 40
    for size in (1, 2, 3):
        rest = run(take_the_rest, size, args=(kind, workers, before[0][1]))
        assert sorted([*seen, *chain(*rest)]) == list(range(120))
