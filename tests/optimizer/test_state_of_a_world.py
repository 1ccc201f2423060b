"""State of the optimizers in a world: it ends with the world, with the process set, with a fork."""

from __future__ import annotations

import gc
import os

import pytest
from pool import FORKS, run
from torch.optim import SGD
from training import grads, take_step, weights

import torch_ring as hvd
from torch_ring.optimizer.backward_sync import backward_sync_of


def train_in_a_world(kind: str) -> None:
    parameters = weights(2, 3)
    process_set = hvd.add_process_set([0, 1]) if kind == "set" else hvd.global_process_set
    options = {
        "compressed": {"compression": hvd.Compression.int8()},
        "Adasum": {"op": hvd.Adasum},
        "groups": {"groups": 2},
    }.get(kind, {})
    names = [("a", parameters[0]), ("b", parameters[1])]
    optimizer = hvd.DistributedOptimizer(
        SGD(parameters, lr=0.0), names, process_set=process_set, **options
    )
    other = hvd.DistributedOptimizer(SGD(weights(4), lr=0.0))
    for _ in range(3):
        for each in (optimizer, other):
            take_step(
                each, sum((p**2).sum() for group in each.param_groups for p in group["params"])
            )
    if kind == "joined":
        hvd.join()


def end_worlds_without_collection(kind: str) -> None:
    """The memory of a world is freed with it, even without garbage collection."""
    hvd.shutdown()
    gc.collect()
    gc.disable()
    held = []
    for _ in range(6):
        hvd.init()
        train_in_a_world(kind)
        hvd.shutdown()
        with open("/proc/self/maps") as maps:
            shared = sum(line.split()[1][3] == "s" for line in maps)
        held.append((len(os.listdir("/proc/self/fd")), shared))
    gc.enable()
    hvd.init()
    # The first one may have made permanent things, such as connections to the store.
    assert held[2:] == [held[1]] * 4


@pytest.mark.parametrize("kind", ["plain", "set", "groups", "compressed", "Adasum", "joined"])
def test_a_world_goes_without_garbage_collection(kind):
    run(end_worlds_without_collection, 3 if kind == "set" else 2, args=(kind,))


def end_a_process_set() -> None:
    """A set with the ranks and the id of a removed one gets a synchronisation of its own."""
    pair = hvd.add_process_set([0, 1])
    old_id = pair.process_set_id
    parameters = weights(1)
    old = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), process_set=pair)
    beside = hvd.DistributedOptimizer(SGD(weights(4), lr=0.0))
    (parameters[0] * 2).backward()
    hvd.remove_process_set(pair)
    if hvd.rank() < 2:
        for call in ((parameters[0] * 2).backward, old.step):  # gradients are never averaged
            with pytest.raises(hvd.RingError, match="shut down"):
                call()
    for group in beside.param_groups:  # the job goes on
        take_step(beside, group["params"][0] * 2)
    pair = hvd.add_process_set([0, 1])
    assert pair.process_set_id == old_id
    if not pair.included():
        return
    with pytest.raises(hvd.RingError, match="shut down"):  # the new set has no optimizer yet
        (parameters[0] * 2).backward()
    assert backward_sync_of(pair).number == 0
    new = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), process_set=pair)
    new.zero_grad()
    (parameters[0] * hvd.rank()).backward()  # beside the old optimizer, which takes no part
    assert grads(parameters) == [0.5]
    new.step()


def test_synchronisation_ends_with_its_process_set():
    run(end_a_process_set, 3)


def fork(shut_down: bool) -> None:
    """A forked child's backward pass does not write into the buckets of its parent."""
    parameters = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=hvd.Sum)
    (parameters[0] * 2).backward()
    total = 2 * hvd.size()
    assert grads(parameters) == [total]
    if shut_down:
        hvd.shutdown()
    child = os.fork()
    if child == 0:
        parameters[0].grad = None
        (parameters[0] * 7).backward()
        os._exit(0 if grads(parameters) == [7] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert grads(parameters) == [total]
    del optimizer


def refuse_an_optimizer() -> None:
    """A refused optimizer leaves its parameters unchanged, even while the error exists."""
    compressor = hvd.Compression.int8()
    p, q = weights(1, 1)
    first = hvd.DistributedOptimizer(
        SGD([p], lr=0.0), named_parameters=[("w", p)], compression=compressor
    )
    with pytest.raises(ValueError, match="already serves") as error:
        hvd.DistributedOptimizer(
            SGD([q], lr=0.0), named_parameters=[("w", q)], compression=compressor
        )
    (q * (2 + hvd.rank())).backward()
    assert q.grad.item() == 2 + hvd.rank()  # not averaged
    (p * hvd.rank()).backward()
    first.step()
    assert p.grad.item() == pytest.approx(0.5, abs=0.01)
    assert "already serves" in str(error.value)


def test_a_refused_optimizer_leaves_no_hooks():
    run(refuse_an_optimizer, 2)


@pytest.mark.parametrize("shut_down", [False, True])
def test_a_forked_child_leaves_the_buckets_alone(shut_down):
    run(fork, 2, args=(shut_down,), kind=FORKS)
