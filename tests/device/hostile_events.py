"""Events in the middle of training on a device: ranks that join, leave, fail, or add parameters.

Each function is called on every rank with the name of a device's type. Gradients are constants, so
the sum of all steps is known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from training import FailingBackward

import torch_ring as hvd

LR = 2.0**-4

Factors = dict[int, int]  # from parameters to gradients


class Trainer:
    """Trains some parameters with given gradients, and knows the result.

    Args:
        ranks: the ranks that train together, perhaps without this one.
    """

    def __init__(
        self, device: str, run_ahead: bool, count: int = 3, ranks: hvd.ProcessSet | None = None
    ) -> None:
        self.ranks = ranks or hvd.global_process_set
        self.device = device
        self.weights = [nn.Parameter(torch.zeros(8, device=device)) for _ in range(count)]
        self.optimizer = hvd.DistributedOptimizer(
            SGD(self.weights, lr=LR), process_set=self.ranks, run_ahead=run_ahead
        )
        self.wanted = [0.0] * count

    def add(self, weight: nn.Parameter) -> None:
        self.weights.append(weight)
        self.wanted.append(0.0)
        self.optimizer.add_param_group({"params": [weight]})

    def backward(self, factors: Factors) -> None:
        self.optimizer.zero_grad()
        self.loss(factors).backward()

    def loss(self, factors: Factors) -> Tensor:
        return torch.stack([(self.weights[i] * f).sum() for i, f in factors.items()]).sum()

    def step(self, of: Callable[[int], Factors], absent: Sequence[int] = ()) -> None:
        """Take a step in which each rank except the absent ones has the gradients `of(rank)`."""
        if hvd.rank() not in absent:
            self.backward(of(hvd.rank()))
            self.optimizer.step()
        self.expect(of, absent)

    def expect(self, of: Callable[[int], Factors], absent: Sequence[int] = ()) -> None:
        ranks = self.ranks.ranks or list(range(hvd.size()))
        if not self.ranks.included():
            ranks = [hvd.rank()]
        for rank in set(ranks).difference(absent):
            for index, factor in of(rank).items():
                self.wanted[index] -= LR * factor / len(ranks)

    def steps(self, of: Callable[[int], Factors], count: int) -> None:
        for _ in range(count):
            self.step(of)

    def settle(self) -> None:
        """Take steps in which every rank has every gradient, and compare."""
        size = hvd.size()
        self.steps(lambda rank: {i: size * (rank + i + 1) for i in range(len(self.weights))}, 12)
        found = [weight.detach().cpu().tolist() for weight in self.weights]
        assert found == [[wanted] * 8 for wanted in self.wanted], (found, self.wanted)


def first(rank: int) -> Factors:
    return {0: 6 * (rank + 1)}


def with_branch(whose: int, branch: int) -> Callable[[int], Factors]:
    """Return the gradients of a pass with a new one: hosts that run ahead all know of it.

    One rank has it besides the usual one, the others instead.
    """
    return lambda rank: {0: 6, branch: 12} if rank == whose else {branch: 6}


def join_and_go_on(device: str, run_ahead: bool) -> None:
    """Ranks join with an unaveraged gradient, and while others have new ones."""
    size, rank = hvd.size(), hvd.rank()
    trainer = Trainer(device, run_ahead, 6)
    trainer.steps(first, 6)
    for epoch in range(3):
        leaving = (epoch + 1) % size
        trainer.step(with_branch(leaving, 1 + epoch))
        for number in range(5):
            other = (leaving + 1) % size
            of = with_branch(other, 4 + epoch % 2) if number == 2 else first
            trainer.step(of, absent=[leaving])
        last = hvd.join()
        assert last != leaving
        hvd.broadcast_parameters(dict(enumerate(trainer.weights)), last)
        trainer.steps(first, 3 * epoch)
    assert rank == hvd.rank()
    trainer.settle()


def join_at_once(device: str, run_ahead: bool) -> None:
    """All ranks join in the same pass, one with a new gradient; a rank joins before any pass."""
    trainer = Trainer(device, run_ahead)
    for epoch in range(4):
        trainer.steps(first, 4)
        trainer.step(with_branch(epoch % hvd.size(), 1))
        last = hvd.join()
        hvd.broadcast_parameters(dict(enumerate(trainer.weights)), last)
        for _ in range(2):
            trainer.step(first, absent=[0])
        last = hvd.join()
        hvd.broadcast_parameters(dict(enumerate(trainer.weights)), last)
    trainer.settle()


def add_a_process_set(device: str, run_ahead: bool) -> None:
    """Two ranks also train a model of their own for a while."""
    trainer = Trainer(device, run_ahead)
    for _ in range(2):
        trainer.steps(first, 6)
        trainer.step(with_branch(1, 1))
        pair = hvd.add_process_set([0, 1] if hvd.size() > 2 else [0])
        beside = Trainer(device, run_ahead, ranks=pair)
        for number in range(6):
            trainer.step(with_branch(number % 2, 2))
            beside.step(with_branch(number % 2, number % 3))
        beside.settle()
        del beside
        hvd.remove_process_set(pair)
    trainer.steps(first, 6)
    trainer.settle()


def add_parameters(device: str, run_ahead: bool) -> None:
    """add_param_group() while passes are planned, and passes with new gradients after it."""
    trainer = Trainer(device, run_ahead)
    trainer.steps(first, 6)
    trainer.settle()
    trainer.add(nn.Parameter(torch.zeros(8, device=device)))
    trainer.steps(first, 2)
    for number in range(8):
        trainer.step(with_branch(number % hvd.size(), 1 + number % 3))
    trainer.settle()


def add_optimizers(device: str, run_ahead: bool) -> None:
    """Optimizers come and go, on the device and on the host."""
    trainer = Trainer(device, run_ahead)
    for where in (device, "cpu"):
        trainer.steps(first, 6)
        other = Trainer(where, run_ahead)
        for number in range(8):
            trainer.step(with_branch(number % 2, 1))
            other.step(with_branch(number % 2, 1 + number // 4))
        other.settle()
        del other
    trainer.steps(first, 6)
    trainer.settle()


def train_in_turn(device: str, run_ahead: bool) -> None:
    """Two optimizers take passes in turn, as a GAN's, some with a new gradient."""
    for branch_at in (8, 9):
        one, other = Trainer(device, run_ahead), Trainer(device, run_ahead)
        for number in range(20):
            one.step(first)
            other.step(with_branch(number % 2, 1) if number in (branch_at, 15) else first)
        one.settle()
        other.settle()


