"""Training on several ranks gives the weights of one process that trains on the joined batch."""

import contextlib
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from pool import run
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from training import (
    assert_same_on_all_ranks,
    assert_same_weights,
    joined_batches,
    loss_of,
    make_model,
    part,
    train,
)
from worlds import on_both_transports

import torch_ring as hvd

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda model: Adam(model.parameters(), lr=0.01),
}


def compare_with_one_process(name: str) -> None:
    for set_to_none in (True, False):
        alone, together = make_model(), make_model()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[name](together), named_parameters=together.named_parameters()
        )
        batches = joined_batches(steps=5)
        train(alone, OPTIMIZERS[name](alone), batches, set_to_none)
        train(together, optimizer, map(part, batches), set_to_none)
        assert_same_weights(together, alone)
        assert_same_on_all_ranks(*together.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 3])
@on_both_transports
def test_equals_one_process_on_the_joined_batch(transport, size, name):
    run(compare_with_one_process, size, args=(name,), transport=transport)


@on_both_transports
def test_many_small_buckets(transport):
    """Every gradient has a bucket of its own; buckets are planned again after the first step."""
    env = {"TORCH_RING_BUCKET_BYTES": "64"}
    run(compare_with_one_process, 2, args=("adam",), transport=transport, env=env)


def compare_with_ddp(store_path: str) -> None:
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    store = distributed.FileStore(store_path, hvd.size())
    distributed.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    ours, theirs = make_model(), DistributedDataParallel(make_model())
    optimizer = hvd.DistributedOptimizer(Adam(ours.parameters(), lr=0.01))
    batches = [part(batch) for batch in joined_batches(steps=5)]
    train(ours, optimizer, batches)
    train(theirs, Adam(theirs.parameters(), lr=0.01), batches)
    assert_same_weights(ours, theirs.module)
    distributed.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_equals_ddp(size, tmp_path):
    run(compare_with_ddp, size, args=(str(tmp_path / "store"),))


class Tied(nn.Module):
    """One weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, batch: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(batch)))


class Strided(nn.Module):
    """Convolutions in channels_last, a complex weight, a transposed one and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.spectrum = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, batch: Tensor) -> Tensor:
        image = batch.view(-1, 2, 2, 2).to(memory_format=torch.channels_last)
        hidden = self.convolution(image).flatten(1) @ self.transposed.t()
        spectrum = torch.fft.fft(hidden) * self.spectrum
        return spectrum.real * self.scale + self.nothing.sum()


def train_unusual_model(make: Callable[[], nn.Module]) -> None:
    alone, together = make(), make()
    optimizer = hvd.DistributedOptimizer(SGD(together.parameters(), lr=0.05, momentum=0.9))
    batches = joined_batches(steps=4)
    train(alone, SGD(alone.parameters(), lr=0.05, momentum=0.9), batches)
    train(together, optimizer, map(part, batches))
    assert_same_weights(together, alone)
    for parameter in together.parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()


@pytest.mark.parametrize("make", [Tied, Strided])
def test_unusual_parameters(make):
    run(train_unusual_model, 2, args=(make,))


def clip_gradients() -> None:
    alone, together = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(SGD(together.parameters(), lr=0.5))
    batches = joined_batches(steps=4)

    def clip(model: nn.Module) -> Callable[[], Tensor]:
        return lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    train(alone, SGD(alone.parameters(), lr=0.5), batches, before_step=clip(alone))
    train(together, optimizer, map(part, batches), before_step=clip(together))
    assert_same_weights(together, alone)


def test_clipping_sees_averaged_gradients():
    run(clip_gradients, 2)


