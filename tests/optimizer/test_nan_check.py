# SPDX-License-Identifier: Apache-2.0
"""nan_check: the first non-finite gradient is named on all ranks, and no rank steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from pool import error_of, eventually, expect_error, run
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from training import take_step, weights

import torch_ring as hvd
from torch_ring.world import current

ERROR = "NonFiniteGradientError"
NAN, INFINITY = float("nan"), float("inf")


def backward(model: nn.Sequential, step: int, spoilt_by: float = 0.0) -> None:
    """Add a number to the gradients of the first two layers."""
    generator = torch.Generator().manual_seed(10 * step + hvd.rank())
    hidden = model[:2](torch.rand(4, 8, generator=generator).to(model[0].weight.dtype))
    hidden.register_hook(lambda gradient: gradient + spoilt_by)
    model[2:](hidden).sum().backward()


def expect(optimizer: Optimizer, *words: str) -> str:
    """Expect an error with these words from step() on all ranks, without any change."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in parameters]
    text = expect_error(ERROR, "", optimizer.step)
    assert all(map(torch.equal, before, parameters))
    assert set(hvd.allgather_object(text)) == {text}
    assert all(word in text for word in words), text
    return text


def name_the_culprit(dtype: torch.dtype, shard_state: bool) -> None:
    """A rank's third step is spoilt in its second layer; then training goes on undisturbed."""
    models, optimizers = [], []
    for nan_check in (True, False):
        torch.manual_seed(1)
        sizes = [(8, 32), (32, 8), (8, 2048), (2048, 4)]  # the last but one has 64 KiB
        layers = [nn.Linear(*size, bias=False, dtype=dtype) for size in sizes]
        models.append(nn.Sequential(*layers))
        adam = AdamW(models[-1].parameters(), lr=0.01)
        options = {"nan_check": nan_check, "shard_state": nan_check and shard_state}
        optimizers.append(hvd.DistributedOptimizer(adam, models[-1].named_parameters(), **options))
    last = hvd.size() - 1
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            if step != 2:
                backward(model, step)
                optimizer.step()
            elif model is models[0]:
                backward(model, step, NAN if hvd.rank() == last else 0.0)
                text = (
                    f"rank {last}: the gradient of '1.weight' has a NaN, step 3 (1 other parameter "
                )
                assert expect(optimizer).startswith(text)
                assert expect(optimizer).startswith(text)  # until zero_grad()
    assert all(map(torch.equal, *(model.parameters() for model in models)))


def spoil_in_ways() -> None:
    """Two ranks at once; accumulated gradients of a rank; gradients set by the program."""
    a, b = parameters = weights(1, 2)
    named = [("a", a), ("b", b)]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.1), named, nan_check=True)

    def spoil(*on: int, value: float = NAN) -> Tensor:
        return a * (value if hvd.rank() in on else 1.0) + b

    def none() -> None:
        for parameter in parameters:
            parameter.grad = None

    spoil(0, 2).backward()
    assert expect(optimizer).startswith("ranks 0, 2: the gradient of 'a' has a NaN, step 1. No")
    optimizer.zero_grad()
    spoil(0).backward()
    spoil(1).backward()  # on top of non-finite averages
    expect(optimizer, "rank 0: ")
    none()
    spoil(1, value=INFINITY).backward()
    expect(optimizer, "rank 1: the gradient of 'a' has an infinity")
    none()
    take_step(optimizer, spoil())
    none()
    a.grad, b.grad = torch.ones(1), torch.tensor([NAN if hvd.rank() == 2 else 1.0])
    expect(optimizer, "rank 2: the gradient of 'b' has a NaN, step 2")
    optimizer.zero_grad()
    spoil(0).backward()  # of one parameter of a step, in a separate pass, like the other one
    (b * 2).backward()
    expect(optimizer, "rank 0: the gradient of 'a' has a NaN")
    optimizer.zero_grad()
    with optimizer.no_sync():
        spoil(1).backward()
    spoil().backward()
    expect(optimizer, "rank 1: the gradient of 'a' has a NaN")
    optimizer.zero_grad()
    spoil(1).backward()
    with optimizer.skip_synchronize():
        expect(optimizer, "rank 1: ")


