"""The fast path of backward synchronisation: dense gradients of all parameters, on all ranks."""

import pytest
from pool import error_of, run
from torch.optim import SGD
from training import grads, weights

import torch_ring as hvd
from torch_ring._C import GradientReport
from torch_ring.optimizer.backward_sync import BackwardSync


def train_and_count_exchanges() -> None:
    """Backward with all gradients takes the fast path; if one rank lacks some, all leave it."""
    exchanges: list[int] = []
    agree = BackwardSync._agree

    def counted(sync: BackwardSync, reports: tuple[GradientReport, ...]) -> None:
        exchanges.append(sync.number)
        agree(sync, reports)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackwardSync, "_agree", counted)
        train_with_and_without_b(exchanges)


def train_with_and_without_b(exchanges: list[int]) -> None:
    a, b = parameters = weights(1, 1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=hvd.Sum)
    last = hvd.size() - 1
    for use_b in [True, True, True, False, True]:  # False: not on the last rank
        optimizer.zero_grad()
        (a * 2 + b * 4 if use_b or hvd.rank() != last else a * 2).backward()
        assert grads(parameters) == [2 * hvd.size(), 4 * (hvd.size() if use_b else last)]
        optimizer.step()
    # In the first two passes all ranks exchange reports with digests of weights, in the fourth only
    # the last one, which lacks b: the others learn of it on the fast path.
    assert exchanges == ([0, 1, 3] if hvd.rank() == last else [0, 1])
    optimizer.zero_grad()
    with optimizer.no_sync():
        (a + b).backward()
    assert grads(parameters) == [1, 1]
    (a + b).backward()
    assert grads(parameters) == [2 * hvd.size()] * 2
    assert len(exchanges) == (3 if hvd.rank() == last else 2)


@pytest.mark.parametrize("size", [2, 3])
def test_backward_with_all_gradients_takes_the_fast_path(size):
    run(train_and_count_exchanges, size)


def step_once_more() -> tuple[str, str]:
    """All ranks have all gradients, and one has taken another step."""
    parameters = weights(1, 1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0))
    for _ in range(3):
        optimizer.zero_grad()
        sum(parameters).backward()
        optimizer.step()
    if hvd.rank() == 1:
        with optimizer.skip_synchronize():
            optimizer.step()
    return error_of(sum(parameters).backward)


def test_ranks_in_different_steps_do_not_take_it():
    for kind, text in run(step_once_more, 2):
        assert kind == "MismatchError", text
        assert "rank 0 has taken 3 optimizer steps, rank 1 4" in text
