"""Compressors with a state, in an optimizer on several ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pool import run
from test_compression import documented_compressor
from torch import Tensor, nn
from torch.optim import SGD
from training import (
    assert_same_on_all_ranks,
    assert_same_weights,
    grads,
    joined_batches,
    loss_of,
    make_model,
    part,
    train,
    weights,
)

import torch_ring as hvd


class Exact(hvd.StatefulCompressor):
    """Loses nothing, and counts."""

    def reduce(self, gradient: Tensor, state: dict[str, Any]) -> Iterator[Any]:
        state["dtype"] = gradient.dtype
        state["calls"] = state.get("calls", 0) + 1
        return (yield hvd.Reduce(gradient))


class Ragged(hvd.StatefulCompressor):
    """Loses nothing either: gathers what is not zero, in two rounds; a scalar goes in one."""

    def reduce(self, gradient: Tensor, state: dict[str, Any]) -> Iterator[Any]:
        positions = gradient.flatten().nonzero()[:, 0].to(torch.int32)
        everyones = [positions for (positions,) in (yield hvd.Gather(positions))]
        values = yield hvd.Gather(gradient.flatten()[positions], torch.tensor(hvd.rank()))
        if gradient.dim() > 0:
            ones = yield hvd.Reduce(torch.ones(2))
            assert ones.tolist() == [1, 1]
        total = torch.zeros(gradient.numel(), dtype=gradient.dtype)
        for rank, (theirs, (value, sender)) in enumerate(zip(everyones, values, strict=True)):
            assert sender == rank
            total[theirs] += value
        return (total / len(values)).view_as(gradient)


class Forgetful(hvd.StatefulCompressor):
    """Top-k without error feedback."""

    def reduce(self, gradient: Tensor, state: dict[str, Any]) -> Iterator[Any]:
        mean, _ = yield from documented_compressor()(0.1).send(gradient, state)
        return mean


COMPRESSORS: dict[str, Callable[[], Any]] = {
    "none": lambda: hvd.Compression.none,
    "fp16": lambda: hvd.Compression.fp16,
    "bf16": lambda: hvd.Compression.bf16,
    "int8": hvd.Compression.int8,
    "powersgd": lambda: hvd.Compression.powersgd(rank=1),
    "topk": lambda: documented_compressor()(0.1),
    "forgetful": Forgetful,
}


def classifies() -> None:
    """Train a classifier: the loss falls as without compression, and the ranks stay equal."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(64 * hvd.size(), 8, generator=generator)
    labels = (inputs @ torch.randn(8, 3, generator=generator)).argmax(1)
    loss_function = nn.CrossEntropyLoss()
    losses = {}
    for name, make in COMPRESSORS.items():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=1.0),
            named_parameters=model.named_parameters(),
            compression=make(),
        )
        for _ in range(30):
            optimizer.zero_grad()
            loss_function(model(part(inputs)), part(labels)).backward()
            optimizer.step()
        assert_same_on_all_ranks(*model.parameters())
        losses[name] = loss_function(model(inputs), labels).item()
    assert losses["none"] < 0.2, "it starts at 1.1"
    near = {name for name, loss in losses.items() if loss < 1.1 * losses["none"]}
    assert near == set(COMPRESSORS) - {"forgetful"}, losses
    assert len(set(losses.values())) == len(losses), "two compressors do the same"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_models_converge(transport, size):
    run(classifies, size, transport=transport)


class Odd(nn.Module):
    """Convolutions in channels_last, a complex weight, a transposed one, a scalar, an empty one."""

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
        return (torch.fft.fft(hidden) * self.spectrum).real * self.scale + self.nothing.sum()


def equals_no_compression(**options: Any) -> None:
    """With nothing lost, every gradient arrives where it belongs, in its own shape."""
    for make in (Exact, Ragged):
        for model in (make_model, Odd):
            compressed, plain = model(), model()
            for copy, compression in ((plain, hvd.Compression.none), (compressed, make())):
                optimizer = hvd.DistributedOptimizer(
                    SGD(copy.parameters(), lr=0.05), compression=compression, **options
                )
                train(copy, optimizer, map(part, joined_batches(steps=3)))
            assert_same_weights(compressed, plain)
            assert_same_on_all_ranks(*compressed.parameters())


