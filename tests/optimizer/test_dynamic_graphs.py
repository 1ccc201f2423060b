"""Gradients that come and go: dynamic graphs, several optimizers, ranks that skip."""

import os

import pytest
import torch
from pool import run
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.checkpoint import checkpoint
from training import (
    assert_same_weights,
    grads,
    joined_batches,
    loss_of,
    make_model,
    part,
    train,
    weights,
)

import torch_ring as hvd


def branches(set_to_none: bool, op: int) -> None:
    """Rank 0 uses a and b, rank 1 uses b and c, nobody d; then rank 0 a, rank 1 d."""
    a, b, c, d = parameters = weights(1, 1, 1, 1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=op)
    share = 1 if op == hvd.Sum else 1 / 2
    for _ in range(3):  # the buckets are planned anew in the first
        optimizer.zero_grad()
        (2 * a + 4 * b if hvd.rank() == 0 else 8 * b + 16 * c).backward()
        assert grads(parameters) == [2 * share, 12 * share, 16 * share, None]
        optimizer.step()

    optimizer.zero_grad(set_to_none=set_to_none)
    (32 * d if hvd.rank() == 1 else 2 * a).backward()
    untouched = None if set_to_none else 0
    assert grads(parameters) == [2 * share, untouched, untouched, 32 * share]


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ranks_use_different_parameters(transport, set_to_none, op):
    run(branches, 2, args=(set_to_none, op), transport=transport)


def keeps_what_nobody_touched(op: int) -> None:
    """An old gradient in a bucket that is reduced is neither averaged nor summed again."""
    parameters = weights(1, 1, 1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=op)
    sum(parameters).backward()
    share = hvd.size() if op == hvd.Sum else 1
    assert grads(parameters) == [share] * 3
    optimizer.step()
    parameters[0].grad.zero_()
    parameters[2].grad.zero_()
    (parameters[0] * 2 + parameters[2] * 4).backward()
    assert grads(parameters) == [2 * share, share, 4 * share]


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_untouched_gradients_stay(op):
    run(keeps_what_nobody_touched, 3, args=(op,))


def one_rank_skips() -> None:
    """A rank without data leaves out backward, and counts as zero."""
    alone, together = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(SGD(together.parameters(), lr=0.1))
    reference = SGD(alone.parameters(), lr=0.1)
    for step, batch in enumerate(joined_batches(steps=6)):
        working = step % (hvd.size() + 1)  # the last one is nobody
        optimizer.zero_grad()
        if hvd.rank() == working:
            loss_of(together, batch).backward()
        optimizer.step()
        reference.zero_grad()
        if working < hvd.size():
            (loss_of(alone, batch) / hvd.size()).backward()
        reference.step()
        assert (together[0].weight.grad is None) == (working == hvd.size())
    assert_same_weights(together, alone)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_may_skip_backward(transport):
    run(one_rank_skips, 3, transport=transport)


def thaws() -> None:
    """A layer is frozen when the optimizer is wrapped, thawed, and frozen again."""
    alone, together = make_model(), make_model()
    for model in (alone, together):
        model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(Adam(together.parameters(), lr=0.01))
    reference = Adam(alone.parameters(), lr=0.01)
    for frozen in (True, False, True, False):
        for model in (alone, together):
            model[0].requires_grad_(not frozen)
            model[2].requires_grad_(frozen)
        batches = joined_batches(steps=2)
        train(alone, reference, batches)
        train(together, optimizer, map(part, batches))
        assert (together[0].weight.grad is None) == frozen
        assert_same_weights(together, alone)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_freeze_and_unfreeze(transport):
    run(thaws, 2, transport=transport)


def plays_gan() -> None:
    """Generator and discriminator; rank 1 wraps and steps like the others, but on its own data."""

    def play(wrap, share) -> tuple[nn.Module, nn.Module]:
        generator, critic = nn.Linear(8, 8), make_model(seed=2)
        with torch.no_grad():
            generator.weight.fill_(0.1)
            generator.bias.zero_()
        tune_generator = wrap(Adam(generator.parameters(), lr=0.01))
        tune_critic = wrap(Adam(critic.parameters(), lr=0.01))
        for batch in map(share, joined_batches(steps=4)):
            tune_critic.zero_grad()
            loss_of(critic, batch).backward()
            (-loss_of(critic, generator(batch).detach())).backward()
            tune_critic.step()
            tune_generator.zero_grad()
            loss_of(critic, generator(batch)).backward()  # touches both optimizers' parameters
            tune_generator.step()
        return generator, critic

    for together, alone in zip(
        play(hvd.DistributedOptimizer, part), play(lambda o: o, lambda b: b), strict=True
    ):
        assert_same_weights(together, alone)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_gan(transport):
    run(plays_gan, 2, transport=transport)


def touches_other_optimizers() -> None:
    """In one backward pass rank 0 touches the first optimizer, rank 1 the second."""
    (a,), (b,) = weights(1), weights(1)
    first = hvd.DistributedOptimizer(SGD([a], lr=1.0))
    second = hvd.DistributedOptimizer(SGD([b], lr=1.0))
    (2 * a if hvd.rank() == 0 else 4 * b).backward()
    first.step()
    second.step()
    assert (a.item(), b.item()) == (0, -1)


def test_ranks_touch_different_optimizers():
    run(touches_other_optimizers, 2)


def shares_a_parameter() -> None:
    (x,) = weights(1)
    first = hvd.DistributedOptimizer(SGD([x], lr=1.0))
    second = hvd.DistributedOptimizer(SGD([x], lr=1.0))
    for _ in range(2):
        first.zero_grad()
        ((hvd.rank() + 1) * x).backward()
        assert x.grad.item() == 1.5
        first.step()
        second.step()
    assert x.item() == 1 - 4 * 1.5