def read_and_keep_gradients(device: str, run_ahead: bool) -> None:
    """`grad` is the average after each pass, None where no rank has one; kept ones stay."""
    size, rank = hvd.size(), hvd.rank()
    trainer = Trainer(device, run_ahead)
    trainer.steps(lambda _: {0: 6, 1: 6, 2: 6}, 4)
    kept = []
    for number in range(12):
        owner = number % (size + 1)  # of the branch; sometimes no rank
        trainer.backward({0: 6 * number, 1: 6} if rank == owner else {0: 6 * number})
        gradients = [weight.grad for weight in trainer.weights]
        average = None if owner == size else 6.0 / size
        for gradient, wanted in zip(gradients, (6.0 * number, average, None), strict=True):
            assert (gradient is None) == (wanted is None)
            kept.append((gradient, wanted))
        if number % 3 == 0:
            assert gradients[0].tolist() == [6.0 * number] * 8
        trainer.optimizer.step()
    for gradient, wanted in kept:
        assert gradient is None or gradient.cpu().tolist() == [wanted] * 8


def clear_without_the_optimizer(device: str, run_ahead: bool) -> None:
    """The program sets `grad` to None itself, or to a tensor of its own."""
    trainer = Trainer(device, run_ahead)
    for number in range(16):
        for weight in trainer.weights:
            weight.grad = None
        of = with_branch(number % 2, 1) if number > 3 else first
        trainer.loss(of(hvd.rank())).backward()
        trainer.weights[0].grad = trainer.weights[0].grad * 2
        trainer.optimizer.step()
        trainer.expect(of)
        trainer.expect(lambda rank: {0: of(rank).get(0, 0)})  # noqa: B023
    trainer.settle()


def fail_in_backward(trainer: Trainer, *, sent: bool) -> None:
    """Raise in a backward pass, before the first gradient or after the last but one."""
    trainer.optimizer.zero_grad()
    losses = [lambda: FailingBackward.apply(trainer.loss({0: 6})), lambda: trainer.loss({1: 6})]
    parts = [make() for make in (losses if sent else losses[::-1])]  # the last one goes first
    with pytest.raises(RuntimeError, match="out of luck"):
        (parts[0] + parts[1]).backward()


def both(rank: int) -> Factors:
    return {0: 6, 1: 6 * rank}