def train_with_loss_scaling(as_horovod: bool) -> list[Tensor]:
    """Train with loss scaling; with `as_horovod`, in the way of scripts for Horovod."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, batch in enumerate(joined_batches(steps=4)):
        optimizer.zero_grad()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, part(batch))
        overflow = step == 2 and hvd.rank() == 1
        scaler.scale(loss * torch.inf if overflow else loss).backward()
        if as_horovod:
            optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize() if as_horovod else contextlib.nullcontext():
            scaler.step(optimizer)
        scaler.update()
        stayed = all(map(torch.equal, before, model.parameters()))
        assert stayed == (step == 2), "a step is skipped on all ranks or on none"
    assert scaler.get_scale() == 512.0
    assert_same_on_all_ranks(*model.parameters())
    return list(model.parameters())


def compare_ways_of_loss_scaling() -> None:
    plain = train_with_loss_scaling(as_horovod=False)
    assert all(map(torch.equal, plain, train_with_loss_scaling(as_horovod=True)))


def test_grad_scaler_skips_a_step_on_all_ranks():
    run(compare_ways_of_loss_scaling, 2)


def scale_accumulated_losses() -> None:
    """Scale losses with accumulation and sparse gradients; the last step has one backward less."""

    def play(wrap: Callable[[Optimizer], Optimizer], ranks: list[int]) -> nn.Module:
        words = nn.Embedding(8, 2, sparse=True)
        nn.init.ones_(words.weight)
        optimizer = wrap(SGD(words.parameters(), lr=0.5))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for passes in (2, 2, 1):
            optimizer.zero_grad()
            for step in range(passes):
                for rank in ranks:
                    loss = words(torch.tensor([rank, step, 7])).square().sum() / len(ranks)
                    scaler.scale(loss).backward()
            if hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return words

    together = play(lambda o: hvd.DistributedOptimizer(o, backward_passes_per_step=2), [hvd.rank()])
    assert_same_weights(together, play(lambda o: o, list(range(hvd.size()))))


def test_grad_scaler_with_accumulation_and_sparse_gradients():
    run(scale_accumulated_losses, 2)


def minimize(line_search: str | None) -> None:
    alone, together = make_model(), make_model()
    batches = joined_batches(steps=3)

    def lbfgs(model: nn.Module) -> torch.optim.LBFGS:
        return torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=6, line_search_fn=line_search)

    def step(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        return optimizer.step(closure)

    by_one, by_all = lbfgs(alone), hvd.DistributedOptimizer(lbfgs(together))
    for batch in batches:
        expected = step(alone, by_one, batch)
        torch.testing.assert_close(step(together, by_all, part(batch)), expected)
    assert_same_weights(together, alone)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("size", [2, 3])
def test_lbfgs_takes_the_decisions_of_one_process(size, line_search):
    run(minimize, size, args=(line_search,))


def step_with_closure() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(SGD([weight], lr=1.0))

    def closure() -> float:
        optimizer.zero_grad()
        (weight.sum() * hvd.rank()).backward()
        return float(hvd.rank())

    loss = optimizer.step(closure=closure)
    assert isinstance(loss, float)
    assert loss == 0.5
    assert weight.tolist() == [-0.5, -0.5]
    assert optimizer.step(lambda: None) is None


def test_closure_returns_the_loss_of_all_ranks():
    run(step_with_closure, 2)


def return_losses() -> None:
    """The result of a closure is a loss of any numeric type, or refused."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(SGD([weight], lr=0.0))
    mine, mean = hvd.rank() + 3, (hvd.size() - 1) / 2 + 3
    for loss, expected in (
        (float(mine), mean),
        (np.float32(mine), np.float32(mean)),
        (np.float64(mine), np.float64(mean)),
        (torch.tensor(float(mine)), torch.tensor(mean)),
        # An average is not a whole number.
        (mine, mean),
        (np.int64(mine), mean),
        (np.array(float(mine)), mean),
        (torch.tensor(mine), torch.tensor(mean).double()),
        (None, None),
    ):
        found = optimizer.step(lambda loss=loss: loss)
        assert type(found) is type(expected)
        assert found == expected
    for wrong in ({"loss": 1.0}, (1.0, 2.0), "1.0", 1j):
        with pytest.raises(TypeError, match=f"as a tensor or a number.* {type(wrong).__name__}$"):
            optimizer.step(lambda wrong=wrong: wrong)


def test_losses_of_closures():
    run(return_losses, 2)


def train_with_scheduler(attach_first: bool) -> None:
    alone, together = make_model(), make_model()
    batches = joined_batches(steps=4)
    for model, parts in ((alone, batches), (together, map(part, batches))):
        optimizer: Optimizer = SGD(model.parameters(), lr=0.2)
        if model is together and not attach_first:
            optimizer = hvd.DistributedOptimizer(optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
        if model is together and attach_first:
            assert hvd.DistributedOptimizer(optimizer) is optimizer
        for batch in parts:
            train(model, optimizer, [batch])
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.002)
    assert_same_weights(together, alone)


@pytest.mark.parametrize("attach_first", [True, False])
def test_learning_rate_schedulers(attach_first):
    run(train_with_scheduler, 2, args=(attach_first,))


class TwoParts:
    """A user's compressor: sends the part that survives a cast, and drops the rest."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Tensor]:
        return tensor.to(torch.float16), tensor

    @staticmethod
    def decompress(tensor: Tensor, ctx: Tensor) -> Tensor:
        return tensor.to(ctx.dtype)


def check_options(options: dict[str, object], factor: float) -> None:
    """Check gradients that are exact in 16 bits: the result is exact as well."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(SGD([weight], lr=1.0), **options)
    for _ in range(2):
        optimizer.zero_grad()
        (weight * torch.tensor([1.0, 2.0, 4.0]) * (hvd.rank() + 1)).sum().backward()
        total = hvd.size() * (hvd.size() + 1) / 2 * factor
        torch.testing.assert_close(weight.grad, torch.tensor([1.0, 2.0, 4.0]) * total)
        assert weight.grad.dtype == torch.float32
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 1 / 2),
        ({"op": hvd.Sum}, 1),
        ({"gradient_predivide_factor": 4.0}, 1 / 2),
        ({"compression": hvd.Compression.fp16}, 1 / 2),
        ({"compression": hvd.Compression.bf16, "op": hvd.Sum}, 1),
        ({"compression": TwoParts}, 1 / 2),
        ({"compression": TwoParts()}, 1 / 2),
    ],
)
def test_ways_to_combine_gradients(options, factor):
    run(check_options, 2, args=(options, factor))


def count_python_calls() -> None:
    def calls_of_backward(layers: int) -> int:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))
        # Plans the buckets anew, and then compares weights once more.
        train(model, optimizer, [torch.ones(2, 4)] * 2)
        optimizer.zero_grad()
        loss = loss_of(model, torch.ones(2, 4))
        events: list[str] = []
        sys.setprofile(lambda _frame, event, _argument: events.append(event))
        loss.backward()
        sys.setprofile(None)
        return len(events)

    assert calls_of_backward(2) == calls_of_backward(60)


def test_python_does_nothing_per_parameter():
    run(count_python_calls, 2)
