"""Several wrapped optimizers in one program."""

import gc
import weakref

import pytest
import torch
from pool import error_of, run
from torch import nn
from torch.optim import SGD
from training import weights
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.optimizer.backward_sync import BackwardSync


def train_another(parameter: nn.Parameter) -> None:
    """Take three steps of 1.5 with an optimizer of its own."""
    optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        ((hvd.rank() + 1) * parameter).backward()
        optimizer.step()


def drop_on_one_rank_first(accumulated_on: int) -> None:
    """Two ranks drop an optimizer with accumulated gradients; rank 0 collects it later."""
    (a,), (b,) = weights(1), weights(1)
    dropped = hvd.DistributedOptimizer(SGD([a], lr=1.0), backward_passes_per_step=2)
    if hvd.rank() <= accumulated_on:
        a.backward()
    garbage = dropped if hvd.rank() == 0 else None
    del dropped
    train_another(b)
    assert (a.item(), b.item()) == (1, 1 - 3 * 1.5)
    del garbage
    train_another(b)
    assert b.item() == 1 - 6 * 1.5


def drop_on_rank_0_or_both() -> None:
    drop_on_one_rank_first(accumulated_on=0)
    drop_on_one_rank_first(accumulated_on=1)


def drop_what_something_else_holds() -> None:
    """As above, with gradients due in the next pass; a thread may be reporting a late pass."""
    (a,), (b,) = weights(1), weights(1)
    dropped = hvd.DistributedOptimizer(SGD([a], lr=1.0))
    with dropped.no_sync():
        a.backward()
    told_of = dropped._reducer if hvd.rank() == 0 else None
    del dropped
    train_another(b)
    assert (a.item(), b.item()) == (1, 1 - 3 * 1.5)
    del told_of


def drop_on_one_rank_only() -> None:
    """One rank has dropped an optimizer with due gradients: no pass can reduce them."""
    (a,), (b,) = weights(1), weights(1)
    dropped = hvd.DistributedOptimizer(SGD([a], lr=1.0))
    with dropped.no_sync():
        a.backward()
    kept = dropped if hvd.rank() == 0 else None
    del dropped
    optimizer = hvd.DistributedOptimizer(SGD([b], lr=1.0))
    _, text = error_of(b.backward)
    assert "rank 1 has dropped the wrapped optimizer 0, for which another rank has" in text, text
    del kept, optimizer


def drop_a_trained_one_on_one_rank_first() -> None:
    """As the first, with buckets in final order, which the autotuner would replace."""
    (a,), (b,) = weights(1), weights(1)
    dropped = hvd.DistributedOptimizer(SGD([a], lr=1.0), backward_passes_per_step=2)
    for _ in range(2):
        dropped.zero_grad()
        for _ in range(2):
            a.backward()
        dropped.step()
    a.backward()
    garbage = dropped if hvd.rank() == 0 else None
    del dropped
    optimizer = hvd.DistributedOptimizer(SGD([b], lr=1.0))
    for _ in range(12):
        optimizer.zero_grad()
        b.backward()
        optimizer.step()
    assert (a.item(), b.item()) == (1 - 4, 1 - 12)
    del garbage


AUTOTUNE = {"TORCH_RING_AUTOTUNE": "1"}


@pytest.mark.parametrize(
    ("drop", "transport", "env"),
    [
        (drop_on_rank_0_or_both, "shm", {}),
        (drop_what_something_else_holds, "shm", {}),
        (drop_on_one_rank_only, "shm", {}),
        (drop_a_trained_one_on_one_rank_first, "shm", AUTOTUNE),
        (drop_a_trained_one_on_one_rank_first, "tcp", AUTOTUNE),
    ],
)
def test_dropped_optimizers(drop, transport, env):
    run(drop, 2, transport=transport, env=env)


def leave_backward_out_after_one_that_was_not_stepped() -> None:
    """A pass touches three optimizers, and one of them steps; one rank leaves out the next pass."""
    lr = 0.25
    a, b, c = weights(1, 2, 3)
    optimizers = [hvd.DistributedOptimizer(SGD([each], lr=lr)) for each in (a, b, c)]
    expected = [1.0, 2.0, 3.0]
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (a + b + c).backward()
        optimizers[0].step()
        if hvd.rank() == step % hvd.size():
            (b * 2).backward()
        for optimizer in optimizers[1:]:
            optimizer.step()
        gradients = (1, 1 + 2 / hvd.size(), 1)
        expected = [e - lr * g for e, g in zip(expected, gradients, strict=True)]
        found = [a.item(), b.item(), c.item()]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


@on_both_transports
def test_a_rank_leaves_out_a_pass_after_one_that_was_not_stepped(transport):
    run(leave_backward_out_after_one_that_was_not_stepped, 3, transport=transport)


def collect_during_the_end_of_a_pass(how: str) -> None:
    """Python collects a dropped optimizer with accumulated gradients while another's pass ends."""
    (a,), (b,) = weights(1), weights(1)
    dropped = hvd.DistributedOptimizer(SGD([a], lr=1.0), backward_passes_per_step=2)
    optimizer = hvd.DistributedOptimizer(SGD([b], lr=1.0))
    a.backward()
    kept = [dropped]
    kept.append(kept)
    watched = weakref.ref(dropped)
    del dropped
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        original = getattr(BackwardSync, how)

        def collect(*args: object, **named: object) -> object:
            kept.clear()
            gc.collect()
            return original(*args, **named)

        patch.setattr(BackwardSync, how, collect)
        optimizer.zero_grad()
        b.backward()
        optimizer.step()
    assert not kept
    gc.collect()
    assert watched() is None
    gc.enable()
    train_another(b)
    assert (a.item(), b.item()) == (1, 1 - 1 - 3 * 1.5)


def collect_at_each_point() -> None:
    for how in ("_agree", "_conclude", "_note"):
        collect_during_the_end_of_a_pass(how)


@on_both_transports
def test_an_optimizer_is_collected_during_the_end_of_a_pass(transport):
    run(collect_at_each_point, 2, transport=transport)
