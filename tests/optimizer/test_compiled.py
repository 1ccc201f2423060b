"""torch.compile and compiled autograd."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from pool import run
from torch.optim import SGD
from training import assert_same_weights, joined_batches, loss_of, make_model, part, train

import torch_ring as hvd


@contextlib.contextmanager
def compiled_autograd() -> Iterator[None]:
    from torch._dynamo import compiled_autograd as module

    enable = getattr(module, "_enable", None) or module.enable
    with enable(torch.compile(backend="eager")):
        yield


def refuse_compiled_autograd(op: int) -> None:
    """The first pass raises an error with advice; without compiled autograd it works."""
    alone, together = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(SGD(together.parameters(), lr=0.1), op=op)
    batch = joined_batches(steps=1)[0]
    with (
        compiled_autograd(),
        pytest.raises(RuntimeError, match=r"run backward\(\) without it") as error,
    ):
        loss_of(together, part(batch)).backward()
    assert "frame #" not in str(error.value)
    assert "nyi" not in str(error.value)
    scale = hvd.size() if op == hvd.Sum else 1
    train(alone, SGD(alone.parameters(), lr=0.1 * scale), [batch])
    train(together, optimizer, [part(batch)])
    assert_same_weights(together, alone)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_compiled_autograd_is_refused_in_words(op):
    run(refuse_compiled_autograd, 2, args=(op,))


def train_compiled() -> None:
    alone, together = make_model(), make_model()
    compiled = torch.compile(together, backend="aot_eager")
    optimizer = hvd.DistributedOptimizer(SGD(together.parameters(), lr=0.05))
    batches = joined_batches(steps=3)
    train(alone, SGD(alone.parameters(), lr=0.05), batches)
    train(compiled, optimizer, map(part, batches))
    assert_same_weights(together, alone)


def test_a_compiled_model():
    run(train_compiled, 2)
