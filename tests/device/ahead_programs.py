"""Training programs that reach planned passes, called as ``program(device, run_ahead)``.

Each takes more steps than a plan needs, leaves the plan in its own way, and returns weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import torch_ring as hvd
from torch_ring.optimizer.planned_pass import PlannedPasses

FEATURES = 5
Program = Callable[[str, bool | None], list[Tensor]]


@contextlib.contextmanager
def planned_passes() -> Iterator[list[int]]:
    """Yield the numbers of the planned passes that this rank runs in the block."""
    numbers: list[int] = []
    run = PlannedPasses._run

    def counted(self: PlannedPasses, number: int, *arguments: object) -> object:
        numbers.append(number)
        return run(self, number, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannedPasses, "_run", counted)
        yield numbers


class Branches(nn.Module):
    """A trunk and branches; a pass uses the given branches."""

    def __init__(self, device: str, count: int = 3, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk = nn.Linear(FEATURES, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 3) for _ in range(count))
        self.to(device)

    def forward(self, batch: Tensor, used: Iterable[int] = (0,)) -> Tensor:
        hidden = torch.tanh(self.trunk(batch))
        return sum(self.branches[index](hidden).square().mean() for index in used)


def batch_of(step: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(100 * hvd.rank() + step)
    return torch.randn(4, FEATURES, generator=generator).to(device)


def wrapped(model: nn.Module, run_ahead: bool | None, **options: object) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), run_ahead=run_ahead, **options
    )


def weights_of(*models: nn.Module) -> list[Tensor]:
    return [weight.detach().cpu() for model in models for weight in model.parameters()]


def branch_out(
    device: str,
    run_ahead: bool | None,
    used: Callable[[int], Iterable[int] | None],
    *,
    steps: int = 14,
    set_to_none: bool = True,
    **options: object,
) -> list[Tensor]:
    """Train with the branches of `used(step)` on this rank; None: it has no data."""
    model = Branches(device)
    optimizer = wrapped(model, run_ahead, **options)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        here = used(step)
        if here is not None:
            model(batch_of(step, device), here).backward()
        optimizer.step()
    return weights_of(model)


def same_branches(device: str, run_ahead: bool | None) -> list[Tensor]:
    return branch_out(device, run_ahead, lambda _: (0, 1, 2))


def unused_branch(device: str, run_ahead: bool | None) -> list[Tensor]:
    """Momentum and decay would move weights that had zeros for gradients."""
    return branch_out(device, run_ahead, lambda _: (0, 2))


def branch_of_some_ranks(device: str, run_ahead: bool | None) -> list[Tensor]:
    """Each rank has a branch of its own, in every pass."""
    return branch_out(device, run_ahead, lambda _: (hvd.rank() % 3,))


def missing_branch(device: str, run_ahead: bool | None) -> list[Tensor]:
    """In some passes no rank uses branch 1, in others only rank 0 does."""

    def used(step: int) -> tuple[int, ...]:
        gone = step in (6, 8) or (step == 9 and hvd.rank() > 0)
        return (0,) if gone else (0, 1)

    return branch_out(device, run_ahead, used)


def missing_branch_zeroed(device: str, run_ahead: bool | None) -> list[Tensor]:
    return branch_out(
        device,
        run_ahead,
        lambda step: (0,) if step in (6, 7) else (0, 1),
        set_to_none=False,
        op=hvd.Sum,
    )


def missing_branch_accumulated(device: str, run_ahead: bool | None) -> list[Tensor]:
    """Reduced gradients of several passes add up; where a branch is not used, they stay."""
    model = Branches(device)
    optimizer = wrapped(model, run_ahead)
    for step in range(6):
        optimizer.zero_grad()
        for part in range(3):
            model(batch_of(3 * step + part, device), (0,) if part else (0, 1)).backward()
        optimizer.step()
    return weights_of(model)


def branch_of_all_ranks(device: str, run_ahead: bool | None) -> list[Tensor]:
    """All ranks switch to another branch in the same pass, and keep it."""
    return branch_out(device, run_ahead, lambda step: (0, 1) if step >= 7 else (0,), steps=20)


def frozen(device: str, run_ahead: bool | None) -> list[Tensor]:
    """A layer is frozen, and unfrozen later."""
    model = Branches(device)
    optimizer = wrapped(model, run_ahead)
    for step in range(30):
        model.branches[1].requires_grad_(not 6 <= step < 16)
        optimizer.zero_grad()
        model(batch_of(step, device), (0, 1)).backward()
        optimizer.step()
    return weights_of(model)


def no_data(device: str, run_ahead: bool | None) -> list[Tensor]:
    """The ranks take turns without data; in one pass no rank has data."""

    def used(step: int) -> tuple[int, ...] | None:
        return None if step % 4 == hvd.rank() or step == 11 else (0, 1)

    return branch_out(device, run_ahead, used, steps=16)


def accumulated(device: str, run_ahead: bool | None) -> list[Tensor]:
    """Two passes a step; the last rank sometimes has data for only one, and calls synchronize()."""
    model = Branches(device)
    optimizer = wrapped(model, run_ahead, backward_passes_per_step=2)
    for step in range(12):
        optimizer.zero_grad()
        is_short = step % 5 == 4 and hvd.rank() == hvd.size() - 1
        for part in range(1 if is_short else 2):
            model(batch_of(2 * step + part, device), (0, 1)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
    return weights_of(model)


def under_no_sync(device: str, run_ahead: bool | None) -> list[Tensor]:
    model = Branches(device)
    optimizer = wrapped(model, run_ahead)
    for step in range(8):
        optimizer.zero_grad()
        with optimizer.no_sync():
            model(batch_of(2 * step, device), (0, 1)).backward()
        model(batch_of(2 * step + 1, device), (0,)).backward()
        optimizer.step()
    return weights_of(model)


def clipped(device: str, run_ahead: bool | None) -> list[Tensor]:
    model = Branches(device)
    optimizer = wrapped(model, run_ahead)
    for step in range(8):
        optimizer.zero_grad()
        model(batch_of(step, device)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return weights_of(model)


def scaled(device: str, run_ahead: bool | None) -> list[Tensor]:
    """One rank's loss overflows: all skip that step."""
    model = Branches(device)
    optimizer = wrapped(model, run_ahead)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for step in range(10):
        optimizer.zero_grad()
        loss = model(batch_of(step, device))
        overflows = step == 6 and hvd.rank() == hvd.size() - 1
        scaler.scale(loss * torch.inf if overflows else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    return weights_of(model)


def two_networks(device: str, run_ahead: bool | None) -> list[Tensor]:
    """A GAN: two steps of one network for one of the other, whose passes reach both."""
    maker, judge = nn.Linear(2, FEATURES).to(device), Branches(device, 1)
    with torch.no_grad():
        for index, weight in enumerate(maker.parameters()):
            weight.fill_(0.1 * (index + 1))
    of_maker, of_judge = (wrapped(model, run_ahead) for model in (maker, judge))
    for step in range(24):
        noise = batch_of(step, device)[:, :2]
        of_judge.zero_grad()
        if step % 3 < 2:
            judge(maker(noise).detach()).backward()
            of_judge.step()
        else:
            of_maker.zero_grad()
            judge(maker(noise)).neg().backward()
            of_maker.step()
    return weights_of(maker, judge)


def summed(device: str, run_ahead: bool | None) -> list[Tensor]:
    return branch_out(device, run_ahead, lambda _: (0, 1), op=hvd.Sum)


def predivided(device: str, run_ahead: bool | None) -> list[Tensor]:
    return branch_out(device, run_ahead, lambda _: (0, 1), gradient_predivide_factor=2.0)


def cast(device: str, run_ahead: bool | None) -> list[Tensor]:
    return branch_out(device, run_ahead, lambda _: (0, 2), compression=hvd.Compression.fp16)


def kept(device: str, run_ahead: bool | None) -> list[Tensor]:
    """The program keeps gradients over zero_grad(); they keep their values."""
    model = Branches(device)
    optimizer = wrapped(model, run_ahead)
    before: list[Tensor] = []
    copies: list[Tensor] = []
    for step in range(9):
        optimizer.zero_grad()
        model(batch_of(step, device), (0, 1)).backward()
        assert all(map(torch.equal, before, copies))
        before = [w.grad for w in model.parameters() if w.grad is not None]
        copies = [gradient.clone() for gradient in before]
        optimizer.step()
    return weights_of(model)


PROGRAMS: list[Program] = [
    same_branches,
    unused_branch,
    branch_of_some_ranks,
    missing_branch,
    missing_branch_zeroed,
    missing_branch_accumulated,
    branch_of_all_ranks,
    frozen,
    no_data,
    accumulated,
    under_no_sync,
    clipped,
    scaled,
    two_networks,
    summed,
    predivided,
    cast,
    kept,
]
