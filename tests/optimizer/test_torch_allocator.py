"""Torch's CPU allocator: replaced only while gradients are computed in shared memory."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from pool import FORKS, run
from shared import is_shared
from torch import nn
from torch.optim import SGD, Optimizer

import torch_ring as hvd

ROWS, COLUMNS = 40, 30
LARGE = {"TORCH_RING_DIRECT_GRADIENT_BYTES": str(4 * ROWS * COLUMNS)}

_c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
_get_cpu_allocator = _c10["_ZN3c1015GetCPUAllocatorEv"]  # c10::GetCPUAllocator()
_get_cpu_allocator.restype = ctypes.c_void_p


def allocator() -> int:
    """Return the address of torch's CPU allocator."""
    address: int = _get_cpu_allocator()
    return address


def wrapped_model() -> tuple[nn.Linear, Optimizer]:
    model = nn.Linear(COLUMNS, ROWS)
    return model, hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))


def train(model: nn.Linear, optimizer: Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, COLUMNS)).sum().backward()
        optimizer.step()


def train_without_direct_gradients() -> None:
    before = allocator()
    model, optimizer = wrapped_model()
    assert allocator() == before
    train(model, optimizer)
    assert allocator() == before


@pytest.mark.parametrize(
    ("transport", "env"),
    [
        ("shm", {"TORCH_RING_DIRECT_GRADIENT_BYTES": "0"}),
        ("shm", {"TORCH_RING_DIRECT_GRADIENT_BYTES": str(4 * ROWS * COLUMNS + 1)}),
        ("tcp", LARGE),
    ],
    ids=["switched off", "no gradient is large enough", "no shared memory"],
)
def test_torchs_allocator_stays_where_no_gradient_is_direct(transport, env):
    run(train_without_direct_gradients, 2, transport=transport, env=env)


def wrap_and_unwrap() -> None:
    before = allocator()
    first, one = wrapped_model()
    replaced = allocator()
    assert replaced != before
    second, other = wrapped_model()
    train(first, one)
    train(second, other)
    del one
    gc.collect()
    assert allocator() == replaced, "another optimizer is left"
    kept = second.weight.grad
    values = kept.clone()
    assert is_shared(kept)
    del other
    gc.collect()
    assert allocator() == replaced, "its gradients are left"
    first.zero_grad()
    assert allocator() == replaced
    second.zero_grad()
    assert torch.equal(kept, values)
    del kept
    assert allocator() == before
    # Earlier allocations stay valid, and torch computes gradients as before.
    second(torch.ones(2, COLUMNS)).sum().backward()
    assert not is_shared(second.weight.grad)
    assert allocator() == before
    third, again = wrapped_model()
    assert allocator() == replaced
    train(third, again)
    assert is_shared(third.weight.grad)


def test_torchs_allocator_comes_back_with_the_last_optimizer_and_gradient():
    # In processes of its own: others' optimizers may have left torch's allocator replaced.
    run(wrap_and_unwrap, 2, env=LARGE, kind="allocator")


def wrap_while_others_allocate() -> None:
    """Threads allocate and free, also in backward passes, while the allocator comes and goes."""
    done, failures = threading.Event(), list[str]()

    def work(seed: int) -> None:
        weight = torch.full((ROWS, COLUMNS), float(seed), requires_grad=True)
        kept: list[torch.Tensor] = []
        while not done.is_set():
            kept.append(torch.full((ROWS * COLUMNS,), float(seed)))
            (gradient,) = torch.autograd.grad((weight * weight).sum(), weight)
            if not gradient.eq(2 * seed).all() or not kept[0].eq(seed).all():
                failures.append(f"thread {seed}")
                return
            if len(kept) > 8:
                kept.clear()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    before = allocator()
    try:
        for _ in range(20):
            model, optimizer = wrapped_model()
            train(model, optimizer)
            del optimizer
            gc.collect()
            model.zero_grad()
            assert allocator() == before
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.slow
def test_the_allocator_changes_while_other_threads_allocate():
    run(wrap_while_others_allocate, 2, env=LARGE)


def fork_with_gradients() -> None:
    """A forked child has torch's own allocator after it drops its parent's gradients."""
    before = allocator()
    model, optimizer = wrapped_model()
    train(model, optimizer)
    child = os.fork()
    if child == 0:
        model.zero_grad()
        passed = allocator() == before
        model(torch.ones(2, COLUMNS)).sum().backward()
        os._exit(0 if passed and not is_shared(model.weight.grad) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert allocator() != before
    train(model, optimizer)


def test_a_forked_child_has_torchs_allocator():
    run(fork_with_gradients, 2, env=LARGE, kind=FORKS)
