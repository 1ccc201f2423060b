# SPDX-License-Identifier: Apache-2.0
"""Several wrapped optimizers in one program, also of the same parameters."""

import contextlib
import gc
import math
import weakref
from unittest import mock

import pytest
import torch
from logs import told
from on_ranks import on_ranks
from oracle import Play, Program, expect_one_process
from pool import error_of, eventually, run
from slot_programs import train_programs_at_random
from slow import slow
from torch import Tensor, nn
from torch.optim import SGD
from training import take_step, weights
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.optimizer.backward_sync import BackwardSync
from torch_ring.optimizer.reducer import Reducer


def scalars(*values: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in values]


def assert_near(tensor: Tensor | None, value: float) -> None:
    assert tensor is not None
    assert abs(tensor.item() - value) < 1e-10, (tensor.item(), value)


def meet_between_the_hooks() -> None:
    """A hook of the program, between the two optimizers', is slow on rank 0."""
    (trunk,) = scalars(0)
    accumulator = trunk.expand_as(trunk).grad_fn.next_functions[0][0]
    first = hvd.DistributedOptimizer(SGD([trunk], lr=1.0))

    def wait(*_: object) -> None:
        if hvd.rank() == 0:  # meanwhile the first one's bucket must not be reduced
            assert not eventually(lambda: trunk.grad.item() != 10, 0.2)

    accumulator.register_hook(wait)
    second = hvd.DistributedOptimizer(SGD([trunk], lr=1.0))
    for optimizer in (first, second):
        trunk.grad = None
        (trunk * (10 if hvd.rank() == 0 else 2)).backward()
        assert_near(trunk.grad, 6)
        optimizer.step()


# --- one slot, whoever steps


@pytest.mark.parametrize(
    ("transport", "size", "op"), [("shm", 2, hvd.Sum), slow("tcp", 3, hvd.Average)]
)
def test_optimizers_that_come_and_go(transport, size, op, full):
    seeds = range(1000 if full else 30)
    run(
        train_programs_at_random,
        size,
        args=(seeds, op),
        transport=transport,
        deadline_s=3600 if full else 120,
    )


def lose_the_later_one(when: str) -> None:
    """The optimizer with the slot goes in the midst of a pass, or Python collects it in a step."""
    trunk, other = scalars(0, 0)
    first = hvd.DistributedOptimizer(SGD([trunk, other], lr=1.0), op=hvd.Sum)
    later = hvd.DistributedOptimizer(SGD([trunk], lr=1.0), op=hvd.Sum)
    kept = [later]
    kept.append(kept)  # only the collector of garbage frees it

    def lose(*_: object) -> None:
        kept.clear()
        gc.collect()

    between = trunk * 1.0
    if when == "in a hook":
        between.register_hook(lose)  # after the gradient of `other`
    with later.no_sync() if when == "in a step" else contextlib.nullcontext():
        del later
        (between * (1 + hvd.rank()) + other * 2).backward()
    with pytest.MonkeyPatch.context() as patch:
        if when == "in a step":
            prepare = Reducer.prepare
            patch.setattr(
                Reducer, "prepare", lambda *args, **named: (lose(), prepare(*args, **named))[1]
            )
        first.step()
    assert_near(trunk, -3)
    (trunk * (1 + hvd.rank())).backward()  # is added to the first one
    assert_near(trunk.grad, 2 * 3)


def accumulate_without_the_later_one() -> None:
    """no_sync() holds a slot whose own optimizer is gone."""
    (trunk,) = scalars(0)
    first = hvd.DistributedOptimizer(SGD([trunk], lr=1.0))
    later = hvd.DistributedOptimizer(SGD([trunk], lr=1.0))
    del later
    with first.no_sync():
        (trunk * (1 + hvd.rank())).backward()
        assert_near(trunk.grad, 1 + hvd.rank())
    (trunk * 2).backward()
    assert_near(trunk.grad, 1.5 + 2)


def wrap_in_a_pass() -> None:
    """A second optimizer is wrapped when gradients of the first one have arrived."""
    trunk, own = scalars(0, 0)
    first = hvd.DistributedOptimizer(SGD([trunk, own], lr=1.0), [("trunk", trunk), ("own", own)])

    def wrap(_: object) -> None:
        hvd.DistributedOptimizer(SGD([trunk], lr=1.0), [("trunk", trunk)])

    between = trunk * 1.0
    handle = between.register_hook(wrap)  # after the gradient of `own`
    with pytest.raises(ValueError, match=r"'trunk'.* in the middle of a backward pass"):
        (between * 2 + own * 2).backward()
    handle.remove()
    for _ in range(2):
        take_step(first, trunk * (1 + hvd.rank()) + own * 4)
    assert_near(trunk, -2 * 1.5)
    assert_near(own, -2 * 4)


def touch_the_slot_on_one_rank() -> None:
    """A pass reaches the slot on one rank alone: all agree before the older optimizer steps."""
    trunk, own, other = scalars(0, 0, 0)
    optimizers = [
        hvd.DistributedOptimizer(SGD(p, lr=1.0)) for p in ([own, trunk], [trunk], [other])
    ]
    for _ in range(2):
        for parameter, optimizer in zip((own, trunk, other), optimizers, strict=True):
            parameter.data.zero_()
            optimizer.zero_grad()
        (own + trunk + other).backward()
        (trunk * 2 if hvd.rank() == 0 else other * 2).backward()
        for optimizer in optimizers:
            optimizer.step()
        for parameter, expected in ((own, -1), (trunk, -4), (other, -2)):
            assert_near(parameter, expected)


