# SPDX-License-Identifier: Apache-2.0
"""ElasticSampler: each rank's share of the samples of an epoch that no rank has processed yet."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch_ring import world
from torch_ring.data.sampler import ResumableSampler, Share, ShareIterator

__all__ = ["ElasticSampler"]


class ElasticSampler(ResumableSampler):
    """Deals the rest of an epoch to the present ranks. Its names are those of Horovod's sampler.

    Give it to a `TorchState`, call `record_batch` after each step and `set_epoch` at the end of
    each epoch. After a change of the ranks the samples that were not recorded yet are dealt anew.

    All ranks get the same number of samples: the first ones of the rest are repeated for that, as
    in Horovod and in torch's DistributedSampler. `torch_ring.data.ShardedSampler` repeats none.

    A ``StatefulDataLoader`` of torchdata counts by itself, as with a ShardedSampler.

    Args:
        dataset: a data set with a length.
        shuffle: whether each epoch has a random order of its own.
        seed: the seed of the orders; the same on all ranks.

    Attributes:
        epoch: the current epoch.
        processed_num: the number of samples of the epoch that all ranks together have processed.
        num_replicas, rank: size and rank at the last `reset`.
        remaining_indices: the samples of the epoch that are left, in order.
        num_samples: the number of samples that this rank gets of them.
        total_size: the number that all ranks get, with repeated samples.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin a new epoch. Call it at the end of the epoch before."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002
        """Record that each rank has processed a batch of `batch_size` samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the progress: ``epoch`` and ``processed_num``."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a progress, and deal the rest of the epoch."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal the rest of the epoch to the present ranks."""
        is_in_world = world.is_initialized()
        self.num_replicas = world.size() if is_in_world else 1
        self.rank = world.rank() if is_in_world else 0
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self._is_resumed = False

    def __len__(self) -> int:
        """Return the number of samples that this rank gets until the end of the epoch."""
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        if self._is_resumed and not self.remaining_indices:  # the loader had come to the end
            self.set_epoch(self.epoch + 1)
        return ShareIterator(self)

    def _share(self) -> Share:
        """Return this rank's part of the rest of the epoch."""
        dealt = list(self.remaining_indices)
        while 0 < len(dealt) < self.total_size:
            dealt += dealt[: self.total_size - len(dealt)]
        length = len(self.dataset)
        return Share(
            indices=dealt[self.rank : self.total_size : self.num_replicas],
            state=self.state_dict(),
            key="processed_num",
            begin=length - len(self.remaining_indices),
            end=length,
            length=length,
            size=self.num_replicas,
        )
