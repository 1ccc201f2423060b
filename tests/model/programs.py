# SPDX-License-Identifier: Apache-2.0
"""Training programs: what a user would write, each with one habit. See `oracle`."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from oracle import Play, Program, loss_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.utils.checkpoint import checkpoint
from zoo import WORDS, Quantised, Reader, Segments, Towers, linear, net

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
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the scheduler's: it has missed a step
            scheduler.step()
        yield model.parameters()
    assert abs(optimizer.param_groups[0]["lr"] - 0.002) < 1e-12


BY_CLOSURES: dict[str, Callable[..., Optimizer]] = {
    "momentum": OPTIMIZERS["momentum"],
    "lbfgs with a search": lambda parameters: LBFGS(
        parameters, lr=0.2, max_iter=6, line_search_fn="strong_wolfe"
    ),
}


def by_closures(play: Play, kind: str) -> Program:
    """Steps that compute the loss, and return that of all ranks: by it, a line search decides."""
    model = net()
    _, optimizer = play.wrap(model, BY_CLOSURES[kind](model.parameters()))
    for rows in play.batches(3):

        def closure(rows: Tensor = rows) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rows)
            loss.backward()
            return loss

        yield [optimizer.step(closure=closure), *model.parameters()]


def overflowing(play: Play, fused: bool) -> Program:
    """A loss scaler skips the step in which gradients of one rank are infinite."""
    model = net()
    _, optimizer = play.wrap(model, Adam(model.parameters(), lr=0.01, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    for number, rows in enumerate(play.batches(5)):
        optimizer.zero_grad()
        factor = torch.inf if number == 2 and play.size - 1 in play.ranks else 1.0
        scaler.scale(loss_of(model, rows) * factor).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        yield model.parameters()
    assert scaler.get_scale() == 2.0**19


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


def run_out(play: Play, first: int, options: dict[str, Any]) -> Program:
    """Ranks run out of batches one after the other, and call join(); then all have some again."""
    model = net()
    shuffled = list(model.parameters())[::-1]  # so that the order of readiness is unexpected
    _, optimizer = play.wrap(model, SGD(shuffled, lr=0.1, momentum=0.9), **options)
    for epoch in range(3):
        # In the first epoch the order of readiness is unknown; rank 0 may have joined already.
        counts = [(rank - first) % play.size + (epoch == 2) for rank in range(play.size)]
        for step, rows in enumerate(play.batches(max(counts))):
            active = [rank for rank in play.ranks if step < counts[rank]]
            if not active:
                break
            optimizer.zero_grad()
            for rank in active:
                its = rows[rank :: play.size] if play.is_alone else rows
                scale = 1 / play.size if play.is_alone else 1
                (scale * loss_of(model, its)).backward()
            optimizer.step()
        if not play.is_alone:
            last = hvd.join()
            assert counts[last] == max(counts)
            # A joined rank has not stepped, so it needs the weights of one that has.
            hvd.broadcast_parameters(model.state_dict(), last)
            hvd.broadcast_optimizer_state(optimizer, last)
        yield model.parameters()


def set_by_hand(
    play: Play,
    assign: Callable[[nn.Parameter, float], None],
    first: bool,
    setting: tuple[int, ...],
    zero: str,
    options: dict[str, Any],
) -> Program:
    """Autograd computes one gradient of an optimizer, and the program another, on some ranks."""
    model = nn.ParameterList([torch.full((3,), each).double() for each in (1.0, 2.0, 3.0, 4.0)])
    computed, by_hand, unused, frozen = model
    frozen.requires_grad_(False)
    _, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.25), **options)
    share = (1 / play.size if play.is_alone else 1) * play.share(options.get("op", hvd.Average))
    for step in range(3):
        if zero == "never":
            computed.grad = None
        else:
            optimizer.zero_grad(set_to_none=zero == "to none")
        if by_hand.grad is None and assign not in (assigned, added):
            by_hand.grad = torch.zeros_like(by_hand)
        value = share * sum(1.0 + rank + step for rank in play.ranks if rank in setting)
        if first and value:
            assign(by_hand, value)
        (share * computed * sum(rank + 1 for rank in play.ranks)).sum().backward()
        if not first and value:
            assign(by_hand, value)
        optimizer.step()
        yield model
        assert unused.grad is None or not unused.grad.any()


def assigned(parameter: nn.Parameter, value: float) -> None:
    parameter.grad = torch.full_like(parameter, value)


def added(parameter: nn.Parameter, value: float) -> None:
    gradient = torch.full_like(parameter, value)
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def filled(parameter: nn.Parameter, value: float) -> None:
    assert parameter.grad is not None
    parameter.grad.fill_(value)


def filled_by_data(parameter: nn.Parameter, value: float) -> None:
    assert parameter.grad is not None
    parameter.grad.data.fill_(value)


def filled_by_numpy(parameter: nn.Parameter, value: float) -> None:
    assert parameter.grad is not None
    parameter.grad.numpy()[:] = value


def penalised(play: Play) -> Program:
    """A penalty made of gradients, which ranks average first."""
    model = net()
    _, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.1))
    for rows in play.batches(3):
        optimizer.zero_grad()
        rows.requires_grad_()
        loss = loss_of(model, rows)
        (of_rows,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
        gradients: Any = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        if not play.is_alone:
            gradients = hvd.grouped_allreduce(gradients)
        penalty = of_rows.square().sum(1).mean() + sum(each.square().sum() for each in gradients)
        (loss + penalty).backward()
        optimizer.step()
        yield model.parameters()


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


def contrastive(play: Play) -> Program:
    """Each rank compares its own rows with the features of all rows, which the ranks gather."""
    model = Towers()
    _, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.5))
    for rows in play.batches(5):
        optimizer.zero_grad()
        own = features = model(rows)
        if not play.is_alone:
            features = hvd.grouped_allgather(own, grad_op=hvd.Sum)
        first = play.ranks[0] * len(rows)
        scale, labels = model.scale.exp(), torch.arange(first, first + len(rows))
        images = cross_entropy(scale * own[0] @ features[1].T, labels)
        texts = cross_entropy(scale * own[1] @ features[0].T, labels)
        (images + texts).backward()
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


def actor_and_critic(
    play: Play, op: hvd.ReduceOp, passes: int, synchronised: int, zero: str
) -> Program:
    """Two optimizers have a trunk, and both step it."""
    trunk, actor, critic = net(), linear(3, 4), linear(3, 1)
    model = nn.ModuleList([trunk, actor, critic])
    optimizers = [
        play.wrap(
            model,
            SGD([*own.parameters(), *trunk.parameters()], lr=0.05),
            op=op,
            backward_passes_per_step=synchronised,
        )[1]
        for own in (actor, critic)
    ]
    batches = play.batches(4 * passes)
    for _ in range(4):
        if zero == "by the model":
            model.zero_grad()
        else:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=zero == "to none")
        for _ in range(passes):
            hidden = trunk(next(batches))
            loss = loss_of(actor, hidden) + loss_of(critic, hidden)
            (play.share(op) * loss).backward()
        if passes >= synchronised:
            yield [p.grad for p in model.parameters()]
        for optimizer in optimizers:
            optimizer.step()
            yield [p.grad for p in trunk.parameters()]
        yield model.parameters()


def wrapped_twice(play: Play, op: hvd.ReduceOp, stepping: int, passes: int) -> Program:
    """One of two optimizers of the same parameters steps; the other one goes after two steps."""
    model = net()
    others = [
        play.wrap(model, SGD(model.parameters(), lr=0.05), op=op, backward_passes_per_step=passes)[
            1
        ]
        for _ in range(2)
    ]
    optimizer = others.pop(stepping)
    batches = play.batches(8)
    for step in range(4):
        if step == 2:
            others.clear()
            gc.collect()
        optimizer.zero_grad()
        for _ in range(2):
            (play.share(op) * loss_of(model, next(batches))).backward()
        optimizer.step()
        yield model.parameters()


def compiled(play: Play, backend: str = "aot_eager") -> Program:
    """torch.compile."""
    model = net()
    _, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.05))
    forward = model if play.is_alone else torch.compile(model, backend=backend)
    for rows in play.batches(3):
        optimizer.zero_grad()
        loss_of(forward, rows).backward()
        optimizer.step()
        yield model.parameters()


def added_later(play: Play, by_closures: bool) -> Program:
    """Parameters that are added to a wrapped optimizer, also in the midst of a step."""
    model = net()
    optimizer: Any = SGD(model[0].parameters(), lr=0.05)
    _, optimizer = play.wrap(model, optimizer)
    for step, rows in enumerate(play.batches(4)):

        def closure(step: int = step, rows: Tensor = rows) -> Tensor:
            if step == 2:
                model.zero_grad()
                optimizer.add_param_group({"params": model[2:].parameters(), "lr": 0.1})
            optimizer.zero_grad()
            loss = loss_of(model, rows)
            loss.backward()
            return loss

        if by_closures:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        yield model.parameters()


def on_other_memory(play: Play, how: str) -> Program:
    """The program or torch gives gradients other memory than their views of a bucket."""
    model = net()
    _, optimizer = play.wrap(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    for rows in play.batches(3):
        optimizer.zero_grad()
        if how == "by a hook":
            model[0].weight.register_hook(lambda gradient: gradient * 1.0)
        elif how == "in the pass":
            _move_at_the_end(model[0].weight)
        if how in ("between passes", "by halves"):
            (0.5 * loss_of(model, rows)).backward()
            first = model[0].weight.grad
            assert first is not None
            model[0].weight.grad = None if how == "by halves" else first.clone()
            (0.5 * loss_of(model, rows)).backward()
            if how == "by halves":
                assert model[0].weight.grad is not None
                model[0].weight.grad = model[0].weight.grad + first
                if not play.is_alone:
                    optimizer.synchronize()
        else:
            loss_of(model, rows).backward()
        optimizer.step()
        yield model.parameters()
        if how == "share_memory":  # torch moves storages, with all tensors in them
            model.share_memory()
            for state in optimizer.state.values():
                state["momentum_buffer"].share_memory_()
        if not how.startswith("data"):
            continue
        if how == "data before zero_grad":
            optimizer.zero_grad(set_to_none=False)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data.clone()


def _move_at_the_end(parameter: nn.Parameter) -> None:
    """Give a gradient other memory at the end of the pass, before it is reduced."""

    def move() -> None:
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.clone()

    def queue(_: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(move)
        handle.remove()

    handle = parameter.register_hook(queue)


def on_given_memory(play: Play, how: str) -> Program:
    """The memory of gradients is given in each step, by assignment or by `data`."""
    model = net()
    parameters = list(model.parameters())
    _, optimizer = play.wrap(model, SGD(parameters, lr=0.1, momentum=0.9))
    for rows in play.batches(6):
        optimizer.zero_grad(set_to_none=how != "data")
        given = [torch.zeros_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, given, strict=True):
            if how == "data" and parameter.grad is not None:
                parameter.grad.data = gradient
            else:
                parameter.grad = gradient
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


LAYS = (in_a_row, transposed, with_holes, in_numpys_memory)


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
