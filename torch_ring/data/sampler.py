"""Which samples this rank takes, and how far the ranks have come."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from torch_ring.world.process_set import ProcessSet, global_process_set

__all__ = ["ShardedSampler"]


class ShardedSampler(Sampler[int]):
    """Deals the samples of a data set to the ranks, like cards: one to each, then again.

    In training, take ``drop_last=True``: all ranks get equally many samples, so equally many
    batches; a rank with one more would wait there for the others. In evaluation, take the default:
    every sample is taken once, by one rank, so shares may differ by one, and a loop over them must
    not call a collective. No sample is ever taken twice to fill up.

    An epoch's order follows from `seed` and the epoch, and is the same on all ranks. After k
    batches of b samples on each rank, the first ``k * b * size`` samples of that order have been
    taken; so one number says how far the ranks are, on any number of them. `advance` counts it:
    what the DataLoader's workers have fetched ahead is not what the model was trained on.
    :class:`InputPipeline` calls `advance`; without one, call it after each step::

        sampler = ShardedSampler(train_set, drop_last=True)
        loader = DataLoader(train_set, batch_size, sampler=sampler)
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                ...
                sampler.advance(len(images))

    The state may be taken after any step, and loaded on another number of ranks: the rest of the
    epoch repeats and misses none (of what ``drop_last`` does not drop). The size and the rank are
    read when an iteration begins: after a change of the size within a process (``shutdown()`` and
    ``init()``), it is enough to give all ranks the same state.

    Args:
        dataset: what has a length, or the length itself.
        shuffle: whether each epoch has an order of its own; otherwise the data set's.
        seed: of the orders; the same on all ranks.
        drop_last: whether the last samples of an epoch are left out, fewer than there are ranks,
            that do not go round; others in each epoch if shuffled.
        process_set: the ranks among which the samples are dealt.

    Raises:
        ValueError: the length is negative.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        if self.length < 0:
            raise ValueError(f"a data set cannot have {self.length} samples")
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.process_set = process_set
        self._epoch = 0
        self._begin = 0  # how many samples of the epoch had been taken when this pass began
        self._advanced = 0  # by this rank, since
        self._taken = 0  # by all ranks, since: their number may be another when it is asked for

    @property
    def epoch(self) -> int:
        """The epoch that comes next, or goes on, when an iteration begins."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """How many samples of the epoch all ranks together have taken."""
        return min(self._begin + self._taken, self.length)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; stay where it is if it is in that epoch already."""
        if epoch != self._epoch:
            self._go_to(epoch, 0)

    def advance(self, samples: int) -> None:
        """Count what this rank has taken, the same number as on the other ranks.

        With the last sample of the epoch, the next one is due: `epoch` is one more.

        Args:
            samples: a batch's, usually; more than are left count as those.
        """
        self._advanced += samples
        self._taken += samples * self.process_set.size()
        if self._advanced >= len(self):
            self.set_epoch(self._epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return how far all ranks are, if all have advanced alike; plain numbers."""
        return {
            "epoch": self._epoch,
            "consumed": self.consumed,
            "length": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the ranks were, however many those were; call it on all.

        Raises:
            ValueError: it is the state of a sampler with another order.
        """
        for name in ("length", "shuffle", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the state is that of a sampler with {name}={state[name]}, and this one has "
                    f"{name}={getattr(self, name)}"
                )
        self._go_to(state["epoch"], state["consumed"])

    def __len__(self) -> int:
        """Return how many samples this rank takes in the pass that is under way, or is next."""
        return len(range(self.length)[self._mine()])

    def __iter__(self) -> Iterator[int]:
        self._go_to(self._epoch, self.consumed)
        mine = self._mine()
        if not self.shuffle:
            return iter(range(self.length)[mine])
        generator = torch.Generator()
        # Mixed, so that the epochs of a seed are not those of the next one, shifted.
        generator.manual_seed(zlib.crc32(f"{self.seed} {self._epoch}".encode()))
        order = torch.randperm(self.length, generator=generator)
        return iter(order[mine].tolist())

    def _go_to(self, epoch: int, begin: int) -> None:
        self._epoch, self._begin = epoch, begin
        self._advanced = self._taken = 0

    def _mine(self) -> slice:
        begin = self._begin + self.process_set.rank()
        return slice(begin, self._end(), self.process_set.size())

    def _end(self) -> int:
        """Return where in the order the epoch ends."""
        left = self.length - self._begin
        return self.length - (left % self.process_set.size() if self.drop_last else 0)