def spoil_kinds_of_gradients() -> None:
    """Sparse and complex gradients, given memory, groups, compression, passes, and a closure."""
    rank, last = hvd.rank(), hvd.size() - 1
    nan = NAN if rank == last else 1.0
    named = f"rank {last}: the gradient of 'x' has a NaN"

    def check(x: nn.Parameter, loss: Callable[[], Tensor], text: str = named, **options) -> None:
        (y,) = weights(1)
        wrapped = hvd.DistributedOptimizer(
            SGD([x, y], lr=0.1), [("x", x), ("y", y)], nan_check=True, **options
        )
        for _ in range(2):
            wrapped.zero_grad(set_to_none=x.grad is None)
            for _ in range(options.get("backward_passes_per_step", 1)):
                (loss() + y).sum().backward()
            expect(wrapped, text)

    for options in ({}, {"sparse_as_dense": True}):
        rows = nn.Embedding(6, 3, sparse=True)
        check(rows.weight, lambda rows=rows: rows(torch.tensor([rank, 2])) * nan, **options)
    x = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    check(x, lambda x=x: (x * complex(1.0, nan)).abs())
    x = nn.Parameter(torch.ones(6))
    x.grad = torch.zeros(12)[::2]  # strides of its own
    check(x, lambda x=x: x * nan)
    every: list[dict[str, Any]] = [{"backward_passes_per_step": 2}, {"groups": 1}]
    kinds = hvd.Compression
    for compression in (kinds.fp16, kinds.bf16, kinds.int8(), kinds.powersgd()):
        every.append({"compression": compression})
    for options in every:
        x = nn.Parameter(torch.ones(64, 64))
        check(x, lambda x=x: x * nan, **options)
    x = nn.Parameter(torch.ones(5))
    large = f"rank {last}: the gradient of 'x' has a number too large for float16"
    check(x, lambda: x * (7e4 if rank == last else 6e4), large, compression=kinds.fp16)

    optimizer = hvd.DistributedOptimizer(LBFGS([x]), [("x", x)], nan_check=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (x * nan).square().sum()
        loss.backward()
        return loss

    expect_error(ERROR, named, lambda: optimizer.step(closure))


def spoil_compressed_rows() -> None:
    """Gradients of layouts that backward() does not average, set by the program."""
    for convert in (
        Tensor.to_sparse_csr,
        Tensor.to_sparse_csc,
        partial(Tensor.to_sparse_bsr, blocksize=(2, 2)),
    ):
        rows = nn.Parameter(convert(torch.eye(4)))
        optimizer = hvd.DistributedOptimizer(SGD([rows], lr=0.1), [("rows", rows)], nan_check=True)
        rows.grad = convert(torch.eye(4) * NAN)
        expect_error(ERROR, "the gradient of 'rows' has a NaN", optimizer.step)


def come_again() -> None:
    """A layer has two gradients in a pass, whose bucket may be sent already: one is spoilt."""
    for first in (True, False):
        layer = nn.Linear(4, 4, bias=False)
        named = [("layer", layer.weight)]
        optimizer = hvd.DistributedOptimizer(SGD([layer.weight], lr=0.1), named, nan_check=True)
        spoilt = NAN if hvd.rank() == 1 else 1.0
        rows = torch.ones(2, 4, requires_grad=True)
        inner = checkpoint(layer, rows, use_reentrant=True) * (spoilt if first else 1.0)
        # The gradient of the outer use comes first.
        (layer(inner) * (1.0 if first else spoilt)).sum().backward()
        expect(optimizer, "rank 1: the gradient of 'layer' has a NaN")


def join_and_spoil() -> None:
    """The remaining ranks have other positions among themselves, but errors keep their ranks."""
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.1), [("x", x)], nan_check=True)
    take_step(optimizer, x)
    if hvd.rank() > 0:
        optimizer.zero_grad()
        (x * (NAN if hvd.rank() == 2 else 1.0)).backward()
        expect_error(ERROR, "rank 2: the gradient of 'x' has a NaN, step 2", optimizer.step)
    optimizer.zero_grad()
    hvd.join()
    take_step(optimizer, x)


def spoil_in_a_set() -> None:
    members = hvd.add_process_set([1, 2])
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(
        SGD([x], lr=0.1), [("x", x)], nan_check=True, process_set=members
    )
    (x * (NAN if hvd.rank() != 1 else 1.0)).backward()
    odd = f"rank {0 if hvd.rank() == 0 else 2}: "  # rank 0 steps alone
    expect_error(ERROR, odd + "the gradient of 'x' has a NaN", optimizer.step)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("check", "args", "size"),
    [
        (name_the_culprit, (torch.float32, False), 2),
        (name_the_culprit, (torch.bfloat16, False), 3),
        (name_the_culprit, (torch.float32, True), 3),
        (spoil_in_ways, (), 3),
        (spoil_kinds_of_gradients, (), 2),
        (spoil_compressed_rows, (), 1),
        (come_again, (), 2),
        (join_and_spoil, (), 3),
        (spoil_in_a_set, (), 3),
    ],
)
def test_the_gradient_is_named(transport, check, args, size):
    env = {"TORCH_RING_DIRECT_GRADIENT_BYTES": "16384"}
    if transport == "tcp":
        env["TORCH_RING_BUCKET_BYTES"] = "1024"
    run(check, size, args=args, transport=transport, env=env)


