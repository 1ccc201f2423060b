"""Direct gradients: autograd computes them in the memory in which they are reduced."""

import os
from collections.abc import Callable

import pytest
import torch
from pool import FORKS, run
from shared import is_shared
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

import torch_ring as hvd

ROWS, COLUMNS = 40, 30  # a large gradient
LARGE = {"TORCH_RING_DIRECT_GRADIENT_BYTES": str(4 * ROWS * COLUMNS)}


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


# --- where gradients lie


def check_address(direct: bool) -> None:
    model, unwrapped = make_linear(), make_linear()
    optimizer = wrap(model)
    weight, bias = recorded_addresses(model.weight), recorded_addresses(model.bias)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model).backward()
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
    ("size", "transport", "env", "direct"),
    [
        (2, "shm", LARGE, True),
        (3, "shm", LARGE, True),
        (2, "shm", {"TORCH_RING_DIRECT_GRADIENT_BYTES": "0"}, False),
        (2, "shm", {"TORCH_RING_DIRECT_GRADIENT_BYTES": str(4 * ROWS * COLUMNS + 1)}, False),
        (2, "tcp", LARGE, False),
    ],
)
def test_large_gradients_are_reduced_where_they_are_computed(size, transport, env, direct):
    run(check_address, size, args=(direct,), transport=transport, env=env)


def check_that_compression_copies() -> None:
    model = make_linear()
    optimizer = hvd.DistributedOptimizer(
        SGD(model.parameters(), lr=0.1), compression=hvd.Compression.bf16
    )
    addresses = recorded_addresses(model.weight)
    loss_of(model).backward()
    assert model.weight.grad.data_ptr() != addresses[-1]
    optimizer.step()


def test_a_compressed_gradient_is_copied():
    run(check_that_compression_copies, 2, env=LARGE)


def keep_and_drop_gradients() -> None:
    """Every way to drop a gradient frees its block; a kept gradient keeps its values."""
    model = make_linear()
    optimizer = wrap(model)
    addresses = recorded_addresses(model.weight)
    ways: list[Callable[[], object]] = [
        optimizer.zero_grad,
        model.zero_grad,
        lambda: setattr(model.weight, "grad", None),
    ]
    for drop in ways:
        loss_of(model).backward()
        optimizer.step()
        drop()
    assert len(set(addresses)) == 1, addresses

    optimizer.zero_grad()
    loss_of(model).backward()
    kept = model.weight.grad
    values = kept.clone()
    optimizer.zero_grad()
    for factor in (2.0, 3.0):
        model.zero_grad()
        loss_of(model, factor).backward()
        assert_reduced(model, factor)
        assert torch.equal(kept, values)
    assert kept.data_ptr() not in addresses[-2:]


def test_a_program_may_keep_and_drop_gradients():
    run(keep_and_drop_gradients, 2, env=LARGE)


# --- effects of autograd and programs on gradients


