"""Random training programs with the habits of real ones, played by ranks and by one process.

Each rank plays a program on its own rows; `play` without torch_ring plays it in one process on the
rows of all ranks. Both run the same code, and must see the same values: gradients wherever a
program may read them, and weights after every step.

tests/device/random_programs.py varies the gradients that exist in each pass; this varies habits:
how gradients are made, kept, cleared, clipped and used.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_ring as hvd

ROWS = 3  # of a rank in a pass
LATER_S = 0.005  # delay of a late rank
HEADS = "ab"


@dataclass(frozen=True)
class Pass:
    """One backward pass.

    Attributes:
        heads: of each rank, the heads that it uses; "": it has no data, and calls no backward().
        synchronizes: False under no_sync().
        way: "backward", or "autograd.grad", whose results become gradients.
        sleeper: the rank that sleeps in a hook of a gradient, if any.
    """

    heads: tuple[str, ...]
    synchronizes: bool = True
    way: str = "backward"
    sleeper: int | None = None


@dataclass(frozen=True)
class Group:
    """The passes before a step, and the step.

    Attributes:
        active: the ranks that have not joined.
        joins_after: whether all ranks call join() afterwards, and begin anew from the last one.
        thaws: "", "freeze" or "thaw": the layer, on all ranks.
        clear: "none" for zero_grad(), "zero" in place, "flat" for the flat memory's zero_(), "".
        by_hand: the ranks that set the gradient of `hand` by a formula.
        by_hand_first: whether they do so before the passes.
        passes: of each rank.
        synchronizes: whether synchronize() comes before gradients are read.
        clip: "value", "norm", "scale" (a new tensor in place of each) or "".
        is_read: whether gradients are compared before the step.
        closure: whether step() gets the passes as a closure.
        steps: the optimizers that take a step.
    """

    active: tuple[int, ...]
    joins_after: bool
    thaws: str
    clear: str
    by_hand: tuple[int, ...]
    by_hand_first: bool
    passes: tuple[Pass, ...]
    synchronizes: bool
    clip: str
    is_read: bool
    closure: bool
    steps: tuple[int, ...]


HABITS = (
    "sparse",  # the embedding has sparse gradients
    "flat",  # gradients lie in memory of the program
    "checkpoints",  # the layer is a reentrant segment, each time that it is applied
    "twice",  # the layer is applied twice
    "behind",  # it is applied again behind that, and in no segment
    "schedules",  # a scheduler changes the rate
    "joins",  # ranks have different numbers of batches, and call join()
    "freezes",  # the layer is frozen and thawed
    "keeps",  # gradients are kept over steps
    "by hand",  # a gradient is set beside backward(), on all ranks or on one
    "autograd.grad",  # all gradients are set so
    "skips",  # a rank has no data, and leaves out backward()
    "many",  # several passes before a step
    "no_sync",
    "clips",
    "closures",
    "in turn",  # one of two optimizers steps
    "shared",  # the two have trunk and layer in common
)


@dataclass
class Program:
    """A program.

    Attributes:
        optimizers: one or two.
        kind: the kind of the optimizers.
        passes_per_step: backward_passes_per_step.
        habits: its subset of `HABITS`.
    """

    seed: int
    size: int
    optimizers: int
    kind: str
    passes_per_step: int
    habits: frozenset[str]
    groups: list[Group] = field(default_factory=list)

    @property
    def flat(self) -> bool:
        return "flat" in self.habits

    def __str__(self) -> str:
        head = {name: value for name, value in vars(self).items() if name != "groups"}
        lines = [f"    {number}: {group}" for number, group in enumerate(self.groups)]
        return "\n".join([f"program: {head}", *lines])


def make_program(seed: int, size: int) -> Program:
    """Return the program of a seed for a number of ranks."""
    rng = random.Random(f"{seed} of {size}")
    optimizers = rng.choice([1, 1, 2, 2])
    kind = rng.choice(["sgd", "momentum", "adam", "adam", "lbfgs" if optimizers == 1 else "sgd"])
    habits = {habit for habit in HABITS if rng.random() < 0.35}
    passes_per_step = rng.choice([1, 1, 2]) if kind != "lbfgs" else 1
    if kind != "sgd":
        habits.discard("sparse")
    if "sparse" in habits:
        habits.discard("flat")
    if "checkpoints" in habits:
        habits.discard("autograd.grad")  # torch refuses both
    if passes_per_step > 1:
        habits -= {"keeps", "autograd.grad", "many", "no_sync", "closures", "in turn"}
    if optimizers == 1:
        habits -= {"in turn", "shared"}
    else:
        habits.discard("closures")
    program = Program(seed, size, optimizers, kind, passes_per_step, frozenset(habits))
    program.groups = list(_Author(program, rng).groups())
    return program


class _Author:
    """Writes the groups of a program."""

    def __init__(self, program: Program, rng: random.Random) -> None:
        self.program = program
        self.rng = rng
        self.must_clear = True
        self.has_clipped = False  # since gradients were cleared

    def has(self, habit: str, chance: float) -> bool:
        """Return whether the program follows a habit now."""
        return self.rng.random() < chance and habit in self.program.habits

    def groups(self) -> Iterator[Group]:
        rng, everybody = self.rng, tuple(range(self.program.size))
        for _ in range(rng.choice([1, 2])):
            self.must_clear = True
            joins = self.has("joins", 1.0)
            lengths = [rng.randint(1, 6) if joins else 6 for _ in everybody]
            for number in range(max(lengths)):
                active = tuple(rank for rank in everybody if number < lengths[rank])
                yield self._group(active, joins and number == max(lengths) - 1)

    def _group(self, active: tuple[int, ...], joins_after: bool) -> Group:
        program, rng = self.program, self.rng
        clear = rng.choice(["flat", "flat", "zero"] if program.flat else ["none", "none", "zero"])
        if program.flat and self.must_clear:
            clear = "zero"  # otherwise an unstepped optimizer keeps an averaged gradient
        # Accumulating gradients of a joining rank must be present as averaged.
        is_whole = len(active) == program.size
        may_keep = is_whole or not (
            self.has_clipped or {"flat", "sparse", "shared"} & program.habits
        )
        if may_keep and not self.must_clear and self.has("keeps", 0.5):
            clear = ""
        self.has_clipped = self.has_clipped and not clear
        if program.kind == "lbfgs":
            passes = (Pass(tuple(HEADS for _ in range(program.size))),)
            clear = clear or "zero"
            return Group(
                active, joins_after, "", clear, (), False, passes, False, "", False, True, (0,)
            )
        passes = self._passes(active)
        steps = list(range(program.optimizers))
        if self.has("in turn", 0.5):
            steps = [rng.choice(steps)]
        rng.shuffle(steps)
        # An optimizer that has not stepped may have gradients that are not averaged.
        self.must_clear = len(steps) < program.optimizers
        by_hand: tuple[int, ...] = ()
        if self.has("by hand", 0.6):
            # If one rank keeps an averaged gradient while another has its own, there is no mean.
            by_hand = (rng.choice(active),) if clear and rng.random() < 0.5 else active
        is_first = rng.random() < 0.5
        is_simple = (
            len(passes) == 1
            and program.passes_per_step == 1
            and not by_hand
            and passes[0].synchronizes
            and passes[0].way == "backward"
            and all(passes[0].heads[rank] for rank in active)
        )
        synchronizes = rng.random() < (0.1 if is_simple else 0.5)
        reads = is_simple or synchronizes
        clip = ""
        if reads and self.has("clips", 0.7):
            clip = rng.choice(["value", "norm", "norm" if program.flat else "scale"])
            if "sparse" in program.habits:
                clip = "scale"  # torch clips no sparse gradients
        if not (is_whole or clear):
            clip = ""  # then a gradient without a pass is the program's own
        self.has_clipped = self.has_clipped or bool(clip)
        closes = is_simple and not synchronizes and not clip and self.has("closures", 0.7)
        return Group(
            active,
            joins_after,
            rng.choice(["freeze", "thaw"]) if self.has("freezes", 0.5) else "",
            clear,
            by_hand,
            is_first,
            passes,
            synchronizes,
            clip,
            reads and not closes,
            closes,
            tuple(steps),
        )

    def _passes(self, active: Sequence[int]) -> tuple[Pass, ...]:
        """Return the passes of a group.

        Between two steps all ranks end equally many passes that synchronise, but a rank may leave
        out the only one.
        """
        if self.program.passes_per_step == 2:
            count = self.rng.choice([2, 2, 1])
            return tuple(self._pass(active, may_skip=True) for _ in range(count))
        if self.has("many", 0.4):
            return tuple(self._pass(active, may_skip=False) for _ in range(2))
        if self.has("autograd.grad", 0.4):
            return (Pass(tuple("ab" for _ in range(self.program.size)), way="autograd.grad"),)
        last = (self._pass(active, may_skip=True),)
        if self.has("no_sync", 0.6):
            count = self.rng.choice([1, 2])
            before = [self._pass(active, may_skip=True, synchronizes=False) for _ in range(count)]
            return (*before, *self.rng.choice([last, ()]))
        return last

    def _pass(self, active: Sequence[int], *, may_skip: bool, synchronizes: bool = True) -> Pass:
        rng = self.rng
        heads = [rng.choice(["a", "b", "ab", "ab"]) for _ in range(self.program.size)]
        if may_skip and self.has("skips", 0.5):
            heads[rng.choice(active)] = ""
        sleeper = rng.choice(active) if rng.random() < 0.1 else None
        return Pass(tuple(heads), synchronizes, "backward", sleeper)


class Net(nn.Module):
    """A net; each pass uses a part of it; `hand` is in no graph."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.program = program
        self.words = nn.Embedding(6, 3, sparse="sparse" in program.habits)
        self.trunk = nn.Linear(3, 4)
        self.layer = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({name: nn.Linear(4, 2) for name in HEADS})
        self.hand = nn.Parameter(torch.randn(3))
        self.double()

    def forward(self, words: Tensor, heads: str) -> Tensor:
        hidden = torch.tanh(self.trunk(self.words(words)))
        for _ in range(2 if "twice" in self.program.habits else 1):
            if "checkpoints" in self.program.habits:
                hidden = checkpoint(self.layer, hidden, use_reentrant=True)
            else:
                hidden = self.layer(hidden)
        if "behind" in self.program.habits:
            hidden = self.layer(hidden.tanh())
        return sum(
            (self.heads[name](hidden).square().mean() for name in heads), hidden.new_zeros(())
        )

    def owned(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each optimizer."""
        first = [*self.words.parameters(), *self.trunk.parameters(), *self.layer.parameters()]
        a, b = (list(self.heads[name].parameters()) for name in HEADS)
        if self.program.optimizers == 1:
            return [[*first, *a, *b, self.hand]]
        if "shared" not in self.program.habits:
            return [[*first, *a], [*b, self.hand]]
        return [[*first, *a, self.hand], [*self.trunk.parameters(), *self.layer.parameters(), *b]]


KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    # A large eps: rounding must not decide the direction of a step.
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=2),
}

Seen = tuple[str, list[Tensor | None]]
"""A player's place, and the values that it sees there."""


class Player:
    """Plays a program: on this rank, or in one process for all of them.

    Args:
        program: the program.
        rank: this one; None: all.
    """

    def __init__(self, program: Program, rank: int | None) -> None:
        self.program = program
        self.rank = rank
        self.net = Net(program)
        self.parameters = list(self.net.parameters())
        self.optimizers = [KINDS[program.kind](owned) for owned in self.net.owned()]
        if rank is not None:
            names = list(self.net.named_parameters())
            for optimizer in self.optimizers:
                hvd.DistributedOptimizer(
                    optimizer, names, backward_passes_per_step=program.passes_per_step
                )
        self.schedulers = [
            torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
            for optimizer in self.optimizers
            if "schedules" in program.habits
        ]
        self.flat: Tensor | None = None
        if program.flat:
            self.flat = torch.zeros(sum(p.numel() for p in self.parameters), dtype=torch.float64)
            parts = self.flat.split([p.numel() for p in self.parameters])
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        self.number = -1  # of the group

    def play(self) -> Iterator[Seen]:
        """Play the program; yield the visible values. A rank that has joined sees nothing."""
        for self.number, group in enumerate(self.program.groups):
            if group.thaws:  # also after a join: a joined rank goes on like the others
                self.net.layer.requires_grad_(group.thaws == "thaw")
            if self.rank is None or self.rank in group.active:
                yield from self._play(group)
            if group.joins_after:
                yield from self._join()

    def _play(self, group: Group) -> Iterator[Seen]:
        if group.closure:
            losses: list[float] = []

            def closure() -> Tensor:
                self._clear(group.clear)
                loss = sum(
                    (self._pass(group, n) for n in range(len(group.passes))), torch.zeros(())
                )
                losses.append(float(loss))
                return loss

            loss = self.optimizers[0].step(closure)
            yield f"the loss of group {self.number}", [torch.as_tensor(loss).detach()]
        else:
            self._clear(group.clear)
            if group.by_hand_first:
                self._set_by_hand(group)
            for number in range(len(group.passes)):
                self._pass(group, number)
            if not group.by_hand_first:
                self._set_by_hand(group)
            if group.synchronizes and self.rank is not None:
                for number in group.steps:
                    self.optimizers[number].synchronize()  # type: ignore[attr-defined]
            if group.is_read:
                yield from self._gradients(group)
            for number in group.steps:
                self._clip(group, self.optimizers[number])
                with self._without_synchronisation(group, number):
                    self.optimizers[number].step()
        for scheduler in self.schedulers:
            scheduler.step()
        yield f"weights after group {self.number}", [p.detach().clone() for p in self.parameters]

    def _clear(self, how: str) -> None:
        if how == "flat":
            assert self.flat is not None
            self.flat.zero_()
        elif how:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=how == "none")

    def _played(self, group: Group) -> tuple[list[int], int]:
        """Return the ranks that this player plays, and the divisor of their sum."""
        if self.rank is None:
            return list(group.active), self.program.size  # a rank that has joined counts as zero
        return [self.rank], 1

    def _set_by_hand(self, group: Group) -> None:
        ranks, count = self._played(group)
        hand = self.net.hand
        values = [(rank + 1.5) * hand.detach() + 0.1 * self.number for rank in group.by_hand]
        mine = [value for rank, value in zip(group.by_hand, values, strict=True) if rank in ranks]
        if not mine:
            return
        value = torch.stack(mine).sum(0) / count
        if self.flat is not None:
            assert hand.grad is not None
            hand.grad.copy_(value)
        else:
            hand.grad = value

    def _pass(self, group: Group, number: int) -> Tensor:
        """Run a backward pass; return the loss."""
        each = group.passes[number]
        ranks, count = self._played(group)
        ranks = [rank for rank in ranks if each.heads[rank]]
        if not ranks:
            return torch.zeros((), dtype=torch.float64)
        generator = torch.Generator()
        loss = torch.zeros((), dtype=torch.float64)
        for rank in ranks:
            generator.manual_seed(((self.program.seed * 64 + self.number) * 8 + number) * 8 + rank)
            words = torch.randint(6, (ROWS,), generator=generator)
            loss = loss + self.net(words, each.heads[rank]) / count
        if each.way == "autograd.grad":
            used = [p for p in self.parameters if p.requires_grad and p is not self.net.hand]
            for parameter, gradient in zip(used, torch.autograd.grad(loss, used), strict=True):
                if self.flat is not None:
                    assert parameter.grad is not None
                    parameter.grad.copy_(gradient)
                else:
                    parameter.grad = gradient
            return loss.detach()
        with contextlib.ExitStack() as stack:
            if self.rank is not None and not each.synchronizes:
                for optimizer in self.optimizers:
                    stack.enter_context(optimizer.no_sync())  # type: ignore[attr-defined]
            if self.rank is not None and each.sleeper == self.rank:
                hooked = self.net.trunk.weight
                handle = hooked.register_hook(lambda gradient: (time.sleep(LATER_S), gradient)[1])
                stack.callback(handle.remove)
            loss.backward()
        return loss.detach()

    def _gradients(self, group: Group) -> Iterator[Seen]:
        """Yield the gradients of the optimizers that step."""
        stepping = {p for n in group.steps for p in self.net.owned()[n]}
        seen = [p.grad for p in self.parameters if p in stepping]
        yield (
            f"gradients of group {self.number}",
            [None if grad is None else grad.detach().to_dense().clone() for grad in seen],
        )
        if self.flat is not None and len(stepping) == len(self.parameters):
            yield f"the program's memory of gradients in group {self.number}", [self.flat.clone()]

    def _clip(self, group: Group, optimizer: torch.optim.Optimizer) -> None:
        owned = [p for each in optimizer.param_groups for p in each["params"]]
        parameters = [p for p in owned if p.grad is not None]
        if not parameters:  # torch does not clip an empty list
            return
        if group.clip == "value":
            nn.utils.clip_grad_value_(parameters, 0.05)
        elif group.clip == "norm":
            nn.utils.clip_grad_norm_(parameters, 0.1)
        elif group.clip == "scale":
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad = parameter.grad * 0.5

    def _without_synchronisation(
        self, group: Group, number: int
    ) -> contextlib.AbstractContextManager[None]:
        """Return Horovod's context of a step whose gradients are averaged already."""
        if self.rank is None or not group.synchronizes:
            return contextlib.nullcontext()
        return self.optimizers[number].skip_synchronize()  # type: ignore[attr-defined, no-any-return]

    def _join(self) -> Iterator[Seen]:
        """Make all ranks begin anew with the last one's values."""
        if self.rank is not None:
            last = hvd.join()
            hvd.broadcast_parameters(self.net.state_dict(), last)
            for optimizer, scheduler in zip(
                self.optimizers, self.schedulers or [None] * 2, strict=False
            ):
                hvd.broadcast_optimizer_state(optimizer, last)
                if scheduler is not None:
                    scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict(), last))
        for optimizer in self.optimizers:
            if self.flat is None:
                optimizer.zero_grad()
        self._clear("flat" if self.flat is not None else "none")
        yield f"weights after join() {self.number}", [p.detach().clone() for p in self.parameters]