@on_ranks(2, transport="tcp", env={"TORCH_RING_BUCKET_BYTES": "4"})
def test_a_rank_is_named_though_the_nan_is_everywhere() -> None:
    """The first bucket is reduced before the last gradient comes: by then it has everyone's NaN."""
    x, y = weights(1, 1)
    optimizer = hvd.DistributedOptimizer(SGD([x, y], lr=0.0), [("x", x), ("y", y)], nan_check=True)

    def reduced() -> int:
        records = current.engine().records()
        return sum(r.operation == "allreduce" and r.finished_ns > 0 for r in records)

    for step in range(3):
        optimizer.zero_grad()
        before = reduced()
        between = x * 1.0
        if step == 2:
            between.register_hook(
                lambda _, n=before: None if eventually(lambda: reduced() > n) else 1
            )
        factor = NAN if step == 2 and hvd.rank() == 1 else 1.0
        (between + y * factor).backward()
        if step < 2:
            optimizer.step()
    expect(optimizer, "rank 1: the gradient of 'y' has a NaN")


def leave_it_to_a_scaler(enabled: bool, unscales: bool, fused: bool) -> None:
    """One rank overflows in the second step, which the scaler skips on all; then they go on."""
    x = nn.Parameter(torch.ones(3))
    plain = AdamW([x], lr=0.1, fused=True) if fused else SGD([x], lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, [("x", x)], nan_check=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100, enabled=enabled)
    for step in range(4):
        optimizer.zero_grad()
        spoilt = step == 1 and hvd.rank() == 1
        scaler.scale((x * (INFINITY if spoilt else 1.0)).sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        before = x.detach().clone()
        kind, _ = error_of(lambda: scaler.step(optimizer))
        assert kind == (ERROR if step == 1 and not enabled else "nothing")
        scaler.update()
        assert torch.equal(before, x) == (step == 1)
        assert x.isfinite().all()
    assert scaler.get_scale() == (2.0 if enabled else 1.0)


def train_elastically() -> None:
    """elastic.run calls a function once whose first step is spoilt."""
    calls = []
    layer = nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(SGD(layer.parameters(), lr=0.1), nan_check=True)

    @hvd.elastic.run
    def train(_: hvd.elastic.TorchState) -> None:
        calls.append(hvd.rank())
        take_step(optimizer, layer(torch.ones(1, 2)).sum() * NAN)

    expect_error(ERROR, "", lambda: train(hvd.elastic.TorchState(layer, optimizer)))
    assert len(calls) == 1


def differ_when_wrapping() -> None:
    def wrap(nan_check: bool, op: hvd.ReduceOp = hvd.Average) -> None:
        hvd.DistributedOptimizer(SGD(weights(1), lr=0.1), nan_check=nan_check, op=op)

    text = expect_error("MismatchError", "nan_check=False", lambda: wrap(hvd.rank() == 1))
    assert "nan_check=True" in text
    expect_error("ValueError", "needs op=Average or Sum", lambda: wrap(True, hvd.Adasum))


@pytest.mark.parametrize(
    ("check", "args"),
    [
        (leave_it_to_a_scaler, (True, False, False)),
        (leave_it_to_a_scaler, (True, True, False)),
        (leave_it_to_a_scaler, (True, False, True)),
        (leave_it_to_a_scaler, (False, True, False)),
        (leave_it_to_a_scaler, (False, False, True)),
        (train_elastically, ()),
        (differ_when_wrapping, ()),
    ],
)
def test_scalers_and_arguments(check, args):
    run(check, 2, args=args)


def step_with(nan_check: bool | None, is_error: bool) -> None:
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.1), [("x", x)], nan_check=nan_check)
    optimizer.step()
    (x * NAN).backward()
    kind, text = error_of(optimizer.step)
    assert kind == (ERROR if is_error else "nothing")
    who = "rank 0" if hvd.size() == 1 else "ranks 0, 1"
    assert not is_error or text.startswith(f"{who}: the gradient of 'x' has a NaN, step 2")
    assert x.isfinite().all() == is_error


@pytest.mark.parametrize(
    ("variable", "argument", "is_error", "size"),
    [("", None, False, 2), ("1", None, True, 2), ("1", False, False, 1), ("0", True, True, 1)],
)
def test_the_variable_and_the_argument(variable, argument, is_error, size):
    run(step_with, size, args=(argument, is_error), env={"TORCH_RING_NAN_CHECK": variable})