def drop_one_with_parameters_of_its_own() -> None:
    """Parameters that only the optimizer that is gone had are left to the program."""
    trunk, own = scalars(0, 0)
    first = hvd.DistributedOptimizer(SGD([trunk], lr=1.0), backward_passes_per_step=2)
    later = hvd.DistributedOptimizer(SGD([trunk, own], lr=1.0), backward_passes_per_step=2)
    del later
    for _ in range(3):
        trunk.data.zero_()
        first.zero_grad()
        for _ in range(2):
            ((trunk + own) * (1 + hvd.rank())).backward()
        assert_near(trunk.grad, 3)
        first.step()
    assert_near(own.grad, 6 * (1 + hvd.rank()))


def add_a_group_between_two_passes(optimizers: int) -> None:
    """The averaged gradient of the first pass counts once in the second one's sum."""
    trunk, other = scalars(0, 0)
    wrapped = [
        hvd.DistributedOptimizer(SGD([trunk], lr=1.0), op=hvd.Sum) for _ in range(optimizers)
    ]
    trunk.backward()
    wrapped[-1].add_param_group({"params": [other]})
    trunk.backward()
    assert_near(trunk.grad, 2 * 2)
    wrapped[0].step()
    assert_near(trunk, -2 * 2)


def keep_what_the_program_did() -> None:
    """A rank's own change of an averaged gradient, between two steps, stays its own."""
    (trunk,) = scalars(0)
    first, second = (hvd.DistributedOptimizer(SGD([trunk], lr=1.0)) for _ in range(2))
    for optimizer, other in ((first, second), (second, first)):
        trunk.data.zero_()
        take_step(optimizer, (trunk * 2).sum())
        trunk.grad.mul_(10 + hvd.rank())
        other.step()
        assert_near(trunk, -2 - 2 * (10 + hvd.rank()))


def find_nan() -> None:
    """Rank 1 has a NaN for a parameter that only the later optimizer reduces; the first steps."""
    trunk, head = scalars(1, 2)
    names = [("trunk", trunk), ("head", head)]
    first = hvd.DistributedOptimizer(SGD([trunk, head], lr=1.0), names, nan_check=True)
    later = hvd.DistributedOptimizer(SGD([trunk], lr=1.0), names[:1], nan_check=True)
    (trunk * (math.nan if hvd.rank() == 1 else 1.0) + head).sum().backward()
    kind, text = error_of(first.step)
    assert kind == "NonFiniteGradientError", text
    assert "rank 1: the gradient of 'trunk' has a NaN, step 1" in text
    assert trunk.item() == 1
    take_step(first, (trunk + head).sum())
    later.step()
    assert_near(trunk, -1)


@pytest.mark.parametrize(
    ("program", "args"),
    [
        (meet_between_the_hooks, ()),
        (lose_the_later_one, ("in a hook",)),
        (lose_the_later_one, ("in a step",)),
        (accumulate_without_the_later_one, ()),
        (wrap_in_a_pass, ()),
        (touch_the_slot_on_one_rank, ()),
        (drop_one_with_parameters_of_its_own, ()),
        (add_a_group_between_two_passes, (1,)),
        (add_a_group_between_two_passes, (2,)),
        (keep_what_the_program_did, ()),
        (find_nan, ()),
    ],
)
@on_both_transports
def test_one_slot_of_a_parameter(transport, program, args):
    run(program, 2, args=args, transport=transport)


@on_ranks(3)
def test_a_parameter_of_two_process_sets_is_refused() -> None:
    """A parameter is averaged over all ranks, and later wrapped for two of them."""
    pair = hvd.add_process_set([0, 1])
    (trunk,) = scalars(1)
    first = hvd.DistributedOptimizer(SGD([trunk], lr=1.0), [("trunk", trunk)])
    later = hvd.DistributedOptimizer(SGD([trunk], lr=1.0), process_set=pair)

    def train() -> None:
        later.zero_grad()
        trunk.sum().backward()
        first.step()
        hvd.barrier()

    kind, text = error_of(train)
    assert kind in ("RingError", "PeerLostError"), text
    assert "'trunk' is averaged over ranks [0, 1], as an optimizer wanted" in text


def wrap_with_other_settings() -> None:
    (trunk,) = scalars(0)
    named = [("trunk", trunk)]
    first = hvd.DistributedOptimizer(SGD([trunk], lr=1.0), named)
    later = hvd.DistributedOptimizer(SGD([trunk], lr=1.0), named, op=hvd.Sum)
    (trunk * (1 + hvd.rank())).sum().backward()
    first.step()
    assert trunk.item() == -3
    del later


def test_the_settings_of_the_later_optimizer_count():
    (message,) = told(wrap_with_other_settings, 2)
    assert "two optimizers have wrapped 'trunk' with different settings" in message


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


@pytest.mark.parametrize(
    ("drop", "args", "transport", "env"),
    [
        (drop_on_one_rank_first, (0, 0), "shm", {}),
        (drop_on_one_rank_first, (1, 2), "tcp", {"TORCH_RING_AUTOTUNE": "1"}),
        (drop_on_one_rank_only, (), "shm", {}),
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


@pytest.mark.parametrize("how", ["_agree", "_conclude", "_note"])
@on_ranks(2)
def test_an_optimizer_is_collected_during_the_end_of_a_pass(how: str) -> None:
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