def fail_before_any_gradient(device: str, run_ahead: bool) -> None:
    """The pass is repeated on one rank: the others notice nothing."""
    trainer = Trainer(device, run_ahead)
    for number in range(10):
        if number in (3, 7) and hvd.rank() == 1:
            fail_in_backward(trainer, sent=False)
        trainer.step(both)
    trainer.settle()


def fail_with_buckets_on_their_way(device: str, run_ahead: bool) -> None:
    """No later pass can be right: an error on every rank, and a new world works."""
    for early in (2, 8):
        trainer = Trainer(device, run_ahead)
        trainer.steps(both, early)
        fails = hvd.rank() == 1
        if fails:
            hvd.barrier()  # not before the others are here
            fail_in_backward(trainer, sent=True)
        with pytest.raises(hvd.RingError):
            # The error may overtake the end of the barrier on the other ranks.
            run_until_error(trainer, (lambda: None) if fails else hvd.barrier)
        hvd.shutdown()
        hvd.init()
    trainer = Trainer(device, run_ahead)
    trainer.steps(both, 4)
    trainer.settle()


def run_until_error(trainer: Trainer, before: Callable[[], object] = lambda: None) -> None:
    """Run an event, then take steps and read the weights after each: an error must come soon."""
    before()
    for _ in range(40):
        trainer.step(both)
        trainer.weights[0].detach().cpu()


def leave_out_a_step(device: str, run_ahead: bool) -> None:
    """One rank calls step() once less: all ranks get an error."""
    for early in (2, 9):
        # With a third weight, which has no gradient, steps agree: the other ranks then take the
        # next pass for one that they left out, average it, and all go on together.
        trainer = Trainer(device, run_ahead, count=2)
        trainer.steps(both, early)
        left_out = functools.partial(trainer.backward, both(1))
        # A rank that runs ahead may find that another one has read the reports before it and left.
        wanted = (hvd.MismatchError, hvd.PeerLostError) if run_ahead else hvd.MismatchError
        with pytest.raises(wanted, match=r"step|has left|left: MismatchError"):
            run_until_error(trainer, left_out if hvd.rank() == 1 else lambda: None)
        hvd.shutdown()
        hvd.init()


def wait_elsewhere(device: str, run_ahead: bool) -> None:
    """One rank has fewer batches and goes to a barrier: all ranks get an error.

    Hosts that run ahead wait for their devices, and cannot see this: only the timeout ends it.
    """
    for early in (2, 9) if run_ahead else (2,):  # before and after the first planned pass
        trainer = Trainer(device, run_ahead)
        trainer.steps(both, early)
        with pytest.raises(hvd.TimeoutError if run_ahead else hvd.MismatchError):
            run_until_error(trainer, hvd.barrier if hvd.rank() == 1 else lambda: None)
        hvd.shutdown()
        hvd.init()


def leave_early(device: str, run_ahead: bool) -> None:
    """One rank has fewer batches and leaves: the others get an error, and can begin anew."""
    for early in (2, 9):
        trainer = Trainer(device, run_ahead)
        trainer.steps(both, early)
        if hvd.rank() != 1:
            with pytest.raises(hvd.PeerLostError):
                run_until_error(trainer)
        hvd.shutdown()
        hvd.init()


def call_in_another_order(device: str, run_ahead: bool) -> None:
    """A rank without data calls a collective on the device before it steps: right, or an error."""
    trainer = Trainer(device, run_ahead)
    trainer.steps(first, 8)
    try:
        for number in range(6):
            if hvd.rank() == 1:
                trainer.optimizer.zero_grad()
            else:
                trainer.backward(first(hvd.rank()))
            ones = torch.ones(3, device=device)
            pending = hvd.allreduce_async(ones, op=hvd.Sum, name=f"beside {number}")
            trainer.optimizer.step()
            assert pending.wait().tolist() == [hvd.size()] * 3
            trainer.expect(first, absent=[1])
    except (
        hvd.MismatchError,
        hvd.PeerLostError,
    ) as error:  # the latter on a rank whose peer got the error first
        assert "run_ahead=False" in str(error)  # noqa: PT017
        assert run_ahead
        hvd.shutdown()
        hvd.init()
        return
    trainer.settle()


EVENTS: list[Callable[[str, bool], None]] = [
    join_and_go_on,
    join_at_once,
    add_a_process_set,
    add_parameters,
    add_optimizers,
    train_in_turn,
    read_and_keep_gradients,
    clear_without_the_optimizer,
    fail_before_any_gradient,
    fail_with_buckets_on_their_way,
    leave_out_a_step,
    wait_elsewhere,
    leave_early,
    call_in_another_order,
]
