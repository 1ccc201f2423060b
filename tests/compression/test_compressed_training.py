# SPDX-License-Identifier: Apache-2.0
"""Training with stateful compressors: its results, their state in a resumed run, their errors."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from oracle import Play, Program, expect_one_process
from pool import run
from torch import Tensor, nn
from torch.optim import SGD
from training import (
    assert_same_on_all_ranks,
    grads,
    joined_batches,
    loss_of,
    make_model,
    part,
    train,
    weights,
)
from training_compressors import COMPRESSORS, Exact, Ragged
from zoo import Strided, net

import torch_ring as hvd


class Recorder(hvd.StatefulCompressor):
    """Records its gradient, and the dtype of a product that it computes."""

    def reduce(self, gradient: Tensor, state: dict[str, Any]) -> Iterator[Any]:
        state["gradient"] = gradient.clone()
        state["computed"] = (gradient.reshape(1, -1) @ gradient.reshape(-1, 1)).dtype
        return (yield hvd.Reduce(gradient))


def check_gradients_of_the_compressor() -> None:
    """Gradients keep their shape in channels_last and in an autocast region."""
    alone, model, compressor = Strided(), Strided(), Recorder()
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
    del optimizer  # it had to live until here


def use_different_parameters() -> None:
    """Rank 0 uses a and b, rank 1 uses b and c, no rank d."""
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


def check_half_precision() -> None:
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


@pytest.mark.parametrize(
    ("check", "size", "transport"),
    [
        (check_gradients_of_the_compressor, 2, "shm"),
        (use_different_parameters, 2, "shm"),
        (use_different_parameters, 2, "tcp"),
        (check_half_precision, 2, "shm"),
    ],
)
def test_compressed_training(check, size, transport):
    run(check, size, transport=transport)


def trained(
    play: Play, make: Callable[[], Any], compressor: Callable[[], Any], options: dict[str, Any]
) -> Program:
    """Two passes a step: they are reduced one by one, or together, also in step()."""
    model, compression = make(), compressor()
    _, optimizer = play.wrap(
        model, SGD(model.parameters(), lr=0.05), compression=compression, **options
    )
    share = play.share(options.get("op", hvd.Average))
    batches = play.batches(6)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            (share * loss_of(model, next(batches))).backward()
        optimizer.step()
        yield model.parameters()
    if play.size == 1:
        assert compression.state_dict() == {}, "one rank does not compress"


@pytest.mark.parametrize(
    ("transport", "size", "env"),
    [("shm", 2, {}), ("tcp", 3, {"TORCH_RING_BUCKET_BYTES": "64"})],
    ids=["shm", "many buckets over tcp"],
)
@pytest.mark.parametrize(
    ("compressor", "options"),
    [
        (Exact, {}),
        (Exact, {"gradient_predivide_factor": 4.0}),
        (Exact, {"backward_passes_per_step": 2}),
        (Ragged, {"op": hvd.Sum}),
        (Ragged, {"backward_passes_per_step": 3}),
    ],
)
def test_exact_compressors_equal_no_compression(transport, size, env, compressor, options):
    for make in (net, Strided):
        args = make, compressor, options
        expect_one_process(trained, *args, size=size, transport=transport, env=env)


def test_one_rank_loses_nothing():
    expect_one_process(trained, net, functools.partial(hvd.Compression.powersgd, 1), {}, size=1)


def check_resumed_run(name: str) -> None:
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


def skip_a_step(name: str) -> None:
    """A step whose gradients are infinite on one rank leaves the state unchanged."""
    model = make_model()
    compressor = COMPRESSORS[name]()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), compression=compressor)
    for step, batch in enumerate(joined_batches(steps=3)):
        optimizer.zero_grad()
        before = compressor.state_dict()
        overflow = torch.inf if step == 1 and hvd.rank() == 1 else 1.0
        (loss_of(model, part(batch)) * overflow).backward()
        unchanged = [
            torch.equal(compressor.states[parameter][key], value)
            for parameter, state in before.items()
            for key, value in state.items()
        ]
        assert all(unchanged) == (step in (0, 1)), "before the first step there is no state"
    assert_same_on_all_ranks(*[p.grad for p in model.parameters()])


@pytest.mark.parametrize("name", ["int8", "powersgd"])
@pytest.mark.parametrize("check", [check_resumed_run, skip_a_step])
def test_the_state(check, name):
    run(check, 2, args=(name,))


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
        if self.fault == "raises" and here:
            raise KeyError("a secret")
        if self.fault == "returns nothing" and here:
            return None
        if self.fault == "asks nonsense" and here:
            yield gradient
        if self.fault == "another shape" and here:
            yield hvd.Reduce(gradient[0])
        yield hvd.Reduce(gradient)
        return mean


FAULTS = {  # the messages of the other ranks, and of rank 1
    "asks for less": [r"rank 0: reduce for '0.weight'.*; rank 1: nothing more"] * 2,
    "another shape": [r"float32 \[16, 8\]; rank 1: reduce for '0.weight' float32 \[8\]"] * 2,
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


@on_ranks(3)
def test_a_faulty_compressor_is_an_error_on_all_ranks() -> None:
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


class NoGenerator(hvd.StatefulCompressor):
    """Forgets to yield."""

    def reduce(self, gradient: Tensor, state: dict[str, Any]) -> Any:
        return gradient


@on_ranks(2)
def test_wrong_use_of_compressors() -> None:
    model, other = make_model(), make_model()

    def wrap(model: nn.Module, compression: Any) -> torch.optim.Optimizer:
        return hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), compression=compression)

    with pytest.raises(ValueError, match=r"Int8Compressor .* in DistributedOptimizer only"):
        hvd.allreduce(torch.ones(2), compression=hvd.Compression.int8())
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
