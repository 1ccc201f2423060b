"""Several wrapped optimizers in one program."""

import gc
import weakref
from unittest import mock

import pytest
import torch
from oracle import Play, Program, expect_one_process
from pool import error_of, run
from torch import nn
from torch.optim import SGD
from training import take_step, weights
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.optimizer.backward_sync import BackwardSync


def train_another(parameter: nn.Parameter, steps: int = 3) -> None:
    """Take steps of 1.5 with an optimizer of its own."""
    optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=1.0))
    for _ in range(steps):
        take_step(optimizer, (hvd.rank() + 1) * parameter)


def drop_on_one_rank_first(accumulated_on: int, steps: int) -> None:
    """Two ranks drop an optimizer with accumulated gradients; rank 0 collects it later.

    After some steps its buckets are in final order, in which the autotuner would replace them.
    """
    (a,), (b,) = weights(1), weights(1)
    dropped = hvd.DistributedOptimizer(SGD([a], lr=1.0), backward_passes_per_step=2)
    for _ in range(steps):
        dropped.zero_grad()
        for _ in range(2):
            a.backward()
        dropped.step()
    if hvd.rank() <= accumulated_on:
        a.backward()
    garbage = dropped if hvd.rank() == 0 else None
    del dropped
    train_another(b, 12)
    assert (a.item(), b.item()) == (1 - 2 * steps, 1 - 12 * 1.5)
    del garbage
    train_another(b)
    assert b.item() == 1 - 15 * 1.5


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


AUTOTUNE = {"TORCH_RING_AUTOTUNE": "1"}


@pytest.mark.parametrize(
    ("drop", "args", "transport", "env"),
    [
        (drop_on_one_rank_first, (0, 0), "shm", {}),
        (drop_on_one_rank_first, (1, 0), "shm", {}),
        (drop_what_something_else_holds, (), "shm", {}),
        (drop_on_one_rank_only, (), "shm", {}),
        (drop_on_one_rank_first, (1, 2), "shm", AUTOTUNE),
        (drop_on_one_rank_first, (1, 2), "tcp", AUTOTUNE),
    ],
)
def test_dropped_optimizers(drop, args, transport, env):
    run(drop, 2, args=args, transport=transport, env=env)


def left_out(play: Play) -> Program:
    """A pass touches three optimizers, and one of them steps; one rank leaves out the next pass."""
    parameters = [nn.Parameter(torch.tensor([value]).double()) for value in (1.0, 2.0, 3.0)]
    optimizers = [
        play.wrap(nn.ParameterList([each]), SGD([each], lr=0.25))[1] for each in parameters
    ]
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(parameters).backward()
        optimizers[0].step()
        if step % play.size in play.ranks:
            (parameters[1] * 2 / (play.size if play.is_alone else 1)).backward()
        for optimizer in optimizers[1:]:
            optimizer.step()
        yield parameters


@on_both_transports
def test_a_rank_leaves_out_a_pass_after_one_that_was_not_stepped(transport):
    expect_one_process(left_out, size=3, transport=transport)


def collect_during_the_end_of_a_pass(how: str) -> None:
    """Python collects a dropped optimizer with accumulated gradients while another's pass ends."""
    (a,), (b,) = weights(1), weights(1)
    dropped = hvd.DistributedOptimizer(SGD([a], lr=1.0), backward_passes_per_step=2)
    a.backward()
    kept = [dropped]
    kept.append(kept)
    watched = weakref.ref(dropped)
    del dropped
    gc.disable()
    original = getattr(BackwardSync, how)

    def collect(*args: object, **named: object) -> object:
        kept.clear()
        gc.collect()
        return original(*args, **named)

    with mock.patch.object(BackwardSync, how, collect):
        train_another(b, 1)
    assert not kept
    gc.collect()
    assert watched() is None
    gc.enable()
    train_another(b)
    assert (a.item(), b.item()) == (1, 1 - 4 * 1.5)


@pytest.mark.parametrize("how", ["_agree", "_conclude", "_note"])
@on_both_transports
def test_an_optimizer_is_collected_during_the_end_of_a_pass(transport, how):
    run(collect_during_the_end_of_a_pass, 2, args=(how,), transport=transport)
