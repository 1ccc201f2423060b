# SPDX-License-Identifier: Apache-2.0
"""Runs random programs on ranks, with torch_ring, and compares their results."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from device_operations import busy
from program_model import (
    LR,
    Model,
    Snapshot,
    add,
    clip,
    dtype_of,
    fresh_optimizers,
    fresh_parameters,
    fresh_scaler,
    pattern,
)
from random_programs import Group, Pass, Program, Uses
from torch import Tensor, nn
from torch.optim import SGD
from training import FailingBackward

import torch_ring as hvd
from torch_ring._C import GradientReport
from torch_ring.optimizer.planned_pass import Entered, Gradients, PlannedPasses, without

# Rank 1's misdeeds, and the error of all ranks: in agreed passes, and if hosts run ahead. Such a
# host may find that another one has read the reports before it and left; only the timeout ends its
# wait for its device.
ENDINGS: dict[str, tuple[type[Exception] | tuple[type[Exception], ...], ...]] = {
    "leaves out a step": (hvd.MismatchError, (hvd.MismatchError, hvd.PeerLostError)),
    "waits elsewhere": (hvd.MismatchError, hvd.TimeoutError),
    "leaves": (hvd.PeerLostError, hvd.PeerLostError),
}
PROGRAM_DEADLINE_S = 60.0  # a hang, not a slow machine: a program takes a second
LATER_S = 0.02  # delay of a late rank


def run_programs(
    device: str, programs: Sequence[Callable[[int], Program]], reports: str, run_ahead: bool
) -> tuple[int, int]:
    """Run programs and compare them with the model.

    Args:
        programs: functions that make each program from the number of ranks.
        reports: the folder for each rank's progress; after a hang it has the program and the
            stacks.
        run_ahead: the argument of DistributedOptimizer.

    Returns:
        The numbers of planned passes, and of programs that were refused.

    Raises:
        AssertionError: a program went wrong; the message has it.
    """
    planned = refused = 0
    for make in programs:
        program = make(hvd.size())
        hvd.join()  # hosts forget that earlier programs did not repeat themselves
        with told(str(program), Path(reports)):
            passes, is_refused = check(program, device, run_ahead)
        planned += len(passes)
        refused += is_refused
        gc.collect()
    return planned, refused


@dataclass
class PlannedPass:
    """A planned pass of this rank.

    Attributes:
        group: the number of its group in the program.
        plan: the gradients that it has by the plan, and `mine` those that this rank has.
        carried: the gradients that were averaged before, and are still there.
    """

    group: int
    plan: Gradients
    mine: Gradients
    carried: Gradients

    @property
    def is_exact(self) -> bool:
        return self.mine == self.plan

    @property
    def has_more(self) -> bool:
        return bool(without(self.mine, self.plan))


def are_added_unlike(ranks: Sequence[PlannedPass]) -> bool:
    """Return whether a planned gradient was added to an averaged one that not all ranks have."""
    for index, planned in ranks[0].plan.items():
        carried = [each.carried.get(index, 0) for each in ranks]
        added = [mine & each.mine.get(index, 0) for mine, each in zip(carried, ranks, strict=True)]
        for bit in (1 << i for i in range(planned.bit_length()) if planned >> i & 1):
            if any(each & bit for each in added) and not all(each & bit for each in carried):
                return True
    return False


@contextlib.contextmanager
def recorded_passes(player: Player) -> Iterator[dict[int, PlannedPass]]:
    """Yield a dictionary that gets the passes whose end no host waits for, by their numbers."""
    found: dict[int, PlannedPass] = {}
    send = PlannedPasses._send

    def recorded(
        self: PlannedPasses, number: int, steps: int, reports: Sequence[GradientReport]
    ) -> Entered:
        mine = {each.optimizer: each.due for each in reports if each.due}
        carried = {each.optimizer: each.carried for each in reports}
        found[number] = PlannedPass(player.number, dict(self._plan), mine, carried)
        return send(self, number, steps, reports)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannedPasses, "_send", recorded)
        yield found


@contextlib.contextmanager
def told(program: str, reports: Path) -> Iterator[None]:
    """Name the program in each of its failures; end the process at the deadline if it hangs."""
    path = reports / f"rank-{hvd.rank()}"
    with open(path, "w") as report:
        print(program, file=report, flush=True)
        faulthandler.dump_traceback_later(PROGRAM_DEADLINE_S, exit=True, file=report)
        try:
            yield
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n{program}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
            path.unlink()


def check(program: Program, device: str, run_ahead: bool) -> tuple[dict[int, PlannedPass], bool]:
    """Run a program; compare its weights with the model's, up to the pass that is refused, if any.

    A pass is to be refused if a rank has a gradient that is not planned, while another one has
    exactly those of the plan; or if a gradient was added to an averaged one on some ranks only.
    Returns the planned passes, and whether one was refused.
    """
    player = Player(program, device, run_ahead)
    error = ""
    with recorded_passes(player) as passes:
        try:
            player.play()
            hvd.barrier()  # the ranks that are ahead hear of it here at the latest
        except hvd.RingError as refusal:
            error = str(refusal)
    found = player.snapshots
    if error:
        assert "has a gradient of 'weight." in error or "averaged before, which rank" in error, (
            error
        )
        assert "run_ahead=False" in error, error
        hvd.shutdown()
        hvd.init()
    elif program.ending:
        end(player, run_ahead)
    ranks = hvd.allgather_object(passes)
    of_all = [(number, list(found.values())) for number, found in entered_by_all(ranks, program)]
    refused = [
        number
        for number, passes_of_ranks in of_all
        if (
            any(each.has_more for each in passes_of_ranks)
            and any(each.is_exact for each in passes_of_ranks)
        )
        or are_added_unlike(passes_of_ranks)
    ]
    assert bool(refused) == bool(error), (refused, error)
    assert all(hvd.allgather_object(bool(error))) == bool(error), "ranks differ in the refusal"
    wanted = Model(program).play()
    right = len(wanted)
    if refused:
        assert len(refused) == 1, "a pass was refused, and the ranks went on"
        (right,) = {
            each.group for number, of_ranks in of_all for each in of_ranks if number == refused[0]
        }
    for number in range(right):
        if hvd.rank() not in program.groups[number].absent:
            compare(found[number], wanted[number], f"the model after group {number}")
    return passes, bool(refused)


def entered_by_all(
    ranks: Sequence[dict[int, PlannedPass]], program: Program
) -> Iterator[tuple[int, dict[int, PlannedPass]]]:
    """Yield the passes that all ranks have entered which had not joined, by rank."""
    for number in sorted(set().union(*ranks)):
        found = {rank: passes[number] for rank, passes in enumerate(ranks) if number in passes}
        absent = program.groups[min(each.group for each in found.values())].absent
        if found.keys() | set(absent) == set(range(program.size)):
            yield number, found


def end(player: Player, run_ahead: bool) -> None:
    """Let rank 1 do the program's misdeed; all take steps until an error, which must come soon."""
    ending, group, is_odd = player.program.ending, player.program.groups[-1], hvd.rank() == 1

    def go_on() -> None:
        if ending == "leaves out a step" and is_odd:
            player.clear(group)
            player.backward(group.passes[0])
        if ending == "waits elsewhere" and is_odd:
            hvd.barrier()
        for _ in range(40):
            player.play_group(group)[0].cpu()

    if not (ending == "leaves" and is_odd):
        match = r"step|has left|left: MismatchError" if ending == "leaves out a step" else None
        with pytest.raises(ENDINGS[ending][run_ahead], match=match):
            go_on()
    hvd.shutdown()
    hvd.init()


