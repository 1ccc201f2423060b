"""The usual backward pass ends the short way, in one call, and means what the long way does."""

import pytest
from pool import run
from torch.optim import SGD
from training import grads, weights

import torch_ring as hvd
from torch_ring.passes import BackwardPasses
from torch_ring.reports import Entry


def whole_and_partial_passes() -> None:
    """Whole passes end the short way; one that is not on some rank goes the long way on all."""
    exchanges: list[int] = []
    exchange = BackwardPasses._exchange

    def counted(passes: BackwardPasses, entry: Entry) -> list[Entry]:
        exchanges.append(passes.number)
        return exchange(passes, entry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackwardPasses, "_exchange", counted)
        train_whole_and_partial(exchanges)


def train_whole_and_partial(exchanges: list[int]) -> None:
    a, b = parameters = weights(1, 1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=hvd.Sum)
    last = hvd.size() - 1
    for use_b in [True, True, True, False, True]:  # False: not on the last rank
        optimizer.zero_grad()
        (a * 2 + b * 4 if use_b or hvd.rank() != last else a * 2).backward()
        assert grads(parameters) == [2 * hvd.size(), 4 * (hvd.size() if use_b else last)]
        optimizer.step()
    # The first pass tells the order; of the fourth the last rank tells the long way.
    assert exchanges == ([0, 3] if hvd.rank() == last else [0])
    optimizer.zero_grad()
    with optimizer.no_sync():
        (a + b).backward()
    assert grads(parameters) == [1, 1]
    (a + b).backward()
    assert grads(parameters) == [2 * hvd.size()] * 2
    assert len(exchanges) == (2 if hvd.rank() == last else 1)


@pytest.mark.parametrize("size", [2, 3])
def test_whole_passes_end_the_short_way(size):
    run(whole_and_partial_passes, size)
