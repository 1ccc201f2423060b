# SPDX-License-Identifier: Apache-2.0
"""Direct gradients: autograd computes them in the memory in which they are reduced.

For them torch's CPU allocator is replaced.
"""

import ctypes
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from pool import FORKS, run
from shared import is_shared
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import torch_ring as hvd

ROWS, COLUMNS = 40, 30  # a large gradient
LARGE = {"TORCH_RING_DIRECT_GRADIENT_BYTES": str(4 * ROWS * COLUMNS)}


_c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
_get_cpu_allocator = _c10["_ZN3c1015GetCPUAllocatorEv"]  # c10::GetCPUAllocator()
_get_cpu_allocator.restype = ctypes.c_void_p


def allocator() -> int:
    """Return the address of torch's CPU allocator."""
    address: int = _get_cpu_allocator()
    return address


def recorded_addresses(parameter: nn.Parameter) -> list[int]:
    """Return a list that gets the address of each gradient that autograd passes to the hooks."""
    addresses: list[int] = []
    parameter.register_post_accumulate_grad_hook(
        lambda accumulated: addresses.append(accumulated.grad.data_ptr())
    )
    return addresses


def make_linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(COLUMNS, ROWS)


def wrap(model: nn.Module) -> Optimizer:
    return hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())


def loss_of(model: nn.Module, factor: float = 1.0) -> Tensor:
    return factor * (hvd.rank() + 1) * model(torch.ones(2, COLUMNS)).square().sum()


def assert_reduced(model: nn.Module, factor: float = 1.0) -> None:
    """Check that the gradients are the average over all ranks' losses."""
    ranks = hvd.size()
    alone = make_linear()
    alone.load_state_dict(model.state_dict())
    (factor * (ranks + 1) / 2 * alone(torch.ones(2, COLUMNS)).square().sum()).backward()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)


def hold_gradients() -> None:
    """A gradient with another reference is copied, and the copy is reduced."""
    one, other = (nn.Parameter(torch.zeros(ROWS, COLUMNS)) for _ in range(2))
    unwrapped = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    optimizer = hvd.DistributedOptimizer(SGD([one, other], lr=0.1))
    mine, mean = float(hvd.rank() + 1), (hvd.size() + 1) / 2
    kept: list[Tensor] = []
    hook = one.register_hook(lambda gradient: kept.append(gradient.view(-1)))
    other.register_post_accumulate_grad_hook(lambda accumulated: kept.append(accumulated.grad))
    for turn in range(4):
        optimizer.zero_grad()
        kept.clear()
        # One gradient for two, computed by one node.
        first, last = (one, other) if turn % 2 else (other, one)
        ((first + last) * mine).sum().backward()
        assert torch.equal(one.grad, torch.full_like(one, mean))
        assert torch.equal(other.grad, torch.full_like(one, mean))
        assert len(kept) == 2
        for gradient in kept:
            assert torch.equal(gradient, torch.full_like(gradient, mine))
    hook.remove()
    for turn in range(2):
        unwrapped.grad = None
        optimizer.zero_grad()
        shape = (COLUMNS, ROWS)
        views = [unwrapped.view(shape), one.view(shape)]
        first, last = views if turn else reversed(views)
        ((first + last) * mine).sum().backward()
        assert torch.equal(one.grad, torch.full_like(one, mean))
        assert torch.equal(unwrapped.grad, torch.full_like(one, mine))


def place_differently_on_ranks() -> None:
    """One rank's gradient is direct; the other's is copied, or in private memory."""
    model = make_linear()
    optimizer = wrap(model)
    held: list[Tensor] = []
    for step in range(8):
        optimizer.zero_grad()
        apart = step % 2 == hvd.rank()
        is_held = step // 2 % 2 == 0
        if is_held and apart:
            hook = model.weight.register_hook(lambda gradient: held.append(gradient.view(-1)))
        loss_of(model).backward()
        if is_held and apart:
            hook.remove()
        assert_reduced(model)
        if not is_held and apart:  # there are only two blocks
            held.append(model.weight.grad)
    assert held


