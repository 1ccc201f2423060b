# SPDX-License-Identifier: Apache-2.0
"""hvd.data.split: every element once, on any numbers of ranks and workers."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from pool import run
from test_sharded_sampler import Rank
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import torch_ring as hvd
from torch_ring.data import split

FORK = multiprocessing.get_context("fork")  # for workers of ranks, which are themselves forked
LENGTH = 23


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize(("size", "workers"), [(1, 0), (3, 0), (2, 2)])
def test_every_element_is_taken_once(size, workers, equal):
    shares = []
    for rank in range(size):
        mine = split(range(LENGTH), equal=equal, process_set=Rank(rank, size))
        loader = DataLoader(
            mine, None, num_workers=workers, multiprocessing_context=FORK if workers else None
        )
        for _ in range(2):
            share = [int(element) for element in loader]
            end = LENGTH - LENGTH % size if equal else LENGTH
            assert sorted(share) == list(range(rank, end, size))
        shares.append(share)
    assert not equal or len({len(share) for share in shares}) == 1


class Counted:
    """Reads numbers, and counts them; its iterators have no state."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            self.read += 1
            yield index


class Position(Iterator[int]):
    """An iterator with a state."""

    def __init__(self, counted: Counted) -> None:
        self.counted = counted
        self.next = 0

    def __next__(self) -> int:
        if self.next == self.counted.length:
            raise StopIteration
        self.counted.read += 1
        self.next += 1
        return self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class WithPosition(Counted):
    def __iter__(self) -> Iterator[int]:
        return Position(self)


class WithState(Counted):
    """Data that keep the position themselves."""

    position = 0
    is_resumed = False

    def __iter__(self) -> Iterator[int]:
        if not self.is_resumed:
            self.position = 0
        self.is_resumed = False
        while self.position < self.length:
            self.read += 1
            self.position += 1
            yield self.position - 1

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.is_resumed = state["position"], True


def as_worker(monkeypatch: pytest.MonkeyPatch, worker: int, workers: int) -> None:
    info = torch.utils.data._utils.worker.WorkerInfo(
        id=worker, num_workers=workers, seed=0, dataset=None
    )
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", info)


@pytest.mark.parametrize("data", [Counted, WithPosition, WithState])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("sizes", [(3, 2, 3), (2, 2, 4), (4, 1, 2)])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_resume_repeats_and_skips_none(data, equal, sizes, workers, monkeypatch):
    """Interrupted twice, each worker after a different number of elements."""
    length = 61
    seen: list[int] = []
    states: list[Any] = [None] * workers
    for size, rounds in zip(sizes, (4, 3, None), strict=True):
        new_states = []
        for worker in range(workers):
            as_worker(monkeypatch, worker, workers)
            shares = []
            for rank in range(size):
                counted = data(length)
                elements = iter(split(counted, equal=equal, process_set=Rank(rank, size)))
                if states[worker] is not None:
                    elements.load_state_dict(states[worker])
                    assert elements.state_dict() == states[worker]
                    assert counted.read == (states[worker]["read"] if data is Counted else 0)
                shares.append(list(islice(elements, rounds and rounds + worker)))
                if rank == 0:
                    new_states.append(elements.state_dict())
                assert rounds is None or elements.state_dict() == new_states[-1]
            assert not equal or len({len(share) for share in shares}) == 1
            seen += chain(*shares)
        states = new_states
    assert len(set(seen)) == len(seen)
    if equal:
        assert len(seen) > length - sizes[-1] * workers
    else:
        assert sorted(seen) == list(range(length))


def test_a_state_belongs_to_a_number_of_workers(monkeypatch):
    mine = split(range(9), process_set=Rank(0, 1))
    state = iter(mine).state_dict()
    as_worker(monkeypatch, 1, 2)
    with pytest.raises(
        ValueError, match="of one of 1 DataLoader workers of a rank, and there are 2"
    ):
        iter(mine).load_state_dict(state)


class Dealing(IterableDataset[int]):
    """Data that deal themselves to workers, as WebDataset and Hugging Face's do."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(LENGTH) if info is None else range(info.id, LENGTH, info.num_workers)


def test_data_that_deal_themselves_to_workers_are_not_dealt_twice():
    loader = DataLoader(
        split(Dealing(), equal=False, process_set=Rank(1, 2)),
        None,
        num_workers=2,
        multiprocessing_context=FORK,
    )
    assert sorted(loader) == list(range(1, LENGTH, 2))


def test_an_iterator_is_split_for_one_iteration():
    mine = split(iter(range(5)), process_set=Rank(0, 1))
    assert list(mine) == list(range(5))
    with pytest.raises(RuntimeError, match=r"an iterator .*, which can be read once"):
        list(mine)


def test_other_arguments_are_refused():
    table = TensorDataset(torch.zeros(3))
    for data, options, message in (
        ("names", {}, "letters of 'names'"),
        (table, {}, r"TensorDataset cannot: .* DataLoader\(sampler=ShardedSampler"),
        (3, {}, "int cannot"),
        ([], {"equal": "drop"}, "equal='drop'"),
    ):
        with pytest.raises(TypeError, match=message):
            split(data, **options)


def test_a_world_is_needed():
    mine = split(range(5))
    with pytest.raises(hvd.NotInitializedError):
        iter(mine)
    assert pickle.loads(pickle.dumps(mine)).place is None


def sent_to_a_worker() -> bytes:
    return pickle.dumps(split(range(9), equal=False))


def test_workers_that_are_not_forked_know_their_rank(monkeypatch):
    both = run(sent_to_a_worker, 2)
    as_worker(monkeypatch, 0, 1)
    assert [list(pickle.loads(each)) for each in both] == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]


@on_ranks(3)
def test_workers_know_their_rank() -> None:
    mine = split(range(LENGTH), equal=False)
    loader = DataLoader(mine, None, num_workers=2, multiprocessing_context=FORK)
    shares = hvd.allgather_object([int(element) for element in loader])
    assert sorted(chain(*shares)) == list(range(LENGTH))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert list(copy.deepcopy(mine)) == list(mine)
    pair = hvd.add_process_set([0, 2])
    theirs = split(range(LENGTH), process_set=pair)
    if hvd.rank() == 1:
        with pytest.raises(ValueError, match="rank 1 is not in"):
            iter(theirs)
    else:
        assert list(theirs) == list(range(hvd.rank() // 2, LENGTH - 1, 2))


@on_ranks(2)
def test_workers_that_outlive_the_ranks_say_so() -> None:
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # how long a worker may take to end
    mine = split(range(LENGTH), equal=False)

    def new_loader() -> DataLoader[int]:
        options = {"multiprocessing_context": FORK, "persistent_workers": True}
        return DataLoader(mine, None, num_workers=1, **options)

    loader = new_loader()
    share = list(loader)
    assert list(loader) == share
    hvd.shutdown()
    hvd.init()
    with pytest.raises(RuntimeError, match="the ranks have changed since this worker"):
        list(loader)
    assert list(mine) == share
    loader = new_loader()
    assert list(loader) == list(loader) == share
