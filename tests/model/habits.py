# SPDX-License-Identifier: Apache-2.0
"""Random training programs: habits of real ones in any combination; see `oracle`.

Random programs of tests/support/carried_programs.py keep, write and clip gradients.
"""

from __future__ import annotations

import random

import torch
from oracle import Play, Program
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

import torch_ring as hvd

ROWS = 3  # of a rank in a pass
WORDS = 6
HABITS = (
    "sparse",  # the embedding has sparse gradients
    "checkpoints",  # the layer is a reentrant segment, each time that it is applied
    "twice",  # the layer is applied twice
    "behind",  # it is applied again behind that, and in no segment
    "joins",  # ranks have different numbers of batches, and call join()
    "freezes",  # the layer is frozen and thawed
    "by hand",  # a gradient is set beside backward(), on all ranks or on one
    "skips",  # a rank has no data, and leaves out backward()
    "passes per step",  # two
    "two optimizers",
    "in turn",  # one of the two steps
    "shared",  # the two have trunk and layer in common
)


class Habitual(nn.Module):
    """A net; each pass uses a part of it; `hand` is in no graph."""

    def __init__(self, seed: int, habits: set[str]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.habits = habits
        self.words = nn.Embedding(WORDS, 3, sparse="sparse" in habits)
        self.trunk = nn.Linear(3, 4)
        self.layer = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({name: nn.Linear(4, 2) for name in "ab"})
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
        a, b = (list(head.parameters()) for head in self.heads.values())
        first = [*self.words.parameters(), *both, *a]
        if "two optimizers" not in self.habits:
            return [[*first, *b, self.hand]]
        if "shared" in self.habits:
            return [[*first, self.hand], [*both, *b]]
        return [first, [*b, self.hand]]


class _Training:
    """The program of a seed at one place. All places draw the same numbers."""

    def __init__(self, place: Play, seed: int) -> None:
        self.place = place
        self.draw = random.Random(f"{seed} of {place.size}")
        self.habits = {habit for habit in HABITS if self.draw.random() < 0.35}
        self.net = Habitual(seed, self.habits)
        self.optimizers = []
        for parameters in self.net.owned():
            # A large eps: rounding must not decide the direction of a step.
            is_adam = self.draw.random() < 0.5 and "sparse" not in self.habits
            plain = AdamW(parameters, 0.01, eps=1e-3) if is_adam else SGD(parameters, 0.1)
            passes = 2 if "passes per step" in self.habits else 1
            wrapped = place.wrap(self.net, plain, backward_passes_per_step=passes)
            self.optimizers.append(wrapped[1])
        self.share = 1 / place.size if place.is_alone else 1.0
        self.active: list[int] = []  # ranks that have not joined
        self.here: list[int] = []  # those of them that this place plays

    def has(self, habit: str) -> bool:
        """Return whether the program follows a habit now."""
        return self.draw.random() < 0.5 and habit in self.habits

    def step(self, number: int) -> list[Tensor | None] | None:
        """Take a step; return averaged gradients, if there are any, and weights."""
        draw = self.draw
        if self.has("freezes"):  # joined ranks do so, too, as they go on like the others
            self.net.layer.requires_grad_(draw.random() < 0.5)
        set_to_none = draw.random() < 0.7
        for optimizer in self.optimizers if self.here else ():
            optimizer.zero_grad(set_to_none)
        by_hand = draw.choice([self.active, [draw.choice(self.active)]])
        by_hand = by_hand if self.has("by hand") else []
        is_first = draw.random() < 0.5
        if is_first:
            self._set_by_hand(by_hand, number)
        if "passes per step" in self.habits:
            for _ in range(draw.choice([2, 2, 1])):
                self._pass()
            is_averaged = False
        else:
            is_averaged = self._pass() and not by_hand
        if not is_first:
            self._set_by_hand(by_hand, number)
        steps = list(self.optimizers)
        draw.shuffle(steps)
        if self.has("in turn"):
            steps = steps[:1]
        if not self.here:
            return None
        parameters = list(self.net.parameters())
        gradients = [p.grad if p.grad is None else p.grad.clone() for p in parameters]
        for optimizer in steps:
            optimizer.step()
        return [*gradients, *parameters] if is_averaged else [*parameters]

    def _set_by_hand(self, ranks: list[int], number: int) -> None:
        hand = self.net.hand
        factors = [rank + 1.5 for rank in ranks if rank in self.here]
        if factors:
            value = sum(factors) * hand.detach() + 0.1 * number * len(factors)
            hand.grad = value * self.share

    def _pass(self) -> bool:
        """Take a pass; return whether all ranks do."""
        heads = [self.draw.choice(["a", "b", "ab", "ab"]) for _ in range(self.place.size)]
        words = [[self.draw.randrange(WORDS) for _ in range(ROWS)] for _ in heads]
        if self.has("skips"):
            heads[self.draw.choice(self.active)] = ""
        losses = [
            self.net(torch.tensor(words[rank]), heads[rank]) for rank in self.here if heads[rank]
        ]
        if losses:
            (torch.stack(losses).sum() * self.share).backward()
        return all(heads[rank] for rank in self.active)

    def join(self) -> None:
        """Make all ranks begin anew with the last one's values."""
        if self.place.is_alone:
            return
        last = hvd.join()
        hvd.broadcast_parameters(self.net.state_dict(), last)
        for optimizer in self.optimizers:
            hvd.broadcast_optimizer_state(optimizer, last)


def at_random(play: Play, seed: int) -> Program:
    """The program of a seed."""
    training = _Training(play, seed)
    joins = "joins" in training.habits
    for _ in range(2):
        counts = [training.draw.randint(1, 6) if joins else 6 for _ in range(play.size)]
        for number in range(max(counts)):
            training.active = [rank for rank, count in enumerate(counts) if number < count]
            training.here = [rank for rank in play.ranks if rank in training.active]
            yield training.step(number)
        if joins:
            training.join()
            yield training.net.parameters()
