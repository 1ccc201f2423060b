"""Gradients that a program assigns, writes or moves."""

import pytest
import torch
from pool import run
from torch.optim import SGD, Optimizer
from training import assert_same_weights, joined_batches, make_model, part, train, weights

import torch_ring as hvd


def assign_gradients() -> None:
    """The step reduces gradients that no backward pass has computed."""
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


def give_other_memory(how: str) -> None:
    """The program or torch may give `grad` other memory than its view of a bucket."""
    alone, together = make_model(), make_model()
    optimizers: list[Optimizer] = [SGD(m.parameters(), lr=0.1) for m in (alone, together)]
    hvd.DistributedOptimizer(optimizers[1])
    for batch in joined_batches(steps=3):
        for model, optimizer, share in zip(
            (alone, together), optimizers, (batch, part(batch)), strict=True
        ):
            train(model, optimizer, [share])
            if how == "share_memory":
                model.share_memory()
                continue
            if how == "data before zero_grad":
                optimizer.zero_grad(set_to_none=False)
            for parameter in model.parameters():
                parameter.grad.data = parameter.grad.data.clone()
    assert_same_weights(together, alone)


@pytest.mark.parametrize("how", ["data", "data before zero_grad", "share_memory"])
def test_gradients_are_given_other_memory(how):
    run(give_other_memory, 2, args=(how,))


def change_dtype() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    batch = part(joined_batches(steps=1)[0])
    train(model, optimizer, [batch])
    model.double()
    with pytest.raises(ValueError, match=r"'.*' has changed its dtype from Float to Double"):
        train(model, optimizer, [batch.double()])


def test_a_changed_dtype_is_refused():
    run(change_dtype, 2)
