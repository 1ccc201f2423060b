# SPDX-License-Identifier: Apache-2.0
"""SyncBatchNorm whose hosts run ahead, on stand-ins for a GPU and for NCCL."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from ahead_training import SIZE, run_ahead_on_double
from torch import Tensor, nn
from training import assert_same_on_all_ranks

import torch_ring as hvd
from torch_ring.world import current

WIDTH = 4
STEPS = 6  # of which the last ones are promised


def layers_of(depth: int) -> nn.Sequential:
    torch.manual_seed(depth)
    blocks = [(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*(layer for block in blocks for layer in block)).double()


def rows_of(rank: int, step: int) -> int:
    """Return the rows of a rank's batch, which has none now and then."""
    return (3 * rank + step) % 5 + (rank == 0) * 2


def batch_of(step: int, ranks: Sequence[int]) -> Tensor:
    """Return the joined batch of these ranks."""
    parts = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(100 * step + rank)
        parts.append(torch.randn(rows_of(rank, step), WIDTH, generator=generator) * 2 + 3)
    return torch.cat(parts).double()


class Training:
    """A model with SyncBatchNorm on the device, beside one process with the joined batches."""

    def __init__(self, device: str, depth: int, lr: float = 0.01) -> None:
        self.device = device
        self.alone = layers_of(depth)
        self.model = hvd.convert_sync_batchnorm(layers_of(depth)).to(device)
        self.optimizers = [
            torch.optim.SGD(self.alone.parameters(), lr=lr),
            hvd.DistributedOptimizer(
                torch.optim.SGD(self.model.parameters(), lr=lr),
                self.model.named_parameters(),
                op=hvd.Sum,
            ),
        ]
        self.done = 0

    def step(
        self,
        without: Callable[[int], bool] = lambda _: False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Take a step in both, without some layers."""
        ranks = range(hvd.size()) if ranks is None else ranks
        inputs = batch_of(self.done, ranks), batch_of(self.done, [hvd.rank()]).to(self.device)
        self.done += 1
        for model, optimizer, batch in zip(
            (self.alone, self.model), self.optimizers, inputs, strict=True
        ):
            optimizer.zero_grad()
            for index, layer in enumerate(model):
                if not without(index):
                    batch = layer(batch)
            batch.square().sum().backward()
            optimizer.step()

    def check(self) -> None:
        ours, theirs = self.model.state_dict(), self.alone.state_dict()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name].cpu(), value, rtol=1e-5, atol=1e-7)
        for mine, other in zip(self.model.parameters(), self.alone.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad.cpu(), other.grad, rtol=1e-4, atol=1e-4)


def rounds_until_now() -> int:
    """Return the agreements of the hosts so far, with or without that of a barrier at the end.

    An agreement counts shortly after its operations are done, and before the next one.
    """
    hvd.barrier()
    return current.engine().totals()["rounds"]


def count_a_step(depth: int, device: str) -> int:
    """Return the agreements of a step, and 0 to 2 of barriers."""
    training = Training(device, depth, lr=0.0)  # gradients explode in such a stack
    for _ in range(STEPS):
        training.step()
    before = rounds_until_now()
    training.step()
    rounds = rounds_until_now() - before
    training.check()
    return rounds


def test_a_step_of_many_layers_needs_few_agreements():
    """As many layers as a ResNet-50 has: not 106 agreements and those of the gradients.

    One for forward, one for backward; that of the gradients' pass may fall into one of them.
    """
    for rounds in run_ahead_on_double(functools.partial(count_a_step, 53), SIZE):
        assert 2 <= rounds < 10


def skip_on_all_ranks(device: str) -> None:
    """All ranks leave out layers in some steps, within a promised series and at its end."""
    training = Training(device, 5)
    gone = {STEPS: (7,), STEPS + 1: (7,), STEPS + 4: (13,), STEPS + 5: (1, 13), STEPS + 7: (4,)}
    for step in range(2 * STEPS):
        training.step(lambda index, step=step: index in gone.get(step, ()))
    training.check()
    assert_same_on_all_ranks(*(value.cpu() for value in training.model.parameters()))


def test_layers_that_all_ranks_leave_out():
    run_ahead_on_double(skip_on_all_ranks, SIZE)


def warmed(device: str, depth: int = 5) -> Training:
    """Return a training whose next series are promised."""
    training = Training(device, depth)
    for _ in range(STEPS):
        training.step()
    training.check()
    return training


DIFFER = "have not run the same layers"


def run_otherwise(how: str, match: str, device: str) -> None:
    """Rank 1 alone runs other layers in a step: an error everywhere, and nothing is trained."""
    training = warmed(device)
    before = [value.cpu().clone() for value in training.model.parameters()]
    gone = {"no first one": 1, "no third one": 7}.get(how) if hvd.rank() == 1 else None
    if how == "another order" and hvd.rank() == 1:
        training.model[4], training.model[7] = training.model[7], training.model[4]
    with pytest.raises(hvd.MismatchError, match=match):
        training.step(lambda index: index == gone)
    if how != "another order":
        for value, old in zip(training.model.parameters(), before, strict=True):
            assert torch.equal(value.cpu(), old)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("no first one", "the ranks disagree|wait for different collectives"),
        ("no third one", DIFFER),
        ("another order", DIFFER),
    ],
)
def test_one_rank_runs_other_layers(how, match):
    run_ahead_on_double(functools.partial(run_otherwise, how, match), 3)


def leave_forward(device: str) -> None:
    """Rank 1 leaves forward in the middle; the others read its output on the host."""
    training = warmed(device)
    batch = torch.ones(3, WIDTH).double().to(device)
    if hvd.rank() == 1:
        training.model[:6](batch)
    else:
        assert training.model(batch).cpu().isnan().all()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    with pytest.raises(hvd.MismatchError, match=f"{DIFFER}.*rank 0 0, rank 1 3"):
        training.step()
    # The job goes on. The running statistics of that pass are void.
    training.model.load_state_dict(layers_of(5).state_dict())
    training.alone.load_state_dict(layers_of(5).state_dict())
    for _ in range(STEPS):
        training.step()
    training.check()


def test_one_rank_leaves_forward():
    run_ahead_on_double(leave_forward, 3)


def join_and_go_on(device: str) -> None:
    """Ranks have different numbers of batches, twice."""
    training = Training(device, 4)
    size = hvd.size()
    for _ in range(2):
        of_rank = [STEPS + 3 * (size - 1 - rank) for rank in range(size)]
        for step in range(of_rank[hvd.rank()]):
            training.step(ranks=[rank for rank in range(size) if step < of_rank[rank]])
        last = hvd.join()
        assert last == 0
        if hvd.rank() == last:
            training.check()
        for model in (training.model, training.alone):
            hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        training.done = of_rank[last]
    training.check()


def test_join():
    run_ahead_on_double(join_and_go_on, SIZE)
