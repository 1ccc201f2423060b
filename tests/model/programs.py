"""Training programs: what a user would write, each with one habit. See `oracle`."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from oracle import Play, Program, loss_of
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.utils.checkpoint import checkpoint
from training import FailingBackward
from zoo import WORDS, Quantised, Reader, Segments, net

import torch_ring as hvd

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda parameters: Adam(parameters, lr=0.01),
}


def plain(
    play: Play,
    kind: str = "sgd",
    make: Callable[[], nn.Module] = net,
    set_to_none: bool = True,
) -> Program:
    """The loop of every tutorial. Gradients have the strides of their parameters."""
    model = make()
    wrapped, optimizer = play.wrap(model, OPTIMIZERS[kind](model.parameters()))
    for rows in play.batches(5):
        optimizer.zero_grad(set_to_none)
        loss_of(wrapped, rows).backward()
        optimizer.step()
        yield model.parameters()
    for parameter in model.parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            assert parameter.grad.stride() == parameter.stride()


def clipped(play: Play, how: str = "step") -> Program:
    """Clip averaged gradients, in the ways of scripts for Horovod, too."""
    model = net()
    wrapped, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.5, momentum=0.9))
    for rows in play.batches(4):
        optimizer.zero_grad()
        loss_of(wrapped, rows).backward()
        if how != "step" and not play.is_alone:
            optimizer.synchronize()
        if how == "synchronize twice" and not play.is_alone:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        skips = how == "skip_synchronize" and not play.is_alone
        with optimizer.skip_synchronize() if skips else contextlib.nullcontext():
            optimizer.step()
        yield model.parameters()


def scheduled(play: Play, attach_first: bool) -> Program:
    """A scheduler that is made before the optimizer is wrapped, or after."""
    model = net()
    optimizer: Any = SGD(model.parameters(), lr=0.2)
    if not attach_first:
        _, optimizer = play.wrap(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    if attach_first:
        assert play.wrap(model, optimizer)[1] is optimizer
    for rows in play.batches(4):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
        scheduler.step()
        yield model.parameters()
    assert abs(optimizer.param_groups[0]["lr"] - 0.002) < 1e-12


def lbfgs(play: Play, line_search: str | None) -> Program:
    """The decisions of a line search, by the loss of all ranks."""
    model = net()
    _, optimizer = play.wrap(
        model, LBFGS(model.parameters(), lr=0.2, max_iter=6, line_search_fn=line_search)
    )
    for rows in play.batches(3):

        def closure(rows: Tensor = rows) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rows)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        yield [loss, *model.parameters()]


def scaled_sparse_losses(play: Play) -> Program:
    """Loss scaling, accumulation and sparse gradients; the last step has a pass less."""
    words = nn.Embedding(8, 2, sparse=True)
    nn.init.ones_(words.weight)
    _, optimizer = play.wrap(words, SGD(words.parameters(), lr=0.5), backward_passes_per_step=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for passes in (2, 2, 1):
        optimizer.zero_grad()
        for number in range(passes):
            for rank in play.ranks:
                loss = words(torch.tensor([rank, number, 7])).square().sum() / len(play.ranks)
                scaler.scale(loss).backward()
        if not play.is_alone:
            optimizer.synchronize()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        yield words.parameters()


def sparse(play: Play, options: dict[str, Any]) -> Program:
    """Sparse gradients among dense ones; ranks read some words several times, and others' words."""
    model = Reader()
    _, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.1), **options)
    share = 1 if options.get("op") == hvd.Sum else play.size
    for step in range(4):
        for _ in range(options.get("backward_passes_per_step", 1)):
            losses = []
            for rank in play.ranks:
                words = torch.tensor([rank, rank + 1, rank, (3 * rank + step) % WORDS, step])
                output = model(words)
                losses.append(output.square().sum() + output.sum())
            (sum(losses) / (share if play.is_alone else 1)).backward()
        gradient = model.words.weight.grad
        assert gradient is not None
        assert gradient.is_sparse
        assert gradient.dtype == torch.float64
        yield [gradient]
        optimizer.step()
        optimizer.zero_grad()
        yield model.parameters()


