# SPDX-License-Identifier: Apache-2.0
"""DevicePrefetcher: copies the next batch to the device while the model works on this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_ring import world
from torch_ring.setup.control_groups import shared_cpus
from torch_ring.setup.launchers import discover
from torch_ring.world import current

__all__ = ["DevicePrefetcher", "default_num_workers"]


def default_num_workers(limit: int = 16) -> int:
    """Return the number of workers that this rank has CPUs for: ``DataLoader(num_workers=...)``.

    The CPUs of a rank are those on which its process may run, divided by the ranks on this kernel
    that may run there too; or its part of the container's quota, if that is less. One CPU is left
    to the rank itself. Before init() the CPUs of the other ranks are unknown, so all ranks of this
    host are taken to share theirs.

    Args:
        limit: the most workers; each has the data set and some batches in memory.

    Returns:
        0 or more; with 0 the rank loads its data itself, between the steps.
    """
    if world.is_initialized():
        local_size, sharers = world.local_size(), current.cpu_sharers()
    else:
        local_size = sharers = discover().local_size or 1
    cpus, ranks = shared_cpus(sharers, local_size)
    return max(0, min(limit, int(cpus / ranks) - 1))


class DevicePrefetcher:
    """Iterates over the batches of a loader on a device.

    A stream of its own copies the next batch while the model works on this one. The device's memory
    holds two batches, and three while the loop asks for the next. On a CPU the batches are passed
    on as they are.

    Copies run beside the model's work only from pinned memory. ``DataLoader(pin_memory=True)`` pins
    batches in a thread of its own; a tensor that is not pinned is pinned here, in the caller's
    thread.

    Args:
        loader: yields batches: a tensor, or tensors in tuples, namedtuples, lists and dicts, in any
            nesting. Other values in a batch are passed on as they are.
        device: the device of the copies.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | str) -> None:
        self.loader = loader
        self.device = torch.device(device)

    def __len__(self) -> int:
        """Return the loader's number of batches. Raises TypeError if it has none."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self.device.type == "cpu":
            return iter(self.loader)
        return self._copied()

    def _copied(self) -> Iterator[Any]:
        copies = torch.Stream(device=self.device)
        ahead: list[tuple[Any, torch.Event]] = []
        for batch in self.loader:
            with copies:
                ahead.append((self.to_device(batch), copies.record_event()))
            if len(ahead) == 2:
                yield self._arrived(*ahead.pop(0))
        if ahead:
            yield self._arrived(*ahead.pop())

    def to_device(self, batch: Any) -> Any:
        """Return a batch on the device, copied by the current stream.

        The host does not wait for the copy, unless it has to pin the batch.

        Args:
            batch: a tensor, or tensors in tuples, namedtuples, lists and dicts, in any nesting.

        Returns:
            The same structure, with copies of the tensors on the device.
        """
        return tree_map_only(Tensor, self._to_device, batch)

    def _to_device(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _arrived(self, batch: Any, copied: torch.Event) -> Any:
        """Make the current stream wait for the copy; keep the batch until that stream is done."""
        current = torch.accelerator.current_stream(self.device)
        current.wait_event(copied)
        # The batch's memory belongs to the copying stream. Without record_stream(), memory that the
        # loop frees would hold a later batch while the model's work on this one is still queued.
        tree_map_only(Tensor, lambda tensor: tensor.record_stream(current), batch)
        return batch
