# SPDX-License-Identifier: Apache-2.0
"""ShardedSampler: each rank's share of the samples, and the ranks' progress in the epoch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from torch_ring.collectives.compare import require_same
from torch_ring.world.process_set import ProcessSet, global_process_set

__all__ = ["ResumableSampler", "ShardedSampler", "Share", "ShareIterator"]


@dataclass(frozen=True)
class Share:
    """A rank's part of the rest of an epoch.

    Attributes:
        indices: the samples that this rank takes, in order.
        state: the sampler's state.
        key: the key in `state` of the position: the number of samples of the epoch's order that all
            ranks together have taken.
        begin, end: the positions where the rest begins, and where no rank has a sample left.
        length: the number of samples of an epoch, and so the position at its end.
        size: the number of ranks.
    """

    indices: Sequence[int]
    state: dict[str, Any]
    key: str
    begin: int
    end: int
    length: int
    size: int


class ResumableSampler(Sampler[int]):
    """A sampler whose state is the progress of all ranks, and fits any number of ranks.

    There are two ways to count: the sampler counts the samples that the loop reports, and an
    iterator (`ShareIterator`) the samples that it has given out.
    """

    process_set: ProcessSet = global_process_set
    _is_resumed = False  # a loader has resumed in the middle of an epoch, and counts itself

    def _share(self) -> Share:
        """Return this rank's part of the rest of the epoch."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the ranks were.

        Args:
            state_dict: the state of this sampler, or of an iterator of it.

        Raises:
            ValueError: the state is that of another sampler.
        """
        raise NotImplementedError

    def _resume(self, state: dict[str, Any]) -> Share:
        """Continue a loader's iteration from the state of a `ShareIterator`.

        A collective of the process set, if the number of ranks differs from the state's.

        Args:
            state: the state of the loader's iterator.

        Returns:
            This rank's part of the rest of that epoch.

        Raises:
            ValueError: the state is that of another sampler.
            MismatchError: on all ranks: their number has changed, and their states differ.
        """
        self.load_state_dict(state)
        share = self._share()
        before = state.get("size", share.size)
        if before != share.size:
            require_same(
                [f"sample {state[share.key]} of epoch {state['epoch']}"],
                f"this loader's state is one of {before} ranks, of which {share.size} can continue "
                "only if all load the same state, such as rank 0's",
                self.process_set,
            )
        self._is_resumed = True
        return share


class ShareIterator(Iterator[int]):
    """Yields a rank's share of an epoch; its state is the progress of all ranks.

    The protocol is torchdata's: StatefulDataLoader asks for `state_dict` after it has taken the
    indices of a batch, and hands that state out when the loop has got the batch. So batches that
    workers fetch in advance do not count.

    Args:
        sampler: the sampler that deals the shares.
    """

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler = sampler
        self._begin(sampler._share())

    def _begin(self, share: Share) -> None:
        self._share = share
        self._indices = iter(share.indices)
        self._given = 0
        self._has_ended = False

    def __next__(self) -> int:
        for index in self._indices:
            self._given += 1
            return index
        self._has_ended = True
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of all ranks, if they have taken as many samples as this one.

        Returns:
            The sampler's state at this position, and ``size``, the number of ranks.
        """
        share = self._share
        position = share.begin + self._given * share.size
        if self._has_ended or position >= share.end:
            position = share.length
        return {**share.state, share.key: position, "size": share.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, on any number of ranks; a collective if the number has changed.

        Args:
            state: a result of `state_dict`; on another number of ranks, the same on all.

        Raises:
            ValueError: the state is that of another sampler.
            MismatchError: on all ranks: their number has changed, and their states differ.
        """
        self._begin(self._sampler._resume(state))


class ShardedSampler(ResumableSampler):
    """Deals the samples of a data set to the ranks in turn, one sample at a time.

    A shuffled epoch is for training: all ranks get the same number of samples and of batches, since
    a rank with one batch more would wait there for the others. Without ``shuffle`` an epoch is for
    evaluation: every sample is taken once, by one rank. Shares may then differ by one sample, so a
    loop over them must not call a collective. ``drop_last`` overrides either choice. Unlike torch's
    DistributedSampler, it never repeats a sample to even out the shares.

    An epoch's order depends on `seed` and the epoch, and is the same on all ranks. After k batches
    of b samples on each rank, the first ``k * b * size`` samples of that order have been taken, so
    one number is the progress of all ranks, for any number of ranks. `advance` counts it, because
    the DataLoader's workers fetch samples before the model is trained on them.
    :class:`InputPipeline` calls `advance`; without one, call it after each step::

        sampler = ShardedSampler(train_set)
        loader = DataLoader(train_set, batch_size, sampler=sampler)
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                ...
                sampler.advance(len(images))

    The state may be saved after any step, and loaded on another number of ranks: the rest of the
    epoch repeats no sample and misses none, except those that ``drop_last`` drops. Size and rank
    are read when an iteration begins: after a change of the size within a process (``shutdown()``
    and ``init()``), it is enough to give all ranks the same state.

    A ``StatefulDataLoader`` of torchdata counts by itself, without `advance`: its state has the
    position after the batches that its loop has received. As long as all ranks take equally many
    batches, rank 0's state holds for all ranks; load it on any number of ranks. (With the same
    number of ranks, each may load its own.) If the number has changed, the ranks compare the
    positions when the iteration begins, and all raise a MismatchError if they differ.

    Args:
        dataset: a data set with a length, or the length itself.
        shuffle: whether each epoch has a random order of its own, or the data set's.
        seed: the seed of the orders; the same on all ranks.
        drop_last: whether to leave out an epoch's last samples, fewer than there are ranks, that
            cannot be dealt evenly; with `shuffle` they differ from epoch to epoch. None: as
            `shuffle`.
        process_set: the ranks among which the samples are dealt; by default all.

    Raises:
        ValueError: the length is negative.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        if self.length < 0:
            raise ValueError(f"a data set cannot have {self.length} samples")
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = shuffle if drop_last is None else drop_last
        self.process_set = process_set
        self._epoch = 0
        self._begin = 0  # samples of the epoch that were taken before this iteration began
        self._advanced = 0  # samples that this rank has taken since
        self._taken = 0  # samples that all ranks have taken since; the size may change later

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration begins or continues."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """The number of samples of the epoch that all ranks together have taken."""
        return min(self._begin + self._taken, self.length)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; keep the position if it is the current one.

        Args:
            epoch: the epoch that the next iteration begins, from 0.
        """
        if epoch != self._epoch:
            self._go_to(epoch, 0)

    def advance(self, samples: int) -> None:
        """Count samples that this rank has taken, the same number as on the other ranks.

        The last sample of the epoch increases `epoch` by one.

        Args:
            samples: the number of samples, usually a batch's; at most the rest of the epoch counts.
        """
        self._advanced += samples
        self._taken += samples * self.process_set.size()
        if self._advanced >= len(self):
            self.set_epoch(self._epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of all ranks, which must have advanced alike.

        Returns:
            Plain numbers: ``epoch``, ``consumed`` (samples), ``length``, ``shuffle`` and ``seed``.
        """
        return {
            "epoch": self._epoch,
            "consumed": self.consumed,
            "length": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the ranks were, on any number of ranks; call it on all of them.

        Args:
            state: a result of `state_dict`, the same on all ranks.

        Raises:
            ValueError: the state is that of a sampler with another length, `shuffle` or `seed`.
        """
        for name in ("length", "shuffle", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the state is that of a sampler with {name}={state[name]}, and this one has "
                    f"{name}={getattr(self, name)}"
                )
        self._go_to(state["epoch"], state["consumed"])

    def __len__(self) -> int:
        """Return the number of samples that this rank takes in the current or next iteration."""
        return len(range(self.length)[self._mine()])

    def __iter__(self) -> Iterator[int]:
        if self._is_resumed and not self._advanced:
            # The loader that resumed here has not reported its progress: begin a whole epoch, as
            # the next iteration would without that resume.
            self._go_to(self._epoch + (self._begin >= self.length), 0)
        else:
            self._go_to(self._epoch, self.consumed)
        return ShareIterator(self)

    def _share(self) -> Share:
        """Return this rank's part of the rest of the epoch at the beginning of the iteration."""
        mine = self._mine()
        return Share(
            indices=self._shuffled()[mine].tolist() if self.shuffle else range(self.length)[mine],
            state=self.state_dict(),
            key="consumed",
            begin=self._begin,
            end=self._end(),
            length=self.length,
            size=self.process_set.size(),
        )

    def _shuffled(self) -> Tensor:
        """Return the epoch's order, int64 of shape [length], the same on all ranks."""
        generator = torch.Generator("cpu")
        # Hashed: with seed + epoch, two neighbouring seeds would have the same orders, one epoch
        # apart.
        generator.manual_seed(zlib.crc32(f"{self.seed} {self._epoch}".encode()))
        return torch.randperm(self.length, generator=generator, device="cpu")

    def _go_to(self, epoch: int, begin: int) -> None:
        self._epoch, self._begin = epoch, begin
        self._advanced = self._taken = 0
        self._is_resumed = False

    def _mine(self) -> slice:
        begin = self._begin + self.process_set.rank()
        return slice(begin, self._end(), self.process_set.size())

    def _end(self) -> int:
        """Return the index in the order at which the epoch ends."""
        left = self.length - self._begin
        return self.length - (left % self.process_set.size() if self.drop_last else 0)