def skipped(play: Play) -> Program:
    """Ranks without data leave out backward(), and count as zeros."""
    model = net()
    _, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.1))
    for step, rows in enumerate(play.batches(2 * (play.size + 1))):
        working = step % (play.size + 1)  # one more than there are ranks: then all skip
        optimizer.zero_grad()
        if working in play.ranks:
            scale = 1 / play.size if play.is_alone else 1
            its = rows[working :: play.size] if play.is_alone else rows
            (scale * loss_of(model, its)).backward()
        optimizer.step()
        yield [*model.parameters(), model[0].weight.grad]


def frozen_and_thawed(play: Play) -> Program:
    """A layer is frozen when the optimizer is wrapped, thawed, and frozen again."""
    model = net()
    model[0].requires_grad_(False)
    _, optimizer = play.wrap(model, Adam(model.parameters(), lr=0.01))
    for step, rows in enumerate(play.batches(8)):
        frozen = step // 2 % 2 == 0
        model[0].requires_grad_(not frozen)
        model[2].requires_grad_(frozen)
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
        yield [*model.parameters(), model[0].weight.grad]


def quantised(play: Play, groups: str | int | None = None) -> Program:
    """Frozen parameters whose dtype has no gradients."""
    model = Quantised()
    options: dict[str, Any] = {}
    if groups is not None:
        options["groups"] = [list(model.parameters())] if groups == "all" else groups
    _, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.01, momentum=0.9), **options)
    for rows in play.batches(3):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
        yield [*model.top.parameters(), model.quantised]


def checkpointed(play: Play, use_reentrant: bool) -> Program:
    """All layers in two segments of torch.utils.checkpoint."""
    model = net()
    _, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.1))

    def forward(rows: Tensor) -> Tensor:
        if play.is_alone:
            return model(rows)
        hidden = checkpoint(model[:2], rows.clone().requires_grad_(), use_reentrant=use_reentrant)
        return checkpoint(model[2:], hidden, use_reentrant=use_reentrant)

    for rows in play.batches(3):
        optimizer.zero_grad()
        output = forward(rows)
        (output.square().mean() + output.sum(1).mean()).backward()
        optimizer.step()
        yield model.parameters()


def in_segments(play: Play, passes: int, nested_twice: bool, split: bool) -> Program:
    """A layer in two reentrant segments, each maybe in another one; one optimizer, or two."""
    model = Segments(again=False)
    parameters = list(model.parameters())
    halves = [parameters[:3], parameters[3:]] if split else [parameters]
    optimizers = [
        play.wrap(model, SGD(half, lr=0.1), backward_passes_per_step=passes)[1] for half in halves
    ]
    batches = play.batches(4 * passes)
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(passes):
            rows = next(batches).requires_grad_()
            if nested_twice and not play.is_alone:
                output = checkpoint(model, rows, True, use_reentrant=True)
            else:
                output = model(rows, segments=not play.is_alone)
            output.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        yield model.parameters()


def in_segments_and_outside(play: Play, how: str, op: hvd.ReduceOp, passes: int) -> Program:
    """A layer in reentrant segments, and behind them outside; on some ranks only, or later."""
    model = Segments(again=True)
    parameters = list(model.parameters())
    _, optimizer = play.wrap(model, SGD(parameters, lr=0.1), op=op, backward_passes_per_step=passes)
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    batches = play.batches(5 * passes)
    for step in range(5):
        if how == "in the program's memory":
            lay_gradients(flat.zero_(), parameters)
        else:
            optimizer.zero_grad(set_to_none=how != "on zeros")
        rank = play.ranks[0]
        segments = {
            "late": step >= 3,
            "on one rank": rank == 0,
            "in turns": step % play.size == rank,
        }.get(how, True)
        for _ in range(passes):
            rows = next(batches).requires_grad_()
            output = model(rows, segments and not play.is_alone)
            (output.square().mean() * play.share(op)).backward()
        yield [p.grad for p in parameters]
        if how == "in the program's memory":
            yield [flat]
        optimizer.step()
        yield parameters


