# SPDX-License-Identifier: Apache-2.0
"""torch.compile and compiled autograd."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from logs import logged
from on_ranks import on_ranks
from pool import run
from slow import slow
from torch import Tensor, nn
from torch.optim import SGD
from training import assert_same_weights, joined_batches, loss_of, make_model, part, train

import torch_ring as hvd
from torch_ring.world import current


@contextlib.contextmanager
def compiled_autograd() -> Iterator[None]:
    from torch._dynamo import compiled_autograd as module

    enable = getattr(module, "_enable", None) or module.enable
    with enable(torch.compile(backend="eager")):
        yield


@on_ranks(2)
def test_compiled_autograd_is_refused_in_words() -> None:
    """The first pass raises an error with advice; without compiled autograd it works."""
    alone, together = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(SGD(together.parameters(), lr=0.1))
    batch = joined_batches(steps=1)[0]
    with (
        compiled_autograd(),
        pytest.raises(RuntimeError, match=r"run backward\(\) without it") as error,
    ):
        loss_of(together, part(batch)).backward()
    assert "frame #" not in str(error.value)
    assert "nyi" not in str(error.value)
    train(alone, SGD(alone.parameters(), lr=0.1), [batch])
    train(together, optimizer, [part(batch)])
    assert_same_weights(together, alone)


WIDTH = 32
BUCKET_BYTES = 4 * (WIDTH * WIDTH + WIDTH)  # of a block
_sent_so_far: list[int] = []  # at each mark of backward passes


@torch.library.custom_op("torch_ring_tests::mark", mutates_args=())
def mark(x: Tensor) -> Tensor:
    """Return a copy. Its backward notes how many buckets have been sent, compiled or not."""
    return x.clone()


@torch.library.custom_op("torch_ring_tests::note", mutates_args=())
def note(gradient: Tensor) -> Tensor:
    _sent_so_far.append(sent())
    return gradient.clone()


mark.register_fake(torch.empty_like)
note.register_fake(torch.empty_like)
mark.register_autograd(lambda _context, gradient: note(gradient))


def sent() -> int:
    """Return the number of buckets that this rank has submitted since it began."""
    return sum(r.name.startswith("gradients.") for r in current.engine().records())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return mark(x) + self.linear(x).relu()


@dataclass(frozen=True)
class Trained:
    during_backward: list[int]  # buckets sent at each block but the first, in the last pass
    lines: list[str]  # about torch.compile
    weights: Tensor


def train_blocks(how: str) -> Trained:
    """Take three steps of six blocks, compiled in one of several ways or not at all."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    blocks = [Block() for _ in range(6)]
    model = nn.Sequential(*blocks)
    step_of = model
    if how == "whole":
        step_of = torch.compile(model, backend="aot_eager")
    elif how == "in halves":
        halves = (torch.compile(half, backend="aot_eager") for half in (model[:3], model[3:]))
        step_of = nn.Sequential(*halves)
    elif how == "by block":
        for block in blocks:
            block.compile(backend="aot_eager")
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    generator = torch.Generator().manual_seed(hvd.rank())
    with logged() as lines:
        for _ in range(3):
            optimizer.zero_grad()
            loss = step_of(torch.randn(4, WIDTH, generator=generator)).square().mean()
            before = sent()
            _sent_so_far.clear()
            loss.backward()
            during = [count - before for count in _sent_so_far]
            optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return Trained(during, [line for line in lines if "torch.compile" in line], weights)


ENV = {"TORCH_RING_BUCKET_BYTES": str(BUCKET_BYTES)}


# As in docs/gpu.md.
DURING_BACKWARD = {
    "not compiled": [1, 2, 3, 4, 5],
    "by block": [0, 1, 2, 3, 4],
    "in halves": [0, 0, 0, 3, 3],
    "whole": [0] * 5,
}


def train_in_ways(ways: list[str]) -> list[Trained]:
    return [train_blocks(how) for how in ways]


@pytest.mark.parametrize("ways", [["not compiled", "whole"], slow([*DURING_BACKWARD])])
def test_a_model_compiled_as_a_whole_overlaps_nothing_and_rank_0_says_so(ways):
    for rank, results in enumerate(run(train_in_ways, 2, args=(ways,), transport="tcp", env=ENV)):
        for how, trained in zip(ways, results, strict=True):
            assert trained.during_backward == DURING_BACKWARD[how]
            assert torch.equal(trained.weights, results[0].weights)
            assert len(trained.lines) == (how == "whole" and rank == 0)
            assert all("`for block in model.layers: block.compile()`" in x for x in trained.lines)


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "env"), [("tcp", {}), ("shm", ENV)])
def test_no_line_where_nothing_could_overlap(transport, env):
    """The model fills one bucket, or the ranks share a host."""
    for trained in run(train_blocks, 2, args=("whole",), transport=transport, env=env):
        assert (trained.during_backward, trained.lines) == ([0] * 5, [])
