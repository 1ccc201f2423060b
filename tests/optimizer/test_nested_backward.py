"""Backward passes inside a backward pass: reentrant checkpoints."""

import os
import signal
from typing import Any

import pytest
import torch
from pool import run
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from training import joined_batches, part

import torch_ring as hvd
from torch_ring._C import PassDecision
from torch_ring.optimizer.backward_sync import backward_sync_of

on_both_transports = pytest.mark.parametrize("transport", ["shm", "tcp"])


class Repeated(nn.Module):
    """A layer in two segments; other layers in segments of their own, and outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 8, dtype=torch.float64)
        self.shared = nn.Linear(8, 8, dtype=torch.float64)
        self.alone = nn.Linear(8, 8, dtype=torch.float64)
        self.last = nn.Linear(8, 3, dtype=torch.float64)

    def forward(self, x: Tensor, segments: bool) -> Tensor:
        def run_segment(function: nn.Module, value: Tensor) -> Tensor:
            if not segments:
                return function(value)
            return checkpoint(function, value, use_reentrant=True)

        x = self.first(x)
        x = run_segment(self.shared, x).tanh()
        x = run_segment(self.alone, x).tanh()
        x = run_segment(self.shared, x).tanh()
        return self.last(x)


def train_in_segments(passes: int, nested_twice: bool, split: bool) -> None:
    alone, together = Repeated(), Repeated()
    reference = SGD(alone.parameters(), lr=0.1)
    parameters = list(together.parameters())
    halves = [parameters[:3], parameters[3:]] if split else [parameters]
    optimizers = [
        hvd.DistributedOptimizer(SGD(half, lr=0.1), backward_passes_per_step=passes)
        for half in halves
    ]
    for step in range(4):
        reference.zero_grad()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number in range(passes):
            batch = joined_batches(steps=8)[2 * step + number].double()
            alone(batch, segments=False).square().mean().backward()
            rows = part(batch).requires_grad_()
            if nested_twice:
                out = checkpoint(together, rows, True, use_reentrant=True)
            else:
                out = together(rows, segments=True)
            agreed = optimizers[0]._backward_sync.number
            out.square().mean().backward()
            if number == passes - 1:
                assert optimizers[0]._backward_sync.number == agreed + 1
        reference.step()
        for optimizer in optimizers:
            optimizer.step()
        for mine, other in zip(together.parameters(), alone.parameters(), strict=True):
            assert (mine - other).abs().max() < 1e-10


@on_both_transports
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("nested_twice", [False, True], ids=["", "nested twice"])
@pytest.mark.parametrize("split", [False, True], ids=["one optimizer", "two optimizers"])
def test_a_layer_in_two_segments(transport, passes, nested_twice, split):
    args, env = (passes, nested_twice, split), {"TORCH_RING_BUCKET_BYTES": "256"}
    run(train_in_segments, 2, args=args, transport=transport, env=env)


def fail_in_a_segment() -> None:
    """A nested pass fails, and the next one does not: nothing of the first remains."""
    model = Repeated()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))

    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    rows = part(joined_batches(steps=1)[0]).double().requires_grad_()
    handle = model.first.weight.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model(rows, segments=True).square().mean().backward()
    handle.remove()
    optimizer.zero_grad()
    model(rows, segments=True).square().mean().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    model(rows, segments=False).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).abs().max() < 1e-10
    optimizer.step()


@on_both_transports
def test_a_nested_pass_fails(transport):
    run(fail_in_a_segment, 2, transport=transport)


class Tied(nn.Module):
    """A layer that is used outside segments, after its uses inside them; and other layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 8, dtype=torch.float64)
        self.shared = nn.Linear(8, 8, dtype=torch.float64)
        self.middle = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor, segments: bool) -> Tensor:
        def run_segment(function: nn.Module, value: Tensor) -> Tensor:
            return checkpoint(function, value, use_reentrant=True) if segments else function(value)

        x = run_segment(self.shared, self.first(x).tanh()).tanh()
        x = run_segment(self.shared, self.middle(x)).tanh()
        return self.shared(x)


