"""Random training programs: habits of real ones in any combination; see `oracle`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable

import torch
from oracle import Play, Program
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import torch_ring as hvd

ROWS = 3  # of a rank in a pass
WORDS = 6
HEADS = "ab"
HABITS = (
    "sparse",  # the embedding has sparse gradients
    "flat",  # gradients lie in memory of the program
    "checkpoints",  # the layer is a reentrant segment, each time that it is applied
    "twice",  # the layer is applied twice
    "behind",  # it is applied again behind that, and in no segment
    "joins",  # ranks have different numbers of batches, and call join()
    "freezes",  # the layer is frozen and thawed
    "keeps",  # gradients are kept over steps
    "by hand",  # a gradient is set beside backward(), on all ranks or on one
    "skips",  # a rank has no data, and leaves out backward()
    "passes per step",  # two
    "many",  # several passes before a step, each of them reduced
    "no_sync",
    "clips",
    "two optimizers",
    "in turn",  # one of the two steps
    "shared",  # the two have trunk and layer in common
)
KINDS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    # A large eps: rounding must not decide the direction of a step.
    "adam": lambda parameters: AdamW(parameters, lr=0.01, eps=1e-3),
}


def at_random(play: Play, seed: int) -> Program:
    """The program of a seed. All places draw the same numbers, also for one another."""
    return _Training(play, seed).groups()


def _chosen_habits(draw: random.Random) -> tuple[str, frozenset[str]]:
    """Return the kind of the optimizers, and habits that go together."""
    kind = draw.choice(["sgd", "momentum", "adam"])
    habits = {habit for habit in HABITS if draw.random() < 0.35}
    if kind != "sgd":
        habits.discard("sparse")
    if "sparse" in habits:
        habits.discard("flat")
    if "passes per step" in habits:
        habits -= {"keeps", "many", "no_sync", "in turn"}
    if "two optimizers" not in habits:
        habits -= {"in turn", "shared"}
    return kind, frozenset(habits)


class Habitual(nn.Module):
    """A net; each pass uses a part of it; `hand` is in no graph."""

    def __init__(self, seed: int, habits: frozenset[str]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.habits = habits
        self.words = nn.Embedding(WORDS, 3, sparse="sparse" in habits)
        self.trunk = nn.Linear(3, 4)
        self.layer = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({name: nn.Linear(4, 2) for name in HEADS})
        self.hand = nn.Parameter(torch.randn(3))
        self.double()

    def forward(self, words: Tensor, heads: str) -> Tensor:
        hidden = torch.tanh(self.trunk(self.words(words)))
        for _ in range(2 if "twice" in self.habits else 1):
            if "checkpoints" in self.habits:
                hidden = checkpoint(self.layer, hidden, use_reentrant=True)
            else:
                hidden = self.layer(hidden)
        if "behind" in self.habits:
            hidden = self.layer(hidden.tanh())
        return torch.stack([self.heads[name](hidden).square().mean() for name in heads]).sum()

    def owned(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each optimizer."""
        both = [*self.trunk.parameters(), *self.layer.parameters()]
        a, b = (list(self.heads[name].parameters()) for name in HEADS)
        first = [*self.words.parameters(), *both, *a]
        if "two optimizers" not in self.habits:
            return [[*first, *b, self.hand]]
        if "shared" in self.habits:
            return [[*first, self.hand], [*both, *b]]
        return [first, [*b, self.hand]]


