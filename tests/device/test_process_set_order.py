"""Process sets that overlap, on stand-ins for GPUs that run one operation of NCCL at a time.

Ranks that enqueue the operations of two sets in different orders would wait for one another for
ever. The order depends on timing, so each program takes many steps.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence

import device_double
import pytest
import torch
from device_runs import run_on_double
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from training import assert_same_weights

import torch_ring as hvd

pytestmark = device_double.needed

TIMEOUT_S = "30"  # ends an endless wait of a device


@contextlib.contextmanager
def one_at_a_time(device: str) -> Iterator[None]:
    """Make the stand-in of NCCL run one operation at a time, as a GPU does."""
    if device != device_double.DEVICE:
        yield
        return
    with device_double.faults() as faults:
        faults.serial = 1
        yield


def run_serially(program: Callable[[str], object], size: int) -> None:
    run_on_double(program, size, TORCH_RING_TIMEOUT=TIMEOUT_S)


def sum_in_random_orders(device: str, sets: Sequence[hvd.ProcessSet], steps: int) -> None:
    """Sum over all sets of this rank at once; each rank begins and ends them in its own order."""
    chance = random.Random(hvd.rank())
    mine = [each for each in sets if each.included()]
    results: list[tuple[Tensor, int]] = []
    for _ in range(steps):
        handles: list[tuple[int, int]] = []
        for place in chance.sample(range(len(mine)), len(mine)):
            tensor = torch.full((1000,), float(1 + hvd.rank()), device=device)
            handle = hvd.allreduce_async(tensor, op=hvd.Sum, process_set=mine[place])
            handles.append((handle, sum(1 + rank for rank in mine[place].ranks)))
        for handle, expected in chance.sample(handles, len(handles)):
            result: Tensor = hvd.synchronize(handle)
            results.append((result, expected))
    for result, expected in results:
        assert (result.cpu() == expected).all()


def use_sets_in_a_circle(device: str) -> None:
    with one_at_a_time(device):
        sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [2, 3], [0, 3], [0, 2])]
        sum_in_random_orders(device, [*sets, hvd.global_process_set], 40)
        hvd.shutdown()


def add_sets_while_the_device_works(device: str) -> None:
    """The world's device and its pending operations are older than the first set."""
    with one_at_a_time(device):
        for round_ in range(5):
            tensor = torch.ones(1000, device=device)
            pending = [
                hvd.allreduce_async(tensor, name=f"early.{i}", op=hvd.Sum)
                for i in range(2 * round_)
            ]
            sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2])]
            sum_in_random_orders(device, [*sets, hvd.global_process_set], 5)
            for handle in pending:
                assert (hvd.synchronize(handle).cpu() == hvd.size()).all()
            for each in sets:
                hvd.remove_process_set(each)
            hvd.shutdown()
            hvd.init()


SUMS = [(use_sets_in_a_circle, 4), (add_sets_while_the_device_works, 3)]


@pytest.mark.parametrize(
    ("program", "size"),
    SUMS,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_sums_of_overlapping_sets(program, size):
    run_serially(program, size)


class TwoPaths(nn.Module):
    """A trunk that all ranks train, and a branch that some of them do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.branch = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.branch(self.trunk(batch).tanh())
        return out


def train_with_two_optimizers(device: str) -> None:
    """All ranks average the trunk, ranks 0 and 1 the branch; one pass fills the buckets of both."""
    with one_at_a_time(device):
        pair = hvd.add_process_set([0, 1])
        model = TwoPaths().to(device)
        trunk, branch = (SGD(part.parameters(), lr=0.1) for part in (model.trunk, model.branch))
        optimizers: list[Optimizer] = [
            hvd.DistributedOptimizer(trunk, named("trunk", model.trunk)),
            hvd.DistributedOptimizer(branch, named("branch", model.branch), process_set=pair)
            if pair.included()
            else branch,
        ]
        alone = [TwoPaths() for _ in range(hvd.size())]
        for step in range(12):
            batches = torch.randn(hvd.size(), 4, 8, generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            model(batches[hvd.rank()].to(device)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            train_alone(alone, batches)
        assert_same_weights(model.cpu(), alone[hvd.rank()])
        hvd.shutdown()


def named(prefix: str, part: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(f"{prefix}.{name}", parameter) for name, parameter in part.named_parameters()]


def train_alone(models: list[TwoPaths], batches: Tensor) -> None:
    """Take the step of the models of all ranks in one process."""
    for model, batch in zip(models, batches, strict=True):
        model.zero_grad()
        model(batch).square().mean().backward()
    by_rank = [dict(model.named_parameters()) for model in models]
    with torch.no_grad():
        for name in by_rank[0]:
            together = len(models) if name.startswith("trunk") else 2
            grads = [weights[name].grad for weights in by_rank]
            mean = sum(grad for grad in grads[:together] if grad is not None) / together
            for rank, weights in enumerate(by_rank):
                weights[name] -= 0.1 * (mean if rank < together else grads[rank])


def test_two_optimizers_on_overlapping_sets():
    run_serially(train_with_two_optimizers, 3)
