# SPDX-License-Identifier: Apache-2.0
"""expect_one_process: a program that ranks play has the results of one process with all rows.

A program is a generator function. Its first argument is a `Play`: one of several ranks, with its
rows, or one process alone, with the rows of all ranks. It yields tensors; the tensors of each rank
must be those of the process alone, and have the same bits on all ranks. A rank that sees nothing,
as it has joined, yields None in their place. tests/README.md has an example.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import device_double
import torch
import torch.distributed as dist
from device_double import DEVICE
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from zoo import FEATURES

import torch_ring as hvd
from tests.support.groups import on_ring
from tests.support.pool import DEADLINE_S, run

__all__ = ["Play", "Program", "expect_one_process", "loss_of", "play_on"]

ROWS = 6  # of a rank in a batch
TOLERANCES = {torch.float64: 1e-10, torch.complex128: 1e-10}
TOLERANCE = 1e-5  # of dtypes with fewer digits

Program = Iterator[Iterable[Tensor | None] | None]
Wrap = Callable[..., tuple[nn.Module, Any]]


class Play:
    """A place where a program trains.

    Args:
        rank: of the rank; None: the process alone.
        size: the number of ranks.
        wrap: of a door.
        device: of the rows.
    """

    def __init__(self, rank: int | None, size: int, wrap: Wrap, device: str = "cpu") -> None:
        self.size = size
        self._device = device
        self.is_alone = rank is None
        self.ranks = range(size) if rank is None else (rank,)  # whose rows this place has
        self._wrap = wrap

    def rows(self, batch: Tensor) -> Tensor:
        """Return the rows that this place has of a batch of all ranks."""
        return batch if self.is_alone else batch[self.ranks[0] :: self.size].to(self._device)

    def batches(self, steps: int) -> Iterator[Tensor]:
        """Return this place's rows of batches in float64."""
        generator = torch.Generator().manual_seed(7)
        shape = steps, ROWS * self.size, FEATURES
        return map(self.rows, torch.randn(shape, dtype=torch.float64, generator=generator))

    def wrap(self, model: nn.Module, optimizer: Any, **options: Any) -> tuple[nn.Module, Any]:
        """Return a model and its optimizer, as the door of this run wraps them.

        The options are those of DistributedOptimizer.
        """
        return (model, optimizer) if self.is_alone else self._wrap(model, optimizer, **options)

    def share(self, op: hvd.ReduceOp = hvd.Average) -> float:
        """Return the factor of a mean over rows that makes the sum over ranks the mean of all."""
        return 1 / self.size if op == hvd.Sum and not self.is_alone else 1.0


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return a mean over rows, so that the means of equal parts average to the loss of all."""
    output = model(rows)
    return output.square().mean() + output.sum(1).mean()


def _wrap_optimizer(model: nn.Module, optimizer: Optimizer, **options: Any) -> tuple[Any, Any]:
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def _wrap_for_ddp(model: nn.Module, optimizer: Optimizer) -> tuple[Any, Any]:
    return DistributedDataParallel(model, bucket_cap_mb=0.001), optimizer


def play_by_optimizer(
    program: Callable[..., Program], args: tuple[Any, ...], **options: Any
) -> None:
    """Play a program on this rank of torch_ring, and alone; its optimizers get the options, too."""
    wrap = functools.partial(_wrap_optimizer, **options)
    _compare(program, args, Play(hvd.rank(), hvd.size(), wrap), hvd.allgather_object)


def play_on_device(program: Callable[..., Program], args: tuple[Any, ...]) -> None:
    """Play a program on this rank of torch_ring with a stand-in for a GPU, and alone."""
    device_double.load()
    hvd.init()
    play_on(DEVICE, program, args)
    hvd.shutdown()


def play_on(device: str, program: Callable[..., Program], args: tuple[Any, ...]) -> None:
    """Play a program on this rank with a model on a device, and alone on the host."""

    def wrap(model: nn.Module, optimizer: Optimizer, **options: Any) -> tuple[Any, Any]:
        device_double.move(model, device)
        return _wrap_optimizer(model, optimizer, **options)

    play = Play(hvd.rank(), hvd.size(), wrap, device)
    _compare(program, args, play, hvd.allgather_object)


def play_by_ddp(program: Callable[..., Program], *args: Any) -> None:
    """Play a program on this rank of torch.distributed, and alone."""

    def gathered(thing: Any) -> list[Any]:
        things = [None] * dist.get_world_size()
        dist.all_gather_object(things, thing)
        return things

    _compare(program, args, Play(dist.get_rank(), dist.get_world_size(), _wrap_for_ddp), gathered)


def _compare(
    program: Callable[..., Program],
    args: tuple[Any, ...],
    play: Play,
    gathered: Callable[[Any], list[Any]],
) -> None:
    alone = Play(None, play.size, play.wrap)
    wanted = [_copies(tensors) for tensors in program(alone, *args) if tensors is not None]
    assert wanted, "the program yields nothing"
    seen: list[Tensor | None] = []
    has_results: list[bool] = []
    for number, (tensors, right) in enumerate(zip(program(play, *args), wanted, strict=True)):
        found = [None] * len(right) if tensors is None else _copies(tensors)
        seen += found
        has_results.append(tensors is not None)
        if tensors is None:
            continue
        assert len(found) == len(right) > 0
        for index, (one, other) in enumerate(zip(found, right, strict=True)):
            where = f"{args}: results {number}, tensor {index}"
            assert (one is None) == (other is None), where
            if one is not None and other is not None:
                tolerance = TOLERANCES.get(one.dtype, TOLERANCE)
                torch.testing.assert_close(
                    one,
                    other,
                    rtol=tolerance,
                    atol=tolerance,
                    msg=lambda text, where=where: f"{where}: {text}",
                )
    of_all = gathered((seen, has_results))
    assert all(map(any, zip(*(has for _, has in of_all), strict=True))), "results that no rank has"
    for theirs, _ in of_all:
        for one, other in zip(seen, theirs, strict=True):
            assert one is None or other is None or torch.equal(one, other), (
                "other bits on another rank"
            )


def _copies(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    return [None if each is None else each.detach().to_dense().cpu().clone() for each in tensors]


def expect_one_process(
    program: Callable[..., Program],
    *args: Any,
    size: int = 2,
    transport: str = "shm",
    door: str = "optimizer",
    env: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Play ``program(play, *args)`` on ranks and alone, and compare.

    Args:
        program: of a module.
        door: "optimizer" for DistributedOptimizer, which is horovod.torch's, too; "sharded" for
            the same with shard_state=True; "device" for the same with the stand-ins for a GPU and
            for NCCL; "ddp" for DistributedDataParallel on the backend ring, which takes no options.
        deadline_s: of a program that compiles.
    """
    more: dict[str, Any] = {"transport": transport, "deadline_s": deadline_s}
    if door == "ddp":
        on_ring(play_by_ddp, size, program, *args, env=env, **more)
    elif door == "device":
        run(
            play_on_device,
            size,
            args=(program, args),
            env={"TORCH_RING_NCCL_LIBRARY": str(device_double.NCCL_LIBRARY), **(env or {})},
            initialized=False,
            kind=DEVICE,  # torch counts devices only once in a process
            **more,
        )
    else:
        play = functools.partial(play_by_optimizer, shard_state=door == "sharded")
        run(play, size, args=(program, args), env=env, **more)