class _Training:
    """A program at one place."""

    def __init__(self, place: Play, seed: int) -> None:
        self.place = place
        self.draw = random.Random(f"{seed} of {place.size}")
        kind, self.habits = _chosen_habits(self.draw)
        self.net = Habitual(seed, self.habits)
        self.parameters = list(self.net.parameters())
        self.owned = self.net.owned()
        passes = 2 if "passes per step" in self.habits else 1
        self.optimizers = [
            place.wrap(self.net, KINDS[kind](each), backward_passes_per_step=passes)[1]
            for each in self.owned
        ]
        self.flat: Tensor | None = None
        if "flat" in self.habits:
            sizes = [p.numel() for p in self.parameters]
            self.flat = torch.zeros(sum(sizes), dtype=torch.float64)
            for parameter, part in zip(self.parameters, self.flat.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)
        self.share = 1 / place.size if place.is_alone else 1.0
        self.must_clear = True
        self.has_clipped = False  # since gradients were cleared
        self.active: list[int] = []  # ranks that have not joined
        self.here: list[int] = []  # those of them that this place plays

    def has(self, habit: str, chance: float) -> bool:
        """Return whether the program follows a habit now."""
        return self.draw.random() < chance and habit in self.habits

    def groups(self) -> Program:
        """Play groups of passes, each with a step."""
        joins, everybody = "joins" in self.habits, range(self.place.size)
        for _ in range(self.draw.choice([1, 2])):
            self.must_clear = True
            counts = [self.draw.randint(1, 6) if joins else 6 for _ in everybody]
            for number in range(max(counts)):
                self.active = [rank for rank in everybody if number < counts[rank]]
                self.here = [rank for rank in self.place.ranks if rank in self.active]
                yield self._group(number)
            if joins:
                yield self._join()

    def _group(self, number: int) -> list[Tensor | None] | None:
        draw = self.draw
        if self.has("freezes", 0.5):  # joined ranks do so, too, as they go on like the others
            self.net.layer.requires_grad_(draw.random() < 0.5)
        is_whole = len(self.active) == self.place.size
        has_cleared = self._clear(is_whole)
        by_hand: list[int] = []
        if self.has("by hand", 0.6):
            # If one rank keeps an averaged gradient while another has its own, there is no mean.
            is_alone = has_cleared and draw.random() < 0.5
            by_hand = [draw.choice(self.active)] if is_alone else self.active
        is_first = draw.random() < 0.5
        if is_first:
            self._set_by_hand(by_hand, number)
        is_averaged = self._passes() and not by_hand
        if not is_first:
            self._set_by_hand(by_hand, number)
        steps = list(range(len(self.optimizers)))
        if self.has("in turn", 0.5):
            steps = [draw.choice(steps)]
        draw.shuffle(steps)
        # An optimizer that has not stepped may have gradients that are not averaged.
        self.must_clear = len(steps) < len(self.optimizers)
        synchronizes = draw.random() < (0.1 if is_averaged else 0.5)
        is_read = is_averaged or synchronizes
        clip = ""
        # Without a pass, a kept gradient of an active rank is the program's own.
        if is_read and self.has("clips", 0.7) and (is_whole or has_cleared):
            clip = draw.choice(["value", "norm", "norm" if self.flat is not None else "scale"])
            if "sparse" in self.habits:
                clip = "scale"  # torch clips no sparse gradients
        self.has_clipped = self.has_clipped or bool(clip)
        return self._step(steps, synchronizes, is_read, clip) if self.here else None

    def _clear(self, is_whole: bool) -> bool:
        ways = ["none", "none", "zero"] if self.flat is None else ["flat", "flat", "zero"]
        way = self.draw.choice(ways)
        if self.flat is not None and self.must_clear:
            way = "zero"  # otherwise an unstepped optimizer keeps an averaged gradient
        # Accumulating gradients of a joining rank must be present as averaged.
        may_keep = is_whole or not (self.has_clipped or {"flat", "sparse", "shared"} & self.habits)
        if self.has("keeps", 0.5) and may_keep and not self.must_clear:
            way = ""
        self.has_clipped = self.has_clipped and not way
        if way == "flat" and self.here and self.flat is not None:
            self.flat.zero_()
        elif way and self.here:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=way == "none")
        return bool(way)

    def _set_by_hand(self, ranks: Iterable[int], number: int) -> None:
        hand = self.net.hand
        mine = [rank + 1.5 for rank in ranks if rank in self.here]
        if not mine:
            return
        value = (sum(mine) * hand.detach() + 0.1 * number * len(mine)) * self.share
        if self.flat is not None and hand.grad is not None:
            hand.grad.copy_(value)
        else:
            hand.grad = value

    def _passes(self) -> bool:
        """Take the passes of a step; return whether they leave averaged gradients on all ranks.

        Between two steps all ranks end equally many passes that synchronise, but a rank may leave
        out the only one.
        """
        if "passes per step" in self.habits:
            for _ in range(self.draw.choice([2, 2, 1])):
                self._pass()
            return False
        if self.has("many", 0.4):
            for _ in range(2):
                self._pass(may_skip=False)
            return False
        if self.has("no_sync", 0.6):
            for _ in range(self.draw.choice([1, 2])):
                self._pass(synchronizes=False)
            if self.draw.random() < 0.5:
                self._pass()
            return False
        return self._pass()

    def _pass(self, *, may_skip: bool = True, synchronizes: bool = True) -> bool:
        """Take a pass; return whether all ranks do."""
        heads = [self.draw.choice(["a", "b", "ab", "ab"]) for _ in range(self.place.size)]
        words = [[self.draw.randrange(WORDS) for _ in range(ROWS)] for _ in heads]
        if may_skip and self.has("skips", 0.5):
            heads[self.draw.choice(self.active)] = ""
        losses = [
            self.net(torch.tensor(words[rank]), heads[rank]) for rank in self.here if heads[rank]
        ]
        with contextlib.ExitStack() as stack:
            if not synchronizes and not self.place.is_alone:
                for optimizer in self.optimizers:
                    stack.enter_context(optimizer.no_sync())
            if losses:
                (torch.stack(losses).sum() * self.share).backward()
        return all(heads[rank] for rank in self.active)

    def _step(
        self, steps: list[int], synchronizes: bool, is_read: bool, clip: str
    ) -> list[Tensor | None]:
        seen: list[Tensor | None] = []
        synchronizes = synchronizes and not self.place.is_alone
        if synchronizes:
            for number in steps:
                self.optimizers[number].synchronize()
        stepping = {parameter for number in steps for parameter in self.owned[number]}
        if is_read:
            seen += [p.grad for p in self.parameters if p in stepping]
            if self.flat is not None and len(stepping) == len(self.parameters):
                seen.append(self.flat)
        seen = [None if each is None else each.detach().clone() for each in seen]
        for number in steps:
            _clip(clip, [p for p in self.owned[number] if p.grad is not None])
            optimizer = self.optimizers[number]
            with optimizer.skip_synchronize() if synchronizes else contextlib.nullcontext():
                optimizer.step()
        return [*seen, *self.parameters]

    def _join(self) -> list[Tensor | None]:
        """Make all ranks begin anew with the last one's values."""
        if not self.place.is_alone:
            last = hvd.join()
            hvd.broadcast_parameters(self.net.state_dict(), last)
            for optimizer in self.optimizers:
                hvd.broadcast_optimizer_state(optimizer, last)
        for optimizer in self.optimizers if self.flat is None else ():
            optimizer.zero_grad()
        if self.flat is not None:
            self.flat.zero_()
        return list(self.parameters)


def _clip(how: str, parameters: list[nn.Parameter]) -> None:
    if not parameters:  # torch does not clip an empty list
        return
    if how == "value":
        nn.utils.clip_grad_value_(parameters, 0.05)
    elif how == "norm":
        nn.utils.clip_grad_norm_(parameters, 0.1)
    elif how == "scale":
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 0.5