def fork_and_compute() -> None:
    """A child computes and frees gradients; its parent does not see it."""
    before = allocator()
    model, shared = make_linear(), hvd.empty_shared(1000).fill_(1.0)
    optimizer = wrap(model)
    loss_of(model).backward()
    child = os.fork()
    if child == 0:
        passed = False
        try:
            del shared, optimizer
            for _ in range(3):
                model.zero_grad()
                loss_of(model, 5.0).backward()
            passed = not is_shared(model.weight.grad) and allocator() == before
        finally:
            os._exit(0 if passed else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert allocator() != before
    assert_reduced(model)
    assert torch.equal(shared, torch.ones(1000))
    optimizer.step()
    model.zero_grad()
    loss_of(model).backward()
    assert_reduced(model)


def keep_in_a_hook_of_the_accumulator() -> None:
    """The program's hook, which runs first, keeps the gradient whose memory `grad` has taken."""
    weight = nn.Parameter(torch.ones(100_000))
    kept: list[Tensor] = []
    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda _, gradients: kept.append(gradients[0]))
    optimizer = hvd.DistributedOptimizer(SGD([weight], lr=0.0))
    for _ in range(3):
        optimizer.zero_grad()
        kept.clear()
        (weight * (1.0 + hvd.rank())).sum().backward()
        assert (weight.grad == 1.5).all()
        assert (kept[0] == 1.0 + hvd.rank()).all()
        optimizer.step()


@pytest.mark.parametrize(
    ("check", "kind"),
    [
        (hold_gradients, None),
        (place_differently_on_ranks, None),
        (keep_in_a_hook_of_the_accumulator, None),
        (fork_and_compute, FORKS),
    ],
)
def test_direct_gradients(check, kind):
    run(check, 2, env=LARGE, kind=kind)


def check_address(direct: bool, options: dict[str, Any]) -> None:
    model, unwrapped = make_linear(), make_linear()
    before = allocator()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), **options)
    if not direct and not options:
        assert allocator() == before, "torch's allocator stays where no gradient is direct"
    weight, bias = recorded_addresses(model.weight), recorded_addresses(model.bias)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model).backward()
        if not options:
            assert_reduced(model)
        assert is_shared(model.weight.grad) == is_shared(model.bias.grad)
        assert (model.weight.grad.data_ptr() == weight[-1]) == direct, f"in step {step}"
        assert model.bias.grad.data_ptr() != bias[-1], "a small one is copied into its bucket"
        loss_of(unwrapped).backward()
        assert not is_shared(unwrapped.weight.grad), "which nobody reduces"
        optimizer.step()
    if direct:
        assert len(set(weight)) == 1, "the block of the step before"


@pytest.mark.parametrize(
    ("transport", "least_bytes", "direct", "options"),
    [
        ("shm", 4 * ROWS * COLUMNS, True, {}),
        ("shm", 4 * ROWS * COLUMNS + 1, False, {}),
        ("tcp", 4 * ROWS * COLUMNS, False, {}),
        ("shm", 4 * ROWS * COLUMNS, False, {"compression": hvd.Compression.bf16}),
    ],
)
def test_large_gradients_are_reduced_where_they_are_computed(
    transport, least_bytes, direct, options
):
    env = {"TORCH_RING_DIRECT_GRADIENT_BYTES": str(least_bytes)}
    run(check_address, 2, args=(direct, options), transport=transport, env=env, kind="allocator")


@on_ranks(2, env=LARGE, kind="allocator")
def test_torchs_allocator_comes_and_goes() -> None:
    """Torch's allocator comes back with the last optimizer and gradient."""
    before = allocator()
    first, second = make_linear(), make_linear()
    one, other = wrap(first), wrap(second)
    replaced = allocator()
    assert replaced != before
    for model, optimizer in ((first, one), (second, other)):
        loss_of(model).backward()
        optimizer.step()
    del one, optimizer
    gc.collect()
    assert allocator() == replaced, "another optimizer is left"
    kept = second.weight.grad
    values = kept.clone()
    assert is_shared(kept)
    del other
    gc.collect()
    assert allocator() == replaced, "its gradients are left"
    first.zero_grad()
    second.zero_grad()
    assert torch.equal(kept, values)
    del kept
    assert allocator() == before
    # Torch computes gradients as before.
    loss_of(second).backward()
    assert not is_shared(second.weight.grad)
    again = wrap(second)
    assert allocator() == replaced
    second.zero_grad()
    loss_of(second).backward()
    again.step()
    assert is_shared(second.weight.grad)
