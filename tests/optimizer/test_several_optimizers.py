"""Several wrapped optimizers in one program."""

import pytest
import torch
from pool import error_of, run
from torch import nn
from torch.optim import SGD, Adam
from training import assert_same_weights, joined_batches, loss_of, make_model, part, weights
from worlds import on_both_transports

import torch_ring as hvd


def train_gan() -> None:
    """Generator and discriminator; rank 1 wraps and steps like the others, but on its own data."""

    def play(wrap, share) -> tuple[nn.Module, nn.Module]:
        generator, critic = nn.Linear(8, 8), make_model(seed=2)
        with torch.no_grad():
            generator.weight.fill_(0.1)
            generator.bias.zero_()
        tune_generator = wrap(Adam(generator.parameters(), lr=0.01))
        tune_critic = wrap(Adam(critic.parameters(), lr=0.01))
        for batch in map(share, joined_batches(steps=4)):
            tune_critic.zero_grad()
            loss_of(critic, batch).backward()
            (-loss_of(critic, generator(batch).detach())).backward()
            tune_critic.step()
            tune_generator.zero_grad()
            loss_of(critic, generator(batch)).backward()  # touches both optimizers' parameters
            tune_generator.step()
        return generator, critic

    for together, alone in zip(
        play(hvd.DistributedOptimizer, part), play(lambda o: o, lambda b: b), strict=True
    ):
        assert_same_weights(together, alone)


@on_both_transports
def test_gan(transport):
    run(train_gan, 2, transport=transport)


def touch_different_optimizers() -> None:
    """In one backward pass rank 0 touches the first optimizer, rank 1 the second."""
    (a,), (b,) = weights(1), weights(1)
    first = hvd.DistributedOptimizer(SGD([a], lr=1.0))
    second = hvd.DistributedOptimizer(SGD([b], lr=1.0))
    (2 * a if hvd.rank() == 0 else 4 * b).backward()
    first.step()
    second.step()
    assert (a.item(), b.item()) == (0, -1)


def test_ranks_touch_different_optimizers():
    run(touch_different_optimizers, 2)


def share_a_parameter() -> None:
    (x,) = weights(1)
    first = hvd.DistributedOptimizer(SGD([x], lr=1.0))
    second = hvd.DistributedOptimizer(SGD([x], lr=1.0))
    for _ in range(2):
        first.zero_grad()
        ((hvd.rank() + 1) * x).backward()
        assert x.grad.item() == 1.5
        first.step()
        second.step()
    assert x.item() == 1 - 4 * 1.5


def test_one_parameter_of_two_optimizers():
    run(share_a_parameter, 2)


def train_another(parameter: nn.Parameter) -> None:
    """Take three steps of 1.5 with an optimizer of its own."""
    optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        ((hvd.rank() + 1) * parameter).backward()
        optimizer.step()


def drop_on_one_rank_first(accumulated_on: int) -> None:
    """Two ranks drop an optimizer with accumulated gradients, rank 0 later: it is garbage there."""
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


@pytest.mark.parametrize("accumulated_on", [0, 1], ids=["on rank 0", "on both ranks"])
def test_a_dropped_optimizer_is_collected_at_different_times(accumulated_on):
    run(drop_on_one_rank_first, 2, args=(accumulated_on,))


def drop_what_something_else_holds() -> None:
    """As above, with gradients due in the next pass; a thread may tell of a late pass just now."""
    (a,), (b,) = weights(1), weights(1)
    dropped = hvd.DistributedOptimizer(SGD([a], lr=1.0))
    with dropped.no_sync():
        a.backward()
    told_of = dropped._reducer if hvd.rank() == 0 else None
    del dropped
    train_another(b)
    assert (a.item(), b.item()) == (1, 1 - 3 * 1.5)
    del told_of


def test_a_dropped_optimizer_leaves_though_something_else_holds_its_reducer():
    run(drop_what_something_else_holds, 2)


def drop_on_one_rank_only() -> None:
    """An optimizer with due gradients, which one rank has dropped: no pass can reduce them."""
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


def test_an_optimizer_that_one_rank_has_dropped_is_an_error_on_all():
    run(drop_on_one_rank_only, 2)


def drop_a_trained_one_on_one_rank_first() -> None:
    """As the first, with buckets in their final order, which the autotuner would try others for."""
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


@on_both_transports
def test_a_trained_optimizer_is_collected_at_different_times(transport):
    run(
        drop_a_trained_one_on_one_rank_first,
        2,
        transport=transport,
        env={"TORCH_RING_AUTOTUNE": "1"},
    )