def compare(found: Snapshot, wanted: Snapshot, whose: str) -> None:
    for index, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(mine, theirs), (
            f"parameter {index} is not that of {whose}: {mine.flatten()[:8].tolist()}, "
            f"not {theirs.flatten()[:8].tolist()}"
        )


class Player:
    """Plays a program on this rank. It makes the host wait only where a user would."""

    def __init__(self, program: Program, device: str, run_ahead: bool) -> None:
        self.program, self.device = program, device
        self.parameters = fresh_parameters(program, device)
        self.names = [(f"weight.{index}", p) for index, p in enumerate(self.parameters)]
        self.optimizers = [
            hvd.DistributedOptimizer(
                optimizer,
                self.names,
                compression=hvd.Compression.fp16 if program.casts else hvd.Compression.none,
                backward_passes_per_step=program.passes_per_step,
                op=hvd.Sum if program.is_sum else hvd.Average,
                gradient_predivide_factor=program.predivide,
                groups=program.bucket_groups,
                run_ahead=run_ahead,
            )
            for optimizer in fresh_optimizers(program, self.parameters)
        ]
        self.scaler = fresh_scaler(program, device)
        self.patterns = [
            pattern(shape, index, dtype_of(program, index)).to(device)
            for index, shape in enumerate(program.shapes)
        ]
        self.zero = torch.zeros((), device=device)
        self.number = -1  # the number of the group
        self._after: list[Snapshot] = []  # each group so far, on the device
        self._kept: list[tuple[Tensor, Tensor]] = []  # gradients of steps, and copies of them
        self.run_ahead = run_ahead

    def play(self) -> None:
        """Play all groups."""
        for self.number, group in enumerate(self.program.groups):
            is_absent = hvd.rank() in group.absent
            self._after.append([] if is_absent else self.play_group(group))
            if self.program.keeps and not is_absent:
                self._keep(group)
            if group.joins:
                last = hvd.join()
                assert last not in group.absent
                hvd.broadcast_parameters(self.names, last)
        for gradient, copy in self._kept:  # with NaN where a loss was infinite
            exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
            torch.testing.assert_close(gradient, copy, **exactly, msg="a kept gradient has changed")

    def _keep(self, group: Group) -> None:
        """Keep the gradients of a step, if the next zero_grad() drops them."""
        following = self.program.groups[self.number + 1 :][:1]
        if not all(clear in (True, "by hand") for each in following for clear in each.clears):
            return
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None and self.program.owners[index] in group.steps:
                self._kept.append((parameter.grad, parameter.grad.clone()))

    @property
    def snapshots(self) -> list[Snapshot]:
        """The weights after each group that was played, on the host."""
        return [[weight.cpu() for weight in snapshot] for snapshot in self._after]

    def play_group(self, group: Group) -> Snapshot:
        add(self.program, group, self.parameters, self.optimizers)
        for rank, index, requires_grad in group.changes:
            if rank == hvd.rank():
                self.parameters[index].requires_grad_(requires_grad)
        self.clear(group)
        if group.failing == hvd.rank():
            self.fail(group.passes[0])
            self.clear(group)
        pending = [self._call(what) for what in group.before]
        for each in group.passes:
            self.backward(each)
        for what in group.after:
            self._call(what)
        if "host async" in group.before and hvd.rank() % 2:
            pending.append(self._start(torch.ones(3)))
        self._step(group)
        for handle in pending:
            if handle is not None:
                assert handle.wait().tolist() == [float(hvd.size())] * 3
        return [p.detach().clone() for p in self.parameters]

    def clear(self, group: Group) -> None:
        for optimizer, how in zip(self.optimizers, group.clears, strict=True):
            if how == "by hand":
                for parameter in (p for each in optimizer.param_groups for p in each["params"]):
                    parameter.grad = None
            elif how is not None:
                optimizer.zero_grad(set_to_none=how)

    def fail(self, each: Pass) -> None:
        """Raise in backward(), before any gradient."""
        uses = each.uses[hvd.rank()]
        assert uses is not None
        loss = FailingBackward.apply(self._loss(uses))
        with pytest.raises(RuntimeError, match="out of luck"):
            loss.backward()

    def _loss(self, uses: Uses) -> Tensor:
        loss = self.zero
        for index, factor in uses.items():
            loss = loss + (self.patterns[index] * factor * self.parameters[index]).sum().float()
        return loss

    def backward(self, each: Pass) -> None:
        if each.sleeper == hvd.rank():
            time.sleep(LATER_S)
            busy(self.device, int(1000 * LATER_S))
        uses = each.uses[hvd.rank()]
        if uses is None:
            return
        loss = self._loss(uses)
        if each.overflowing == hvd.rank():
            loss = loss * torch.inf
        with contextlib.ExitStack() as stack:
            if not each.synchronizes:
                for optimizer in self.optimizers:
                    stack.enter_context(optimizer.no_sync())
            self.scaler.scale(loss).backward()

    def _step(self, group: Group) -> None:
        scales, has_scaled = self.program.scales, False
        if group.reduces:
            for number in group.steps:
                self.optimizers[number].synchronize()
        for number in group.steps:
            optimizer = self.optimizers[number]
            weights = [p for each in optimizer.param_groups for p in each["params"]]
            has_gradient = any(weight.grad is not None for weight in weights)
            if scales and has_gradient:
                self.scaler.unscale_(optimizer)
            clip(group, optimizer)
            with optimizer.skip_synchronize() if group.reduces else contextlib.nullcontext():
                if scales and has_gradient:
                    self.scaler.step(optimizer)
                    has_scaled = True
                else:
                    optimizer.step()
        if has_scaled:
            self.scaler.update()

    def _call(self, what: str) -> hvd.Handle | None:
        """Start an unrelated operation; return a handle to wait for after the step."""
        if what == "host async":
            return None if hvd.rank() % 2 else self._start(torch.ones(3))
        if what == "host allreduce":
            assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [float(hvd.size())] * 3
        elif what == "device allreduce":
            return self._start(torch.ones(3, device=self.device))
        elif what == "device allgather":
            mine = torch.full((hvd.rank() + 1,), float(hvd.rank()), device=self.device)
            got = hvd.allgather(mine).cpu()
            assert len(got) == sum(range(1, hvd.size() + 1))
        elif what == "evaluate":
            with torch.no_grad():
                sum(p.double().sum() for p in self.parameters).item()
        elif what == "process set":
            self._use_a_set()
        elif what == "optimizer":
            self._use_another_optimizer()
        else:
            assert hvd.broadcast_object(self.number, root_rank=0) == self.number
        return None

    def _use_a_set(self) -> None:
        """Train another weight on two of the ranks; with two ranks, the set has one."""
        added = hvd.add_process_set([0, hvd.size() - 1] if hvd.size() > 2 else [0])
        if added.included():
            self._use_another_optimizer(added)
        hvd.remove_process_set(added)

    def _use_another_optimizer(self, ranks: hvd.ProcessSet = hvd.global_process_set) -> None:
        """Train another weight for a while, on the device or on the host."""
        weight = nn.Parameter(torch.zeros(3, device=self.device if self.number % 2 else "cpu"))
        optimizer = hvd.DistributedOptimizer(
            SGD([weight], lr=LR), process_set=ranks, run_ahead=self.run_ahead
        )
        for _ in range(4):
            optimizer.zero_grad()
            (weight * hvd.size() * (hvd.rank() + 1)).sum().backward()
            optimizer.step()
        together = ranks.ranks or range(hvd.size())
        mean = hvd.size() * sum(rank + 1 for rank in together) / len(together)
        assert weight.tolist() == [-4 * LR * mean] * 3

    def _start(self, ones: Tensor) -> hvd.Handle:
        """Start an allreduce; on the host some ranks do so before the passes, others after them."""
        name = f"side {self.number} on {ones.device.type}"
        return hvd.allreduce_async(ones, op=hvd.Sum, name=name)