def test_one_parameter_of_two_optimizers():
    run(shares_a_parameter, 2)


def assigns() -> None:
    """Gradients that no backward pass has put there are reduced at the step."""
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        (x.grad,) = torch.autograd.grad((hvd.rank() + 1) * x, x)
        optimizer.step()
    assert x.item() == 1 - 2 * 1.5


def test_gradients_assigned_by_hand():
    run(assigns, 2)


def writes(op: hvd.ReduceOp) -> None:
    """What is written into the gradients of the step before is reduced, and once only."""
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
    run(writes, 2, args=(op,))


def gives_other_memory(how: str) -> None:
    """`grad` may be given other memory than its place in a bucket, by the program or by torch."""
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
    run(gives_other_memory, 2, args=(how,))


def changes_dtype() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    batch = part(joined_batches(steps=1)[0])
    train(model, optimizer, [batch])
    model.double()
    with pytest.raises(ValueError, match=r"'.*' has changed its dtype from Float to Double"):
        train(model, optimizer, [batch.double()])


def test_a_changed_dtype():
    run(changes_dtype, 2)


def grows() -> None:
    """Parameters that are added later are reduced as well."""
    alone, together = make_model(), make_model()
    optimizers = []
    for model in (alone, together):
        optimizer: Optimizer = SGD(model[0].parameters(), lr=0.05)
        if model is together:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        batches = joined_batches(steps=2)
        share = part if model is together else lambda batch: batch
        train(model, optimizer, map(share, batches))
        model.zero_grad()
        optimizer.add_param_group({"params": model[2:].parameters(), "lr": 0.1})
        train(model, optimizer, map(share, batches))
        optimizers.append(optimizer)
    assert_same_weights(together, alone)
    assert list(optimizers[1]._parameter_names.values())[:3] == [
        "0.weight",
        "0.bias",
        "allreduce.noname.1.0",
    ]


def test_parameters_added_later():
    run(grows, 2)


def grows_by_hand() -> None:
    """A parameter that is not known is an error, and one that is taken out is none."""
    model, other = make_model(), nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))
    batch = part(joined_batches(steps=1)[0])
    group = optimizer.param_groups[0]
    group["params"] = group["params"][1:]
    train(model, optimizer, [batch])
    for parameters in ([*group["params"], other], [*group["params"][1:], other]):
        group["params"][:] = parameters
        group["params"] = group["params"].copy()
        with pytest.raises(ValueError, match=r"^1 parameters .* add_param_group\(\)"):
            train(model, optimizer, [batch])
    group["params"].pop()
    train(model, optimizer, [batch])


def test_parameters_added_by_hand():
    run(grows_by_hand, 2)


def checkpoints(use_reentrant: bool) -> None:
    alone, together = make_model(), make_model()
    batches = joined_batches(steps=3)
    train(alone, SGD(alone.parameters(), lr=0.1), batches)
    optimizer = hvd.DistributedOptimizer(SGD(together.parameters(), lr=0.1))

    def forward(batch: Tensor) -> Tensor:
        hidden = checkpoint(together[:2], batch.requires_grad_(), use_reentrant=use_reentrant)
        return checkpoint(together[2:], hidden, use_reentrant=use_reentrant)

    for batch in map(part, batches):
        optimizer.zero_grad()
        output = forward(batch.clone())
        (output.square().mean() + output.sum(1).mean()).backward()
        optimizer.step()
    assert_same_weights(together, alone)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_checkpointing(transport, use_reentrant):
    run(checkpoints, 2, args=(use_reentrant,), transport=transport)


def keeps_no_graph() -> None:
    (x,) = weights(3)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.0))
    for _ in range(2):
        ((hvd.rank() + 1) * x**2).backward(create_graph=True)
        assert x.grad.item() == 9
        assert not x.grad.requires_grad
        optimizer.step()
        optimizer.zero_grad()


def test_create_graph_averages_values():
    run(keeps_no_graph, 2)


class Fails(torch.autograd.Function):
    """Identity with a backward that raises."""

    @staticmethod
    def forward(_ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(_ctx, _gradient):
        raise RuntimeError("out of luck")


def recovers() -> None:
    """A backward that fails half-way spoils nothing that comes after zero_grad()."""
    alone, together = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(SGD(together.parameters(), lr=0.1))
    batches = joined_batches(steps=2)
    train(alone, SGD(alone.parameters(), lr=0.1), batches)
    for batch in map(part, batches):
        with pytest.raises(RuntimeError, match="out of luck"):
            loss_of(together[1:], Fails.apply(together[0](batch))).backward()
        train(together, optimizer, [batch])
    assert_same_weights(together, alone)


def test_a_failed_backward():
    run(recovers, 2)


def trains_after(event: str) -> None:
    """The hooks of an optimizer that is gone, or of a parent process, do nothing."""
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.0))
    (x * (hvd.rank() + 1)).backward()
    assert x.grad.item() == 1.5
    if event == "fork":
        child = os.fork()
        if child == 0:
            x.grad = None
            (8 * x).backward()
            os._exit(0 if x.grad.item() == 8 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert x.grad.item() == 1.5, "the child has not written into our bucket"
    else:
        del optimizer
        x.grad = None
        (x * (hvd.rank() + 1)).backward()
        assert x.grad.item() == hvd.rank() + 1


@pytest.mark.parametrize("event", ["fork", "del"])
def test_hooks_know_when_they_are_not_wanted(event):
    run(trains_after, 2, args=(event,))