def equals_no_compression_however_combined() -> None:
    equals_no_compression()
    equals_no_compression(op=hvd.Sum)
    equals_no_compression(gradient_predivide_factor=4.0)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_equals_no_compression(transport, size):
    run(equals_no_compression_however_combined, size, transport=transport)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_many_small_buckets(transport):
    env = {"TORCH_RING_BUCKET_BYTES": "64"}
    run(equals_no_compression, 2, transport=transport, env=env)


class Recorder(hvd.StatefulCompressor):
    """Keeps what it gets, and the dtype in which the machine computes for it."""

    def reduce(self, gradient: Tensor, state: dict[str, Any]) -> Iterator[Any]:
        state["gradient"] = gradient.clone()
        state["computed"] = (gradient.reshape(1, -1) @ gradient.reshape(-1, 1)).dtype
        return (yield hvd.Reduce(gradient))


def gets_gradients_in_their_shapes() -> None:
    """Also where the elements lie in another order, and in an autocast region."""
    alone, model, compressor = Odd(), Odd(), Recorder()
    optimizer = hvd.DistributedOptimizer(
        SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )
    (batch,) = map(part, joined_batches(steps=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_of(model, batch).backward()
        loss_of(alone, batch).backward()
    for name, parameter in alone.named_parameters():
        if parameter.numel() == 0:
            assert name not in compressor.states
            continue
        gradient = parameter.grad
        expected = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        assert torch.equal(compressor.states[name]["gradient"], expected)
        assert compressor.states[name]["computed"] == torch.float32
    del optimizer  # until now it had to live


def test_a_compressor_gets_gradients_in_their_shapes():
    run(gets_gradients_in_their_shapes, 2)


def accumulates(op: int) -> None:
    """Passes add up as without compression, where 8 bits hold every value."""
    share = 1 if op == hvd.Sum else 1 / 2
    (x,) = parameters = weights(1)
    optimizer = hvd.DistributedOptimizer(
        SGD(parameters, lr=0.0),
        compression=hvd.Compression.int8(),
        backward_passes_per_step=2,
        op=op,
    )
    for _ in range(2):
        optimizer.zero_grad()
        (127 * x).backward()
        (127 * hvd.rank() * x).backward()
        assert grads(parameters) == [127 * 3 * share]
        optimizer.step()
    optimizer.zero_grad()
    (127 * (hvd.rank() + 1) * x).backward()
    optimizer.step()  # after one pass of two
    assert grads(parameters) == [127 * 3 * share]

    (y,) = parameters = weights(1)  # two reductions of one step
    optimizer = hvd.DistributedOptimizer(
        SGD(parameters, lr=0.0), compression=hvd.Compression.int8(), op=op
    )
    (127 * (hvd.rank() + 1) * y).backward()
    ((hvd.rank() + 1) * y).backward()
    assert grads(parameters) == pytest.approx([128 * 3 * share], rel=1e-6)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_accumulation(op):
    run(accumulates, 2, args=(op,))


def branches() -> None:
    """Rank 0 uses a and b, rank 1 uses b and c, nobody d."""
    a, b, c, d = parameters = weights(1, 1, 1, 1)
    compressor = Exact()
    optimizer = hvd.DistributedOptimizer(
        SGD(parameters, lr=0.0),
        named_parameters=zip("abcd", parameters, strict=True),
        compression=compressor,
    )
    for step in range(1, 4):
        optimizer.zero_grad()
        (2 * a + 4 * b if hvd.rank() == 0 else 8 * b + 16 * c).backward()
        assert grads(parameters) == [1, 6, 8, None]
        optimizer.step()
        assert {name: state["calls"] for name, state in compressor.states.items()} == dict.fromkeys(
            "abc", step
        )
    (2 * d).backward()
    assert compressor.states["d"]["calls"] == 1
    assert compressor.states["a"]["calls"] == 3

    late = weights(1)
    optimizer.add_param_group({"params": late})
    (2 * d + 2 * late[0]).backward()
    assert compressor.states["d"]["calls"] == 2
    assert compressor.states["allreduce.noname.1.0"]["calls"] == 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_only_what_has_a_gradient_takes_part(transport):
    run(branches, 2, transport=transport)


def resumes(name: str) -> None:
    batches = [part(batch) for batch in joined_batches(steps=6)]

    def start(model: nn.Module, compressor: Any) -> torch.optim.Optimizer:
        return hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            compression=compressor,
        )

    whole, begun, forgetful = make_model(), make_model(), make_model()
    train(whole, start(whole, COMPRESSORS[name]()), batches)
    compressor = COMPRESSORS[name]()
    train(begun, start(begun, compressor), batches[:3])
    saved = compressor.state_dict()
    assert saved["0.weight"]["error"].any()
    ended, resumed = make_model(), COMPRESSORS[name]()
    for model, state in ((ended, saved), (forgetful, {})):
        model.load_state_dict(begun.state_dict())
        resumed = COMPRESSORS[name]()
        resumed.load_state_dict(state)
        train(model, start(model, resumed), batches[3:])
    for left, right in zip(whole.parameters(), ended.parameters(), strict=True):
        assert torch.equal(left, right)
    assert not torch.equal(whole[0].weight, forgetful[0].weight)


def resumes_all() -> None:
    for name in ("int8", "powersgd", "topk"):
        resumes(name)


def test_a_resumed_run_continues():
    run(resumes_all, 2)


def keeps_state_finite() -> None:
    """A step that GradScaler skips on all ranks leaves nothing behind."""
    for name in ("int8", "powersgd", "topk"):
        model = make_model()
        compressor = COMPRESSORS[name]()
        optimizer = hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=0.1), compression=compressor
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step, batch in enumerate(joined_batches(steps=4)):
            optimizer.zero_grad()
            before = compressor.state_dict()
            overflow = torch.inf if step == 2 and hvd.rank() == 1 else 1.0
            with torch.autocast("cpu", dtype=torch.bfloat16):
                scaler.scale(loss_of(model, part(batch)) * overflow).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 2:
                for parameter, state in before.items():
                    for key, value in state.items():
                        assert torch.equal(compressor.states[parameter][key], value)
        assert scaler.get_scale() == 512.0
        assert all(p.isfinite().all() for p in model.parameters())
        assert_same_on_all_ranks(*model.parameters())


