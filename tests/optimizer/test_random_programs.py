"""Random sequences of backward, zero_grad, step and more: gradients as in a simple model."""

import random
from dataclasses import dataclass

import pytest
import torch
from pool import run
from torch import Tensor, nn
from torch.optim import SGD

import torch_ring as hvd

WORDS, STEPS, PROGRAMS = 6, 50, 12
ACTIONS = {
    "backward": 6,
    "backward under no_sync": 3,
    "optimizer.zero_grad": 1,
    "optimizer.zero_grad in place": 1,
    "model.zero_grad": 1,
    "halve": 1,
    "step": 2,
    "synchronize": 2,
}


@dataclass
class Expected:
    """The expected gradient of word i: a reduced part, and a part of each rank."""

    share: float  # of one rank's gradient in the reduced one
    reduced: Tensor
    local: Tensor  # [rank, word]
    accumulating: bool = False

    def reduce(self) -> None:
        self.reduced = self.reduced + self.local.sum(0) * self.share
        self.local = torch.zeros_like(self.local)
        self.accumulating = False

    def clear(self) -> None:
        self.reduced = torch.zeros_like(self.reduced)
        self.local = torch.zeros_like(self.local)
        self.accumulating = False


def run_random_program(seed: int, op: int, sparse_as_dense: bool) -> None:
    """Run random actions, the same on all ranks, with different gradients."""
    choice, size, me = random.Random(seed), hvd.size(), hvd.rank()
    words = nn.Embedding(WORDS, 2)  # torch adds sparse to dense wrongly in one column
    other = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(
        SGD([words.weight, other], lr=0.0), op=op, sparse_as_dense=sparse_as_dense
    )
    expected = Expected(
        1 if op == hvd.Sum else 1 / size, torch.zeros(WORDS), torch.zeros(size, WORDS)
    )
    history = []
    for _ in range(STEPS):
        (action,) = choice.choices(list(ACTIONS), list(ACTIONS.values()))
        kinds = [choice.choice(["none", "sparse", "sparse", "dense"]) for _ in range(size)]
        if action == "backward under no_sync":  # all ranks must have a gradient, or none
            kinds = [kind if kind != "none" else "sparse" for kind in kinds]
        read = [[choice.randrange(WORDS) for _ in range(choice.randrange(4))] for _ in range(size)]
        history.append((action, kinds, read))

        if "backward" in action:
            for rank in range(size):
                if kinds[rank] != "none":
                    for word in read[rank]:
                        expected.local[rank, word] += rank + 1
            loss = other.sum()
            if kinds[me] != "none":
                words.sparse = kinds[me] == "sparse"
                loss = loss + (me + 1) * words(torch.tensor(read[me], dtype=torch.int64)).sum()
            if action == "backward":
                loss.backward()
                expected.reduce()
            else:
                with optimizer.no_sync():
                    loss.backward()
                expected.accumulating = True
        elif "zero_grad" in action:
            whose = words if action == "model.zero_grad" else optimizer
            whose.zero_grad(set_to_none="in place" not in action)
            expected.clear()
        elif action == "halve":
            if words.weight.grad is not None and not expected.accumulating:
                words.weight.grad.mul_(0.5)
                expected.reduced = expected.reduced / 2
        else:
            optimizer.step() if action == "step" else optimizer.synchronize()
            expected.reduce()

        # Before the reduction, each rank may hold its part of the sum in any form.
        gradient = words.weight.grad
        found = torch.zeros(WORDS) if gradient is None else gradient.detach().to_dense()[:, 0]
        if not expected.accumulating:
            torch.testing.assert_close(
                found, expected.reduced, msg=lambda text: f"program {seed}: {text}\n{history[-8:]}"
            )


def run_random_programs(op: int, sparse_as_dense: bool) -> None:
    for seed in range(PROGRAMS):
        run_random_program(seed, op, sparse_as_dense)


@pytest.mark.parametrize(
    ("transport", "size", "op"), [("shm", 2, hvd.Sum), ("tcp", 3, hvd.Average)], ids=["shm", "tcp"]
)
@pytest.mark.parametrize("sparse_as_dense", [False, True], ids=["sparse", "sparse as dense"])
def test_gradients_after_every_step(transport, size, op, sparse_as_dense):
    run(run_random_programs, size, args=(op, sparse_as_dense), transport=transport)
