"""State of the optimizers in a world: it ends with the world, with the process set, with a fork."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
from pool import run
from torch.optim import SGD
from training import grads, weights

import torch_ring as hvd
from torch_ring.optimizer.backward_sync import backward_sync_of


def end_the_world() -> None:
    """After shutdown() nothing holds the synchronisation; the next world begins with its own."""
    parameters = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0))
    (parameters[0] * 2).backward()
    sync = weakref.ref(backward_sync_of(hvd.global_process_set))
    assert sync().number == 1
    hvd.shutdown()
    del optimizer
    gc.collect()
    assert sync() is None
    hvd.init()
    assert backward_sync_of(hvd.global_process_set).number == 0


def test_synchronisation_ends_with_its_world():
    run(end_the_world, 2)


def end_a_process_set() -> None:
    """A set of the same ranks and id as a removed one begins with a synchronisation of its own."""
    pair = hvd.add_process_set([0, 1])
    old_id = pair.process_set_id
    parameters = weights(1)
    old = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), process_set=pair)
    (parameters[0] * 2).backward()
    hvd.remove_process_set(pair)
    pair = hvd.add_process_set([0, 1])
    assert pair.process_set_id == old_id
    if not pair.included():
        return
    assert backward_sync_of(pair).number == 0
    with pytest.raises(hvd.RingError, match="shut down"):  # gradients that nobody averages
        (parameters[0] * 2).backward()
    del old
    others = weights(1)
    new = hvd.DistributedOptimizer(SGD(others, lr=0.0), process_set=pair)
    (others[0] * hvd.rank()).backward()
    assert grads(others) == [0.5]
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


@pytest.mark.parametrize("shut_down", [False, True])
def test_a_forked_child_leaves_the_buckets_alone(shut_down):
    run(fork, 2, args=(shut_down,))