def test_overflow_leaves_the_state_as_it_was():
    run(keeps_state_finite, 2)


def reduces_half_precision() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        weight = nn.Parameter(torch.zeros(3, dtype=dtype))
        compressor = Exact()
        optimizer = hvd.DistributedOptimizer(SGD([weight], lr=1.0), compression=compressor)
        (weight.sum() * (hvd.rank() + 1)).backward()
        assert weight.grad is not None
        assert weight.grad.dtype == dtype
        assert weight.grad.tolist() == [1.5] * 3
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert compressor.states["allreduce.noname.0.0"]["dtype"] == wide
        optimizer.step()


def test_half_precision():
    run(reduces_half_precision, 2)


class Faulty(hvd.StatefulCompressor):
    """Does something wrong on rank 1, in the second round of a matrix."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def reduce(self, gradient: Tensor, state: dict[str, Any]) -> Iterator[Any]:
        mean = yield hvd.Reduce(gradient)
        if gradient.dim() < 2:
            return mean
        here = hvd.rank() == 1
        if self.fault == "asks for less" and here:
            return mean
        if self.fault == "asks for more" and not here:
            return mean
        if self.fault == "raises" and here:
            raise KeyError("a secret")
        if self.fault == "returns nothing" and here:
            return None
        if self.fault == "asks nonsense" and here:
            yield gradient
        if self.fault == "another shape" and here:
            yield hvd.Reduce(gradient[0])
        if self.fault == "another kind" and here:
            yield hvd.Gather(gradient)
        yield hvd.Reduce(gradient)
        return mean


FAULTS = {  # what the other ranks say, and what rank 1
    "asks for less": [r"rank 0: reduce for '0.weight'.*; rank 1: nothing more"] * 2,
    "asks for more": [r"rank 0: nothing more; rank 1: reduce for '0.weight'"] * 2,
    "another shape": [r"float32 \[16, 8\]; rank 1: reduce for '0.weight' float32 \[8\]"] * 2,
    "another kind": [r"rank 0: reduce for '0.weight'.*; rank 1: gather for '0.weight'"] * 2,
    "raises": [r"failed on rank 1: KeyError: 'a secret'", r"^'a secret'$"],
    "returns nothing": [
        r"failed on rank 1: ValueError: '0.weight'.* None",
        r"^'0.weight': reduce\(\) returned None, not a tensor of shape \[16, 8\]",
    ],
    "asks nonsense": [
        r"failed on rank 1: TypeError: '0.weight'",
        r"^'0.weight': yield Gather or Reduce, not tensor",
    ],
}


def fails_everywhere() -> None:
    kinds = {"raises": KeyError, "returns nothing": ValueError, "asks nonsense": TypeError}
    for fault, messages in FAULTS.items():
        model = nn.Sequential(nn.Linear(8, 16))
        optimizer = hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            compression=Faulty(fault),
        )
        kind: type[Exception] = hvd.MismatchError
        if fault in kinds:
            kind = kinds[fault] if hvd.rank() == 1 else hvd.RingError
        with pytest.raises(kind, match=messages[hvd.rank() == 1]):
            model(torch.ones(2, 8)).sum().backward()
        del optimizer
    assert hvd.allreduce(torch.tensor([2.0 * hvd.rank()])).item() == hvd.size() - 1


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_faulty_compressor_is_an_error_on_all_ranks(transport, size):
    run(fails_everywhere, size, transport=transport)


class NoGenerator(hvd.StatefulCompressor):
    """Forgets to yield."""

    def reduce(self, gradient: Tensor, state: dict[str, Any]) -> Any:
        return gradient


def is_used_wrongly() -> None:
    model, other = make_model(), make_model()

    def wrap(model: nn.Module, compression: Any) -> torch.optim.Optimizer:
        return hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), compression=compression)

    with pytest.raises(ValueError, match=r"an instance, Int8Compressor\(\), not the class"):
        wrap(model, hvd.Compression.int8)
    for compression in (hvd.Compression.int8(), hvd.Compression.int8):
        with pytest.raises(ValueError, match=r"Int8Compressor .* in DistributedOptimizer only"):
            hvd.allreduce(torch.ones(2), compression=compression)
    with pytest.raises(hvd.MismatchError, match=r"rank=1, seed=0.*rank=2, seed=0"):
        wrap(model, hvd.Compression.powersgd(rank=hvd.rank() + 1))
    shared = hvd.Compression.powersgd()
    optimizer = wrap(model, shared)
    with pytest.raises(ValueError, match="already serves another parameter"):
        wrap(other, shared)
    train(model, optimizer, map(part, joined_batches(steps=1)))
    optimizer = wrap(other, NoGenerator())
    with pytest.raises(TypeError, match=r"reduce\(\) of NoGenerator\(\) is no generator"):
        loss_of(other, torch.ones(2, 8)).backward()


def test_wrong_use():
    run(is_used_wrongly, 2)


def is_not_used() -> None:
    """On one rank nothing is lost."""
    alone, wrapped = make_model(), make_model()
    compressor = hvd.Compression.powersgd(rank=1)
    optimizer = hvd.DistributedOptimizer(SGD(wrapped.parameters(), lr=0.1), compression=compressor)
    batches = joined_batches(steps=3)
    train(alone, SGD(alone.parameters(), lr=0.1), batches)
    train(wrapped, optimizer, batches)
    assert_same_weights(wrapped, alone)
    assert compressor.state_dict() == {}


def test_one_rank():
    run(is_not_used, 1)
