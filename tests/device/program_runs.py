# SPDX-License-Identifier: Apache-2.0
"""Plays programs of `random_programs` on ranks, and alone as in tests/model; compares weights."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from ahead_training import planned_passes
from device_operations import busy
from oracle import Play
from random_programs import Program, Step, Uses
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from training import FailingBackward

import torch_ring as hvd

LR = 2.0**-4
LATER_S = 0.02  # delay of a late rank

Weights = list[Tensor]


def run_programs(
    device: str, programs: Sequence[Callable[[int], Program]], run_ahead: bool
) -> tuple[int, list[str]]:
    """Run programs, and compare the weights after each step with those of one process.

    Args:
        programs: functions that make each program from the number of ranks.
        run_ahead: the argument of DistributedOptimizer.

    Returns:
        The number of planned passes, and the names of programs that were refused.
    """
    refused = []
    with planned_passes() as planned:
        for make in programs:
            program = make(hvd.size())
            hvd.join()  # hosts forget that earlier programs did not repeat themselves
            try:
                is_refused = _check(program, device, run_ahead)
            except Exception as error:
                raise AssertionError(f"program {program.name}: {error}") from error
            refused += [program.name] if is_refused else []
            gc.collect()
    return len(planned), refused


def _check(program: Program, device: str, run_ahead: bool) -> bool:
    """Compare the weights after each step, up to one that is refused; return whether one is."""

    def wrap(model: nn.Module, optimizer: Optimizer, **options: Any) -> tuple[nn.Module, Any]:
        options["run_ahead"] = run_ahead
        return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)

    alone = Play(None, program.size, wrap)
    wanted = list(_Player(alone, program, "cpu").play())
    found: list[Weights | None] = []
    error = ""
    try:
        for weights in _Player(Play(hvd.rank(), hvd.size(), wrap), program, device).play():
            found.append(weights)
        hvd.barrier()  # the ranks that are ahead hear of a refusal here at the latest
    except hvd.RingError as refusal:
        error = str(refusal)
    found = [each and [weight.cpu() for weight in each] for each in found]
    if error:
        hvd.shutdown()
        hvd.init()
    errors, counts = zip(*hvd.allgather_object((error, len(found))), strict=True)
    assert all(errors) or not any(errors), f"ranks differ in the refusal: {errors}"
    right = min(counts)  # other ranks have run ahead of the rank that was refused
    for text in errors if error else ():
        _require_reason(text, program.steps[right])
    assert error or right == len(wanted)
    for number, (mine, theirs) in enumerate(zip(found[:right], wanted, strict=False)):
        for index, (one, other) in enumerate(zip(mine or (), theirs or (), strict=False)):
            is_close = torch.allclose(one, other, rtol=1e-6, atol=1e-6)
            assert is_close, f"weight {index} after step {number} is {one}, not {other}"
    of_all = hvd.allgather_object(found[:right])
    for mine, theirs in zip(of_all[0], of_all[hvd.rank()], strict=True):
        for one, other in zip(mine or (), theirs or (), strict=False):
            assert torch.equal(one, other), "other bits on another rank"
    return bool(error)


def _require_reason(text: str, step: Step) -> None:
    """Fail if the program has not done what an error says."""
    assert "run_ahead=False" in text, text
    said = re.search(
        r"rank (\d) has (a gradient of|added the gradient of) 'weight\.(\d+)'.* "
        r"which rank (\d) does not have",
        text,
    )
    assert said is not None, text
    has, what, index, lacks = int(said[1]), said[2], int(said[3]), int(said[4])
    assert any(index in (uses[has] or ()) for uses in step.passes), text
    if what == "a gradient of":
        assert not any(index in (uses[lacks] or ()) for uses in step.passes), text


@functools.cache
def _pattern(shape: tuple[int, ...], index: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a parameter for a factor of 1; neighbouring elements differ."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + index) % 5 - 2).reshape(shape).to(dtype)


class _Player:
    """Plays a program at one place. It makes the host wait only where a user would."""

    def __init__(self, place: Play, program: Program, device: str) -> None:
        self.place, self.program, self.device = place, program, device
        dtypes = [torch.float64 if i % 3 == 1 else torch.float32 for i in range(8)]
        self.patterns = [
            _pattern(shape, index, dtypes[index]).to(device)
            for index, shape in enumerate(program.shapes)
        ]
        self.model = nn.Module()
        self.model.weight = nn.ParameterList(torch.zeros_like(each) for each in self.patterns)
        self.weights = list(self.model.weight)
        self.optimizers = []
        for owner in range(max(program.owners) + 1):
            pairs = zip(self.weights, program.owners, strict=True)
            mine = [weight for weight, its_owner in pairs if its_owner == owner]
            sgd = SGD(mine, lr=LR, momentum=program.momentum)
            self.optimizers.append(place.wrap(self.model, sgd, **program.options)[1])
        # It changes its scale often.
        self.scaler = torch.amp.GradScaler(
            device, init_scale=4.0, growth_interval=3, enabled=program.scales
        )
        self.share = 1 / place.size if place.is_alone else 1.0
        if program.options.get("op") == hvd.Sum:
            self.share = 1.0
        self.zero = torch.zeros((), device=device)
        self.kept: list[tuple[Tensor, Tensor]] = []  # gradients of steps, and copies of them

    def play(self) -> Iterator[Weights | None]:
        """Yield the weights after each step, on the device; None on a rank that has joined."""
        steps = self.program.steps
        for number, step in enumerate(steps):
            is_here = any(rank not in step.absent for rank in self.place.ranks)
            if is_here:
                self._take(number, step)
                following = steps[number + 1].clears if number + 1 < len(steps) else True
                if self.program.keeps and following in (True, "by hand"):
                    grads = [p.grad for p in self.weights if p.grad is not None]
                    self.kept += [(grad, grad.clone()) for grad in grads]
            yield [p.detach().clone() for p in self.weights] if is_here else None
            if step.joins and not self.place.is_alone:
                last = hvd.join()
                hvd.broadcast_parameters(self.model.state_dict(), last)
        for gradient, copy in self.kept:  # with NaN where a loss was infinite
            exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
            torch.testing.assert_close(gradient, copy, **exactly, msg="a kept gradient has changed")

    def _take(self, number: int, step: Step) -> None:
        self._clear(step)
        calls = () if self.place.is_alone else step.calls
        if step.failing in self.place.ranks and not self.place.is_alone:
            with pytest.raises(RuntimeError, match="out of luck"):
                FailingBackward.apply(self._loss(step.passes[0][step.failing])).backward()
            self._clear(step)
        pending = [self._call(call, number) for call in calls]
        if step.late in self.place.ranks and not self.place.is_alone:
            time.sleep(LATER_S)
            busy(self.device, int(1000 * LATER_S))
        for place, uses in enumerate(step.passes):
            self._backward(uses, step, place)
        if "late host" in calls and hvd.rank() % 2:
            pending.append(self._sum_of_ones("cpu", number))
        self._step(step)
        for handle in pending:
            assert handle is None or handle.wait().tolist() == [float(hvd.size())] * 3

    def _clear(self, step: Step) -> None:
        if step.clears == "by hand":
            for parameter in self.weights:
                parameter.grad = None
        elif step.clears is not None:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=step.clears)

    def _loss(self, uses: Uses) -> Tensor:
        loss = self.zero
        for index, factor in uses.items():
            loss = loss + (self.patterns[index] * factor * self.weights[index]).sum().float()
        return loss

    def _backward(self, of_ranks: Sequence[Uses | None], step: Step, place: int) -> None:
        loss, has_data = self.zero, False
        for rank in self.place.ranks:
            uses = of_ranks[rank]
            if uses is not None:
                mine = self._loss(uses)
                is_infinite = place == 0 and step.overflowing == rank
                loss = loss + (mine * torch.inf if is_infinite else mine)
                has_data = True
        if not has_data:
            return
        with contextlib.ExitStack() as stack:
            for optimizer in () if self.place.is_alone or place >= step.alone else self.optimizers:
                stack.enter_context(optimizer.no_sync())
            self.scaler.scale(loss * self.share).backward()

    def _step(self, step: Step) -> None:
        optimizers = [self.optimizers[n] for n in step.steps or range(len(self.optimizers))]
        reduces = step.reduces and not self.place.is_alone
        for optimizer in optimizers if reduces else ():
            optimizer.synchronize()
        has_scaled = False
        for optimizer in optimizers:
            weights = [p for each in optimizer.param_groups for p in each["params"]]
            scales = self.program.scales and any(p.grad is not None for p in weights)
            if scales:
                self.scaler.unscale_(optimizer)
            if step.clips is not None:
                nn.utils.clip_grad_norm_(weights, step.clips)
            with optimizer.skip_synchronize() if reduces else contextlib.nullcontext():
                self.scaler.step(optimizer) if scales else optimizer.step()
            has_scaled = has_scaled or scales
        if has_scaled:
            self.scaler.update()

    def _call(self, what: str, number: int) -> hvd.Handle | None:
        """Start an unrelated operation; return a handle to wait for after the step."""
        if what == "host":
            assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [float(hvd.size())] * 3
        elif what == "late host":
            return None if hvd.rank() % 2 else self._sum_of_ones("cpu", number)
        elif what == "device":
            return self._sum_of_ones(self.device, number)
        elif what == "gather":
            mine = torch.full((hvd.rank() + 1,), float(hvd.rank()), device=self.device)
            assert len(hvd.allgather(mine).cpu()) == sum(range(1, hvd.size() + 1))
        elif what == "optimizer":
            self._use_another_optimizer(hvd.global_process_set, number)
        else:
            added = hvd.add_process_set([0, hvd.size() - 1] if hvd.size() > 2 else [0])
            if added.included():
                self._use_another_optimizer(added, number)
            hvd.remove_process_set(added)
        return None

    def _use_another_optimizer(self, ranks: hvd.ProcessSet, number: int) -> None:
        """Train another weight for a while, on the device or on the host."""
        weight = nn.Parameter(torch.zeros(3, device=self.device if number % 2 else "cpu"))
        model = nn.ParameterList([weight])
        optimizer = self.place.wrap(model, SGD([weight], lr=LR), process_set=ranks)[1]
        for _ in range(4):
            optimizer.zero_grad()
            (weight * hvd.size() * (hvd.rank() + 1)).sum().backward()
            optimizer.step()
        together = ranks.ranks or range(hvd.size())
        mean = hvd.size() * sum(rank + 1 for rank in together) / len(together)
        assert weight.tolist() == [-4 * LR * mean] * 3

    def _sum_of_ones(self, place: str, number: int) -> hvd.Handle:
        """Start an allreduce; of "late host" some ranks do so before the passes, others after."""
        ones = torch.ones(3, device=place)
        return hvd.allreduce_async(ones, op=hvd.Sum, name=f"side {number} on {place}")
