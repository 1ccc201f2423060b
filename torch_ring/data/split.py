# SPDX-License-Identifier: Apache-2.0
"""split: this rank's, and this DataLoader worker's, part of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.utils.data._utils.worker as torch_worker
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from torch_ring.setup.network import at_fork
from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet, global_process_set

__all__ = ["split"]

ElementT = TypeVar("ElementT")


def split(
    data: Iterable[ElementT], *, equal: bool = True, process_set: ProcessSet = global_process_set
) -> IterableDataset[ElementT]:
    """Deal the elements of a stream to the ranks in turn, and a rank's to its DataLoader's workers.

    For data without indices. For data with indices use a ShardedSampler, which reads only this
    rank's samples. Here every worker reads all elements, and passes on its own. So split a stream
    that is cheap to read, such as the names of files, and open the files afterwards::

        class Samples(IterableDataset):
            def __init__(self, names):
                self.names = hvd.data.split(names, equal=False)

            def __iter__(self):
                for name in self.names:
                    yield from read(name)

    Element i goes to rank ``i % size``, and there to worker ``i // size % workers``, when the
    elements of that round, one for each rank, have been read. Nothing is communicated, so all ranks
    and workers must read the same elements in the same order: shuffle with a seed that they share.
    While data are read, get_worker_info() is None: data sets that deal themselves to workers, as
    WebDataset and Hugging Face's do, would be dealt twice.

    Size, rank and worker are read when an iteration begins. Workers that outlive a change of the
    ranks (``persistent_workers``) raise an error.

    A ``StatefulDataLoader`` of torchdata saves the position of each worker. As long as all ranks
    take equally many batches, rank 0's state holds for all ranks: load it on any number of ranks,
    with the same number of workers. The rest repeats no element and misses none, except those that
    `equal` leaves out: on another number of ranks, in each worker fewer than there are ranks. Data
    or iterators with ``state_dict`` and ``load_state_dict`` go straight to their position; others
    are read up to it.

    Args:
        data: an IterableDataset or another iterable, which each iteration reads from its beginning;
            an iterator can be read in one iteration only.
        equal: whether all ranks get equally many elements: then the last ones, fewer than there are
            ranks, are left out. Otherwise shares may differ by one element, so a loop over them
            must call no collective, or needs `join`.
        process_set: the ranks among which the elements are dealt; by default all.

    Returns:
        A data set for a DataLoader, or for a loop; its iterators have a state.

    Raises:
        TypeError: `data` cannot be iterated, or is a text; `equal` is no bool.
        NotInitializedError: in an iteration: init() has not been called.
        RuntimeError: in an iteration: the ranks have changed since the worker was started, or
            `data` is an iterator that was split before.
        ValueError: a state of another number of workers is loaded.
    """
    if isinstance(data, (str, bytes)):
        raise TypeError(f"split() would deal the letters of {data!r}: give a list of names")
    if not hasattr(data, "__iter__"):
        raise TypeError(
            f"split() deals what can be iterated, and {type(data).__name__} cannot: data with a "
            "length and indices are dealt by DataLoader(sampler=ShardedSampler(data))"
        )
    if not isinstance(equal, bool):
        raise TypeError(f"equal={equal!r}: must be True or False")
    return _Split(data, equal, process_set)


class _Split(IterableDataset[ElementT]):
    """The data set that `split` returns."""

    def __init__(self, data: Iterable[ElementT], equal: bool, process_set: ProcessSet) -> None:
        self.data = data
        self.equal = equal
        self.process_set = process_set
        self.is_used = False  # a process has begun to read `data`
        self.place: tuple[int, int] | None = None  # rank and size, for a worker that was not forked
        self.is_over = _shared_flag()
        _splits.add(self)

    def __iter__(self) -> Iterator[ElementT]:
        info = get_worker_info()
        if info is not None and self.place is not None and not current.is_initialized():
            rank, size = self.place
        else:
            rank, size = self.process_set.rank(), self.process_set.size()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return _SplitIterator(self, rank, size, worker, workers)

    def __getstate__(self) -> dict[str, Any]:
        ranks = self.process_set
        place = (ranks.rank(), ranks.size()) if ranks.included() else None
        return {**self.__dict__, "place": place}


class _SplitIterator(Iterator[ElementT]):
    """Reads all elements, and yields those of one worker of one rank.

    Args:
        split: the data set.
        rank, size: this rank, and the number of ranks.
        worker, workers: this worker, and the number of workers on each rank.
    """

    def __init__(
        self, split: _Split[ElementT], rank: int, size: int, worker: int, workers: int
    ) -> None:
        self._split = split
        self._rank, self._size = rank, size
        self._worker, self._workers = worker, workers
        self._stride = size  # consecutive elements that go to one worker; a resume keeps the number
        self._read = 0  # elements read from the data, for all ranks and workers
        self._source: Iterator[ElementT] | None = None
        self._mine = self._of_worker()

    def __next__(self) -> ElementT:
        # A round: one element for each rank.
        count = 0
        for element in islice(self._mine, self._size):
            if count == self._rank:
                own = element
            count += 1
        if count == self._size or (count > self._rank and not self._split.equal):
            return own
        raise StopIteration

    def _of_worker(self) -> Iterator[ElementT]:
        """Yield the elements that go to the workers of this number on all ranks."""
        if self._source is None:
            self._source = self._begin()
        while True:
            try:
                with _without_worker():
                    element = next(self._source)
            except StopIteration:
                return
            index = self._read
            self._read += 1
            if index // self._stride % self._workers == self._worker:
                yield element

    def _begin(self) -> Iterator[ElementT]:
        # Not in __iter__: there, an error would end a reused worker without being reported.
        if get_worker_info() is not None and self._split.is_over.item():
            raise RuntimeError(
                "the ranks have changed since this worker of a DataLoader was started: make the "
                "DataLoader anew, or without persistent_workers"
            )
        data = self._split.data
        if isinstance(data, Iterator) and not isinstance(data, IterableDataset):
            if self._split.is_used:
                raise RuntimeError(
                    f"split() was given an iterator ({type(data).__name__}), which can be read "
                    "once: give a list, an IterableDataset or another object that can be read anew"
                )
            self._split.is_used = True
        with _without_worker():
            return iter(data)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this worker, the same for the worker of this number on all ranks.

        Returns:
            ``read``, the number of elements of the data up to the end of the last round; ``stride``
            and ``workers``, which define the deal to workers; ``iterator`` and ``data``: the states
            of the data's iterator and of the data, if they have any.
        """
        state: dict[str, Any] = {
            "read": self._read,
            "stride": self._stride,
            "workers": self._workers,
        }
        data: Any = self._split.data
        source: Any = self._source
        if _is_stateful(source):
            state["iterator"] = source.state_dict()
        if source is not None and source is not data and _is_stateful(data):
            state["data"] = data.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of a worker of any rank, on any number of ranks.

        Args:
            state: a result of `state_dict` for the worker of this number.

        Raises:
            ValueError: the state is that of another number of workers.
        """
        if state["workers"] != self._workers:
            raise ValueError(
                f"the state is that of one of {state['workers']} DataLoader workers of a rank, and "
                f"there are {self._workers} now: only as many can continue"
            )
        self._read, self._stride = state["read"], state["stride"]
        data: Any = self._split.data
        if "data" in state:
            data.load_state_dict(state["data"])
        source: Any = self._begin()
        self._source = source
        if "iterator" in state:
            source.load_state_dict(state["iterator"])
        elif "data" not in state:
            with _without_worker():
                for _ in islice(source, self._read):
                    pass


def _is_stateful(thing: object) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


@contextmanager
def _without_worker() -> Iterator[None]:
    """Context in which get_worker_info() is None, so that the data are read as a whole."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


# --- workers that outlive a change of the ranks

_splits: WeakSet[_Split[Any]] = WeakSet()  # those that this process has made


def _shared_flag() -> Tensor:
    """Return a flag shared with this process's workers, also with those that are not forked."""
    flag = torch.zeros((), dtype=torch.bool, device="cpu")
    flag.share_memory_()  # type: ignore[no-untyped-call]
    return flag


def _tell_workers() -> None:
    for each in list(_splits):
        each.is_over.fill_(True)
        each.is_over = _shared_flag()  # for workers started from now on


current.after_join(_tell_workers)
at_fork(after_in_child=_splits.clear)