def give_other_memory(model: nn.Linear) -> None:
    """Give the weight's gradient other memory at the end of backward, before it is reduced."""

    def replaces() -> None:
        model.weight.grad.data = model.weight.grad.clone()

    def queues(_: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(replaces)
        handle.remove()

    handle = model.weight.register_hook(queues)


def compute_gradient(way: str) -> None:
    model = make_linear()
    optimizer = wrap(model)
    for factor in (1.0, 2.0):
        optimizer.zero_grad(set_to_none=way != "in place")
        if way == "in place":
            loss_of(model, factor).backward()
        elif way == "under no_sync":
            with optimizer.no_sync():
                loss_of(model, factor / 2).backward()
            loss_of(model, factor / 2).backward()
        elif way == "twice in a pass":
            (loss_of(model, factor / 4) + loss_of(model, 3 * factor / 4)).backward()
        elif way == "by a checkpoint":
            rows = checkpoint(model, torch.ones(2, COLUMNS), use_reentrant=False)
            (factor * (hvd.rank() + 1) * rows.square().sum()).backward()
        elif way == "replaced by a hook":
            model.weight.register_hook(lambda gradient: gradient * 1.0)
            loss_of(model, factor).backward()
        elif way == "given other memory in the pass":
            give_other_memory(model)
            loss_of(model, factor).backward()
        elif way == "given other memory":
            loss_of(model, factor / 2).backward()
            model.weight.grad.data = model.weight.grad.clone()
            loss_of(model, factor / 2).backward()
        else:
            assert way == "by halves"
            loss_of(model, factor / 2).backward()
            first, model.weight.grad = model.weight.grad, None
            loss_of(model, factor / 2).backward()
            model.weight.grad = model.weight.grad + first
            optimizer.synchronize()
        if way in ("in place", "under no_sync", "twice in a pass", "by a checkpoint"):
            assert is_shared(model.weight.grad)
        assert_reduced(model, factor)
        optimizer.step()


@pytest.mark.parametrize(
    "way",
    [
        "in place",
        "under no_sync",
        "twice in a pass",
        "by a checkpoint",
        "replaced by a hook",
        "given other memory",
        "given other memory in the pass",
        "by halves",
    ],
)
def test_every_way_to_compute_a_gradient(way):
    run(compute_gradient, 2, args=(way,), env=LARGE)


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
    for turn in range(4):
        unwrapped.grad = None
        optimizer.zero_grad()
        shape = (COLUMNS, ROWS)
        views = [unwrapped.view(shape), one.view(shape)]
        first, last = views if turn % 2 else reversed(views)
        ((first + last) * mine).sum().backward()
        assert torch.equal(one.grad, torch.full_like(one, mean))
        assert torch.equal(unwrapped.grad, torch.full_like(one, mine))


def test_gradients_that_others_hold_are_copied():
    run(hold_gradients, 2, env=LARGE)


def place_differently_on_ranks() -> None:
    """One rank's gradient is direct; the other's is copied, in private memory, or missing."""
    model = make_linear()
    optimizer = wrap(model)
    held: list[Tensor] = []
    for step in range(12):
        optimizer.zero_grad()
        apart = step % 2 == hvd.rank()
        way = ("held", "exhausted", "missing")[step // 2 % 3]
        if way == "held" and apart:
            hook = model.weight.register_hook(lambda gradient: held.append(gradient.view(-1)))
        if not (way == "missing" and apart):
            loss_of(model).backward()
        if way == "held" and apart:
            hook.remove()
        optimizer.synchronize()
        if way == "missing":
            other = 1 - step % 2  # whose gradient it is
            mean = model.weight.grad * hvd.size() / (other + 1)
            model.zero_grad()
            with optimizer.no_sync():
                (loss_of(model) / (hvd.rank() + 1)).backward()
            torch.testing.assert_close(mean, model.weight.grad)
        else:
            assert_reduced(model)
        if way == "exhausted" and apart:  # there are only two blocks
            held.append(model.weight.grad)
        optimizer.zero_grad()
    assert held


def test_ranks_whose_gradients_lie_in_different_memory():
    run(place_differently_on_ranks, 2, env=LARGE)


def restore_gradient() -> None:
    """A gradient that was reduced, put away and assigned again is not reduced again."""
    model = make_linear()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.0), op=hvd.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        model.weight.grad.mul_(1.0)
        reduced, values = model.weight.grad, model.weight.grad.clone()
        optimizer.zero_grad()
        model.weight.grad = reduced
        optimizer.step()
        assert torch.equal(model.weight.grad, values)


def test_a_restored_gradient_is_not_reduced_again():
    run(restore_gradient, 2, env=LARGE)


def wrap_again() -> None:
    model = make_linear()
    older = wrap(model)
    newer = None
    addresses = recorded_addresses(model.weight)
    for again in range(3):
        model.zero_grad()
        loss_of(model).backward()
        assert_reduced(model)
        assert model.weight.grad.data_ptr() == addresses[-1]
        if again == 0:
            del older
            newer = wrap(model)
    assert newer is not None
    hvd.shutdown()
    hvd.init()
    model.zero_grad()
    newer = wrap(model)
    loss_of(model).backward()
    assert_reduced(model)
    assert model.weight.grad.data_ptr() == addresses[-1]


def test_a_model_that_is_wrapped_again():
    run(wrap_again, 2, env=LARGE)


def wrap_twice() -> None:
    """Two optimizers of one parameter each reduce the gradient that autograd has computed, once."""
    model = make_linear()
    optimizers = [
        hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), op=hvd.Sum) for _ in range(2)
    ]
    for _ in range(3):
        model.zero_grad()
        loss_of(model).backward()
        assert_reduced(model, hvd.size())
        optimizers[0].step()


def test_a_parameter_of_two_optimizers():
    run(wrap_twice, 2, env=LARGE)


# --- forked children


def fork_and_compute() -> None:
    """A child computes and frees gradients; its parent does not see it."""
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
            passed = not is_shared(model.weight.grad)
        finally:
            os._exit(0 if passed else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert_reduced(model)
    assert torch.equal(shared, torch.ones(1000))
    optimizer.step()
    model.zero_grad()
    loss_of(model).backward()
    assert_reduced(model)


def test_a_forked_child_has_memory_of_its_own():
    run(fork_and_compute, 2, env=LARGE, kind=FORKS)


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


def test_a_gradient_that_a_hook_of_the_accumulator_keeps():
    run(keep_in_a_hook_of_the_accumulator, 2)
