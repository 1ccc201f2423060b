"""Gradients that a program assigns, writes or moves."""

from collections.abc import Callable

import pytest
import torch
from pool import run
from torch import Tensor, nn
from torch.optim import SGD
from training import joined_batches, make_model, part, train, weights

import torch_ring as hvd


def assign_gradients() -> None:
    """The step reduces gradients that no backward pass computed."""
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        (x.grad,) = torch.autograd.grad((hvd.rank() + 1) * x, x)
        optimizer.step()
    assert x.item() == 1 - 2 * 1.5


def test_gradients_assigned_by_hand():
    run(assign_gradients, 2)


def write_gradients(op: hvd.ReduceOp) -> None:
    """Values written into gradients of the previous step are reduced, once."""
    model = make_model()
    x = model[0].weight
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=1.0), op=op)
    train(model, optimizer, [part(joined_batches(steps=1)[0])])
    for zero in (lambda: optimizer.zero_grad(False), lambda: model.zero_grad(False), lambda: None):
        zero()
        x.grad.fill_(hvd.rank() + 1.0)
        before = x.detach().clone()
        optimizer.step()
        expected = before - (3.0 if op == hvd.Sum else 1.5)
        torch.testing.assert_close(x.detach(), expected)
    optimizer.step()  # with the same gradient as before, which is reduced
    torch.testing.assert_close(x.detach(), expected - (3.0 if op == hvd.Sum else 1.5))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_gradients_written_by_hand(op):
    run(write_gradients, 2, args=(op,))


def doubles(*values: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((3,), value, dtype=torch.float64)) for value in values]


def assert_equals(parameter: Tensor, expected: float) -> None:
    torch.testing.assert_close(
        parameter.detach(), torch.full_like(parameter, expected), rtol=0, atol=1e-10
    )


def fill_data(parameter: nn.Parameter, value: float) -> None:
    assert parameter.grad is not None
    parameter.grad.data.fill_(value)


def fill_numpy(parameter: nn.Parameter, value: float) -> None:
    assert parameter.grad is not None
    parameter.grad.numpy()[:] = value


def fill(parameter: nn.Parameter, value: float) -> None:
    assert parameter.grad is not None
    parameter.grad.fill_(value)


def assign(parameter: nn.Parameter, value: float) -> None:
    parameter.grad = torch.full_like(parameter, value)


def add_up(parameter: nn.Parameter, value: float) -> None:
    gradient = torch.full_like(parameter, value)
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def set_beside_backward(
    set_gradient: Callable[[nn.Parameter, float], None],
    first: bool,
    ranks: tuple[int, ...],
    op: hvd.ReduceOp,
    options: dict[str, object],
    zero: str,
) -> None:
    """Autograd computes one gradient of an optimizer, and the program another, on some ranks."""
    rank, size, lr = hvd.rank(), hvd.size(), 0.25
    computed, by_hand, unused, frozen = parameters = doubles(1, 2, 3, 4)
    frozen.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=lr), op=op, **options)
    expected = [1.0, 2.0]
    divisor = 1 if op == hvd.Sum else size
    for step in range(3):
        if zero == "to none":
            optimizer.zero_grad()
        elif zero == "to zero":
            optimizer.zero_grad(set_to_none=False)
        else:
            computed.grad = None
        if by_hand.grad is None and set_gradient not in (assign, add_up):
            by_hand.grad = torch.zeros_like(by_hand)
        if first and rank in ranks:
            set_gradient(by_hand, 1.0 + rank + step)
        (computed * (rank + 1)).sum().backward()
        if not first and rank in ranks:
            set_gradient(by_hand, 1.0 + rank + step)
        optimizer.step()
        expected[0] -= lr * sum(r + 1 for r in range(size)) / divisor
        expected[1] -= lr * sum(1 + r + step for r in ranks if r < size) / divisor
        assert_equals(computed, expected[0])
        assert_equals(by_hand, expected[1])
        assert_equals(unused, 3)
        assert_equals(frozen, 4)
        assert unused.grad is None or not unused.grad.any()


EVERYONE = (0, 1, 2)
on_both_transports = pytest.mark.parametrize("transport", ["shm", "tcp"])


@on_both_transports
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("ranks", [EVERYONE, (1,)])
def test_gradients_set_beside_backward(transport, op, first, ranks):
    for set_gradient in (assign, add_up):
        args = (set_gradient, first, ranks, op, {}, "to none")
        run(set_beside_backward, 3, args=args, transport=transport)


@on_both_transports
@pytest.mark.parametrize(
    "options",
    [
        {"backward_passes_per_step": 2},
        {"compression": hvd.Compression.fp16},
        {"groups": 2},
        {"sparse_as_dense": True},
    ],
)
def test_gradients_set_beside_backward_with(transport, options):
    args = (assign, True, EVERYONE, hvd.Average, options, "to none")
    run(set_beside_backward, 2, args=args, transport=transport)


@on_both_transports
@pytest.mark.parametrize("set_gradient", [fill, fill_data, fill_numpy])
@pytest.mark.parametrize("zero", ["to none", "to zero"])
@pytest.mark.parametrize("ranks", [EVERYONE, (1,)])
def test_values_written_beside_backward(transport, set_gradient, zero, ranks):
    for op in (hvd.Average, hvd.Sum):
        args = (set_gradient, False, ranks, op, {}, zero)
        run(set_beside_backward, 3, args=args, transport=transport)


@on_both_transports
@pytest.mark.parametrize("set_gradient", [fill, fill_data, fill_numpy])
def test_values_written_over_those_of_the_step_before(transport, set_gradient):
    for first in (True, False):
        args = (set_gradient, first, EVERYONE, hvd.Average, {}, "never")
        run(set_beside_backward, 3, args=args, transport=transport)


def change_reduced_gradients(op: hvd.ReduceOp) -> None:
    """Changes of reduced gradients by the program are left alone, though step() has to agree."""
    used, by_hand, unused = parameters = doubles(0, 0, 0)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=1.0), op=op)
    mean = sum(range(1, hvd.size() + 1)) / (1 if op == hvd.Sum else hvd.size())
    for step in range(3):
        optimizer.zero_grad()
        (used * (hvd.rank() + 1)).sum().backward()
        assert_equals(used.grad, mean)
        by_hand.grad = torch.full_like(by_hand, hvd.rank() + 1.0)
        if step == 0:
            used.grad = used.grad.clamp(max=0.5)
        elif step == 1:
            used.grad.mul_(0.5 / mean)
        else:
            optimizer.synchronize()
            used.grad = used.grad.clamp(max=0.5)
            unused.grad = torch.full_like(unused, hvd.rank() + 1.0)
        optimizer.step()
        assert_equals(used, -0.5 * (step + 1))
        assert_equals(by_hand, -mean * (step + 1))
    assert_equals(unused, -mean)


@on_both_transports
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_reduced_gradients_that_the_program_changes(transport, op):
    run(change_reduced_gradients, 3, args=(op,), transport=transport)


def change_dtype() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    batch = part(joined_batches(steps=1)[0])
    train(model, optimizer, [batch])
    model.double()
    changed = r"'.*' has changed its dtype from Float to Double .* convert the model first"
    with pytest.raises(ValueError, match=changed):
        train(model, optimizer, [batch.double()])


def test_a_changed_dtype_is_refused():
    run(change_dtype, 2)