def lay_gradients(flat: Tensor, parameters: Iterable[nn.Parameter]) -> None:
    """Make parts of a tensor the gradients of parameters."""
    parameters = list(parameters)
    for parameter, its in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = its.view_as(parameter)


def recovered(play: Play) -> Program:
    """Before each pass another one fails half-way; zero_grad() is enough to go on."""
    model = net()
    _, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.1))
    for rows in play.batches(2):
        if not play.is_alone:
            with pytest.raises(RuntimeError, match="out of luck"):
                loss_of(model[1:], FailingBackward.apply(model[0](rows))).backward()
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
        yield model.parameters()


def there_and_back(model: nn.Module) -> None:
    model.float().double()


def by_data(model: nn.Module) -> None:
    """Convert each parameter by its `data`, and not by its module."""
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
        parameter.data = parameter.data.double()


def converted(play: Play, convert: Callable[[nn.Module], None], op: hvd.ReduceOp) -> Program:
    """Another dtype and back after wrapping; gradients of two passes add up over that."""
    model = net()
    _, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.02), op=op)
    for step, rows in enumerate(play.batches(6)):
        if step % 2 == 0:
            convert(model)
        (play.share(op) * loss_of(model, rows)).backward()
        yield [p.grad for p in model.parameters()]
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            yield model.parameters()


def accumulated(play: Play, how: str) -> Program:
    """Step with the gradients of three passes, then with those of only two."""
    model = net()
    options = {"backward_passes_per_step": 3} if how == "passes" else {}
    _, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.05), **options)
    batches = play.batches(8)
    for count in (3, 2, 3):
        for number in range(count):
            is_last = number == count - 1
            keeps = how == "no_sync" and not is_last and not play.is_alone
            with optimizer.no_sync() if keeps else contextlib.nullcontext():
                loss_of(model, next(batches)).backward()
        if how == "synchronize":
            if not play.is_alone:
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        yield model.parameters()


def adversaries(play: Play) -> Program:
    """Generator and discriminator: a pass touches the parameters of both optimizers."""
    generator, critic = nn.Linear(8, 8, dtype=torch.float64), net(seed=2)
    nn.init.constant_(generator.weight, 0.1)
    nn.init.zeros_(generator.bias)
    _, tune_generator = play.wrap(generator, Adam(generator.parameters(), lr=0.01))
    _, tune_critic = play.wrap(critic, Adam(critic.parameters(), lr=0.01))
    for rows in play.batches(4):
        tune_critic.zero_grad()
        loss_of(critic, rows).backward()
        (-loss_of(critic, generator(rows).detach())).backward()
        tune_critic.step()
        tune_generator.zero_grad()
        loss_of(critic, generator(rows)).backward()
        tune_generator.step()
        yield [*generator.parameters(), *critic.parameters()]


def compiled(play: Play) -> Program:
    """torch.compile."""
    model = net()
    _, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.05))
    forward = model if play.is_alone else torch.compile(model, backend="aot_eager")
    for rows in play.batches(3):
        optimizer.zero_grad()
        loss_of(forward, rows).backward()
        optimizer.step()
        yield model.parameters()


def added_later(play: Play) -> Program:
    """Parameters that are added to a wrapped optimizer."""
    model = net()
    optimizer: Any = SGD(model[0].parameters(), lr=0.05)
    _, optimizer = play.wrap(model, optimizer)
    for step, rows in enumerate(play.batches(4)):
        if step == 2:
            model.zero_grad()
            optimizer.add_param_group({"params": model[2:].parameters(), "lr": 0.1})
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
        yield model.parameters()


def on_other_memory(play: Play, how: str) -> Program:
    """The program or torch gives gradients other memory than their views of a bucket."""
    model = net()
    _, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.1))
    for rows in play.batches(3):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
        yield model.parameters()
        if how == "share_memory":
            model.share_memory()
            continue
        if how == "data before zero_grad":
            optimizer.zero_grad(set_to_none=False)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data.clone()