def train_tied(how: str, op: hvd.ReduceOp, passes: int) -> None:
    alone, together = Tied(), Tied()
    reference = SGD(alone.parameters(), lr=0.1)
    parameters = list(together.parameters())
    optimizer = hvd.DistributedOptimizer(
        SGD(parameters, lr=0.1), op=op, backward_passes_per_step=passes
    )
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    scale = 1 if op == hvd.Average else hvd.size()
    for step in range(5):
        reference.zero_grad()
        if how == "in the program's memory":
            parts = flat.zero_().split([p.numel() for p in parameters])
            for parameter, its in zip(parameters, parts, strict=True):
                parameter.grad = its.view_as(parameter)
        else:
            optimizer.zero_grad(set_to_none=how != "on zeros")
        segments = {"late": step >= 3, "on one rank": hvd.rank() == 0}.get(how, True)
        if how == "in turns":
            segments = step % hvd.size() == hvd.rank()
        for number in range(passes):
            batch = joined_batches(steps=10)[2 * step + number].double()
            (scale * alone(batch, segments=False).square().mean()).backward()
            rows = part(batch).requires_grad_()
            together(rows, segments).square().mean().backward()
        for mine, other in zip(parameters, alone.parameters(), strict=True):
            assert (mine.grad - other.grad).abs().max() < 1e-10
        if how == "in the program's memory":
            expected = torch.cat([p.grad.flatten() for p in alone.parameters()])
            assert (flat - expected).abs().max() < 1e-10
        reference.step()
        optimizer.step()
        for mine, other in zip(parameters, alone.parameters(), strict=True):
            assert (mine - other).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("transport", "size", "op"), [("shm", 2, hvd.Average), ("tcp", 3, hvd.Sum)]
)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    "how", ["always", "late", "on one rank", "in turns", "on zeros", "in the program's memory"]
)
def test_a_layer_outside_of_segments_and_inside(transport, size, op, passes, how):
    env = {"TORCH_RING_BUCKET_BYTES": "256"}
    run(train_tied, size, args=(how, op, passes), transport=transport, env=env)


def interrupt_the_reduction(transport: str) -> None:
    """Rank 0 gets Ctrl-C while a pass is reduced that needs a second agreement for a part."""
    alone, together = Tied(), Tied()
    reference = SGD(alone.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(SGD(together.parameters(), lr=0.1))
    reducers = backward_sync_of(hvd.global_process_set)._reducers
    reduce = reducers.reduce

    def press_ctrl_c(decision: PassDecision, *more: Any) -> None:
        reducers.reduce = reduce  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGINT)
        reduce(decision, *more)
        assert decision.has_another_round == (transport == "tcp")

    for step in range(3):
        reference.zero_grad()
        optimizer.zero_grad()
        batch = joined_batches(steps=4)[step].double()
        alone(batch, segments=False).square().mean().backward()
        rows = part(batch).requires_grad_()
        is_interrupted = hvd.rank() == step == 0
        if is_interrupted:
            reducers.reduce = press_ctrl_c  # type: ignore[method-assign]
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            together(rows, segments=True).square().mean().backward()
            assert not is_interrupted
        except KeyboardInterrupt:
            assert is_interrupted
        finally:
            signal.signal(signal.SIGINT, before)
        reference.step()
        optimizer.step()
        for mine, other in zip(together.parameters(), alone.parameters(), strict=True):
            assert (mine - other).abs().max() < 1e-10


@on_both_transports
def test_an_interrupt_loses_no_gradient_that_comes_again(transport):
    env = {"TORCH_RING_BUCKET_BYTES": "256"}
    run(interrupt_the_reduction, 2, args=(transport,), transport=transport, env=env)
