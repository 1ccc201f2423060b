"""Gradients that a program assigns, writes or moves."""

import pytest
import torch
from pool import run
from torch import nn
from torch.optim import SGD
from training import joined_batches, make_model, part, train

import torch_ring as hvd


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


def change_reduced_gradients(op: hvd.ReduceOp) -> None:
    """Changes of reduced gradients by the program are left alone, though step() has to agree."""
    used, by_hand, unused = parameters = [nn.Parameter(torch.zeros(1).double()) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=1.0), op=op)
    mean = sum(range(1, hvd.size() + 1)) / (1 if op == hvd.Sum else hvd.size())
    for step in range(3):
        optimizer.zero_grad()
        (used * (hvd.rank() + 1)).backward()
        assert used.grad.item() == pytest.approx(mean, rel=0, abs=1e-10)
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
        assert used.item() == pytest.approx(-0.5 * (step + 1), rel=0, abs=1e-10)
        assert by_hand.item() == pytest.approx(-mean * (step + 1), rel=0, abs=1e-10)
    assert unused.item() == pytest.approx(-mean, rel=0, abs=1e-10)


def change_dtype() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    batch = part(joined_batches(steps=1)[0])
    train(model, optimizer, [batch])
    model.double()
    changed = r"'.*' has changed its dtype from Float to Double .* convert the model first"
    with pytest.raises(ValueError, match=changed):
        train(model, optimizer, [batch.double()])


def take_away_and_give_back() -> None:
    """A gradient that was reduced, put away and assigned again is not reduced again."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.0), op=hvd.Sum)
    weight = model[0].weight
    for _ in range(2):
        optimizer.zero_grad()
        model(part(joined_batches(steps=1)[0])).sum().backward()
        weight.grad.mul_(1.0)
        reduced, values = weight.grad, weight.grad.clone()
        optimizer.zero_grad()
        weight.grad = reduced
        optimizer.step()
        assert torch.equal(weight.grad, values)


@pytest.mark.parametrize(
    ("check", "args"),
    [
        (write_gradients, (hvd.Average,)),
        (write_gradients, (hvd.Sum,)),
        (change_reduced_gradients, (hvd.Average,)),
        (change_reduced_gradients, (hvd.Sum,)),
        (change_dtype, ()),
        (take_away_and_give_back, ()),
    ],
)
def test_gradients_by_hand(check, args):
    run(check, 2, args=args)
