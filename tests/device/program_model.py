# SPDX-License-Identifier: Apache-2.0
"""The expected result of a random program: one process applies the rule of averaging.

A gradient that exists on any rank is averaged over all of them, where a rank without one counts as
zero; a gradient that exists on none stays as it is. It knows nothing of torch_ring.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from random_programs import Group, Pass, Program
from torch import Tensor, nn
from torch.optim import SGD

LR = 2.0**-4  # a power of two: nothing is rounded
CLIP_VALUE, CLIP_NORM = 6.0, 8.0

Snapshot = list[Tensor]  # the weights after a group


def fresh_parameters(program: Program, device: str) -> list[nn.Parameter]:
    """Return the parameters of a program, all zeros."""
    return [
        nn.Parameter(torch.zeros(shape, dtype=dtype_of(program, index)).to(device))
        for index, shape in enumerate(program.shapes)
    ]


def dtype_of(program: Program, index: int) -> torch.dtype:
    return torch.float64 if index in program.doubles else torch.float32


def fresh_optimizers(program: Program, parameters: Sequence[nn.Parameter]) -> list[SGD]:
    """Return the optimizers of a program. Parameters that a group adds are not among theirs."""
    late = {index for group in program.groups for index in group.adds}
    mine = [[] for _ in range(program.optimizers)]
    for index, (parameter, owner) in enumerate(zip(parameters, program.owners, strict=True)):
        if index not in late:
            mine[owner].append(parameter)
    return [SGD(each, lr=LR, momentum=program.momentum) for each in mine]


def add(
    program: Program, group: Group, parameters: Sequence[nn.Parameter], optimizers: Any
) -> None:
    """Add the parameters that a group adds to their optimizers."""
    for index in group.adds:
        optimizers[program.owners[index]].add_param_group({"params": [parameters[index]]})


def fresh_scaler(program: Program, device: str) -> torch.amp.GradScaler:
    """Return a scaler that changes its scale often, by powers of two."""
    return torch.amp.GradScaler(device, init_scale=4.0, growth_interval=3, enabled=program.scales)


@functools.cache
def pattern(program_shape: tuple[int, ...], index: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a parameter for a factor of 1; neighbouring elements differ."""
    count = torch.Size(program_shape).numel()
    return ((torch.arange(count) * 7 + index) % 5 - 2).reshape(program_shape).to(dtype)


def clip(group: Group, optimizer: torch.optim.Optimizer) -> None:
    """Clip the gradients of an optimizer; by a norm, to a power of two, so that it is exact."""
    parameters = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if group.clips == "value" and parameters:
        nn.utils.clip_grad_value_(parameters, CLIP_VALUE)
    elif group.clips == "norm" and parameters:
        norm = max(p.grad.abs().max().item() for p in parameters)
        if CLIP_NORM < norm < math.inf:
            for p in parameters:
                p.grad.mul_(2.0 ** math.floor(math.log2(CLIP_NORM / norm)))


class Model:
    """Plays a program; `local` has the gradients of each rank that are not averaged yet."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.parameters = fresh_parameters(program, "cpu")
        self.optimizers = fresh_optimizers(program, self.parameters)
        self.scaler = fresh_scaler(program, "cpu")
        self.scaler.scale(torch.zeros(()))  # creates its scale
        self.local: list[dict[int, Tensor]] = [{} for _ in range(program.size)]

    def play(self) -> list[Snapshot]:
        """Return the weights after each group."""
        return [self._play(group) for group in self.program.groups]

    def _play(self, group: Group) -> Snapshot:
        add(self.program, group, self.parameters, self.optimizers)
        for number, set_to_none in enumerate(group.clears):
            if set_to_none is not None:
                self._clear(number, bool(set_to_none))
        # Each pass is averaged, and added to what was averaged before. That is rounded otherwise
        # than the average of a sum, and a sum may be finite where one of its passes is not.
        rounds_each = self.program.casts and self.program.passes_per_step == 1
        for each in group.passes:
            self._accumulate(each)
            for number in range(len(self.optimizers)) if rounds_each and each.synchronizes else ():
                self._reduce(number)
        for number in group.steps:
            self._reduce(number)
        has_scaled = False
        for number in group.steps:
            optimizer = self.optimizers[number]
            has_gradient = any(self.parameters[i].grad is not None for i in self._owned(number))
            if self.program.scales and has_gradient:
                self.scaler.unscale_(optimizer)
            clip(group, optimizer)
            if self.program.scales and has_gradient:
                self.scaler.step(optimizer)
                has_scaled = True
            else:
                optimizer.step()
        if has_scaled:
            self.scaler.update()
        return [p.detach().clone() for p in self.parameters]

    def _owned(self, number: int) -> list[int]:
        return [index for index, owner in enumerate(self.program.owners) if owner == number]

    def _clear(self, number: int, set_to_none: bool) -> None:
        self.optimizers[number].zero_grad(set_to_none=set_to_none)
        for index in self._owned(number):
            for local in self.local:
                gradient = local.pop(index, None)
                if gradient is not None and not set_to_none and self.parameters[index].grad is None:
                    self.parameters[index].grad = torch.zeros_like(gradient)

    def _accumulate(self, each: Pass) -> None:
        scale = self.scaler.get_scale() if self.program.scales else 1.0
        for rank, uses in enumerate(each.uses):
            for index, factor in (uses or {}).items():
                ones = pattern(self.program.shapes[index], index, dtype_of(self.program, index))
                gradient = ones * (factor * scale)
                if each.overflowing == rank:
                    gradient = gradient * torch.inf
                before = self.local[rank].get(index)
                self.local[rank][index] = gradient if before is None else before + gradient

    def _sent(self, gradient: Tensor) -> Tensor:
        """Return a gradient in its sent form: in float16 a large scale makes it infinite."""
        return gradient.half().to(gradient.dtype) if self.program.casts else gradient

    def _reduce(self, number: int) -> None:
        """Average the ranks' gradients of an optimizer, and add the average to `grad`."""
        for index in self._owned(number):
            parts = [part for local in self.local if (part := local.pop(index, None)) is not None]
            if not parts:
                continue
            total = functools.reduce(Tensor.add, map(self._sent, parts))
            reduced = self._sent(total if self.program.is_sum else total / self.program.size)
            before = self.parameters[index].grad
            self.parameters[index].grad = reduced if before is None else before + reduced