def on_given_memory(play: Play, how: str) -> Program:
    """The memory of gradients is given in each step: by assignment, by `data`, or full."""
    model = net()
    parameters = list(model.parameters())
    _, optimizer = play.wrap(model, SGD(parameters, lr=0.1, momentum=0.9))
    for rows in play.batches(6):
        optimizer.zero_grad(set_to_none=how != "data")
        given = [torch.zeros_like(parameter) for parameter in parameters]
        if how == "by hand":
            given = list(torch.autograd.grad(loss_of(model, rows), parameters))
        for parameter, gradient in zip(parameters, given, strict=True):
            if how == "data" and parameter.grad is not None:
                parameter.grad.data = gradient
            else:
                parameter.grad = gradient
        if how != "by hand":
            loss_of(model, rows).backward()
        optimizer.step()
        for parameter, gradient in zip(parameters, given, strict=True):
            assert parameter.grad is not None
            assert parameter.grad.data_ptr() == gradient.data_ptr()
        yield given
        yield parameters


Lay = Callable[[Tensor, nn.Parameter], Tensor]


def in_a_row(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    return flat[: parameter.numel()].view_as(parameter)


def transposed(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    return in_a_row(flat, parameter).reshape(parameter.shape[::-1]).t()


def with_holes(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    return flat[: 2 * parameter.numel() : 2].view(parameter.shape)


def in_numpys_memory(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    return torch.from_numpy(in_a_row(flat, parameter).numpy())


def flat(play: Play, lay: Lay, op: hvd.ReduceOp, passes: int) -> Program:
    """A step of the program's own reads one tensor, in which all gradients lie.

    Args:
        passes: of a step; 0: two, the first under no_sync().
    """
    model = net()
    parameters = list(model.parameters())
    _, optimizer = play.wrap(
        model, SGD(parameters, lr=0.0), op=op, backward_passes_per_step=max(passes, 1)
    )
    count = 2 * sum(p.numel() for p in parameters)
    gradients = torch.zeros(count, dtype=torch.float64, device=parameters[0].device)
    given, begin = [], 0
    for parameter in parameters:
        given.append(lay(gradients[begin:], parameter))
        parameter.grad = given[-1]
        begin += 2 * parameter.numel()
    for rows in play.batches(6):
        gradients.zero_()
        for scale in (1.0, 0.5) if passes != 1 else (1.0,):
            keeps = passes == 0 and scale == 1.0 and not play.is_alone
            with optimizer.no_sync() if keeps else contextlib.nullcontext():
                (play.share(op) * scale * loss_of(model, rows)).backward()
        assert all(p.grad is its for p, its in zip(parameters, given, strict=True))
        yield [gradients]
        optimizer.step()
        with torch.no_grad():
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter -= 0.1 * gradient
        yield parameters


class Lookahead(Optimizer):
    """As the one of lookahead.pytorch: it shares the groups, and moves the weights by `.data`."""

    def __init__(self, optimizer: Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups, self.state = optimizer.param_groups, defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                for fast in group["params"]:
                    slow: Tensor = self.state[fast].setdefault("slow", fast.data.clone())
                    slow += (fast.data - slow) * self.alpha
                    fast.data.copy_(slow)
            group["counter"] = (group["counter"] + 1) % self.k
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def looking_ahead(play: Play, kind: str, set_to_none: bool) -> Program:
    """Lookahead around a wrapped optimizer; two passes a step."""
    model = net()
    inner = play.wrap(model, OPTIMIZERS[kind](model.parameters()), backward_passes_per_step=2)[1]
    optimizer = Lookahead(inner)
    batches = play.batches(14)
    for _ in range(7):
        optimizer.zero_grad(set_to_none)
        for _ in range(2):
            loss_of(model, next(batches)).backward()
        optimizer.step()
        yield model.parameters()
