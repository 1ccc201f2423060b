# SPDX-License-Identifier: Apache-2.0
"""nan_check: the first non-finite gradient is named on all ranks, and no rank steps."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from pool import error_of, eventually, expect_error, run
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from training import take_step, weights

import torch_ring as hvd
from torch_ring.world import current

ERROR = "NonFiniteGradientError"


class Spoiler:
    """Adds a value to the gradient from layer `at`, and so to those of earlier layers."""

    def __init__(self, model: nn.Sequential, at: int) -> None:
        self.value = 0.0
        for parameter in model[at].parameters():
            parameter.register_hook(lambda gradient: gradient + self.value)
        model[at].register_full_backward_hook(lambda _module, inputs, _: self._spoilt(inputs))

    def _spoilt(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return tuple(each + self.value for each in inputs) if self.value else None


def make_layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return four layers, of 256 weights each and 64 KiB in the last but one."""
    torch.manual_seed(1)
    sizes = [(8, 32), (32, 8), (8, 2048), (2048, 4)]
    return nn.Sequential(*(nn.Linear(*size, bias=False, dtype=dtype) for size in sizes))


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + hvd.rank())
    dtype = next(model.parameters()).dtype
    model(torch.rand(4, 8, generator=generator).to(dtype).requires_grad_()).sum().backward()


def expect(optimizer: Optimizer, *words: str) -> str:
    """Expect an error with these words from step() on all ranks, without any change."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in parameters]
    text = expect_error(ERROR, "", optimizer.step)
    assert all(map(torch.equal, before, parameters))
    assert set(hvd.allgather_object(text)) == {text}
    assert all(word in text for word in words), text
    return text


def name_the_culprit(value: float, has: str, dtype: torch.dtype, shard_state: bool = False) -> None:
    """A rank's third step is spoilt in its second layer; then training goes on undisturbed."""
    model, without = make_layers(dtype), make_layers(dtype)
    named = list(model.named_parameters())
    make = AdamW if shard_state else SGD
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters(), lr=0.01), named, nan_check=True, shard_state=shard_state
    )
    other = hvd.DistributedOptimizer(make(without.parameters(), lr=0.01))
    spoiler = Spoiler(model, at=1)
    last = hvd.size() - 1
    for step in (0, 1, 2, 3):
        spoiler.value = value if step == 2 and hvd.rank() == last else 0.0
        optimizer.zero_grad()
        backward(model, step)
        if step == 2:
            begin = f"rank {last}: the gradient of '1.weight' {has}, step 3 (1 other parameter "
            assert expect(optimizer).startswith(begin)
            assert expect(optimizer).startswith(begin)  # until zero_grad()
            continue
        optimizer.step()
        other.zero_grad()
        backward(without, step)
        other.step()
    for ours, theirs in zip(model.parameters(), without.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def spoil_several() -> None:
    """Two ranks at once; accumulated gradients of a rank; gradients set by the program."""
    a, b = parameters = weights(1, 2)
    named = [("a", a), ("b", b)]
    rank = hvd.rank()

    def wrap(**options: object) -> Optimizer:
        return hvd.DistributedOptimizer(SGD(parameters, lr=0.1), named, nan_check=True, **options)

    def spoil(on: set[int], value: float = float("nan")) -> Tensor:
        return a * (value if rank in on else 1.0) + b

    optimizer = wrap()
    spoil({0, 2}).backward()
    assert expect(optimizer).startswith("ranks 0, 2: the gradient of 'a' has a NaN, step 1. No")
    optimizer.zero_grad()
    (spoil({0}, float("inf")) if rank else spoil({0})).backward()
    expect(optimizer, "rank 0: the gradient of 'a' has a NaN")
    spoil({1}).backward()  # on top of non-finite averages
    expect(optimizer, "rank 0: ")
    for parameter in parameters:
        parameter.grad = None
    spoil({1}, float("inf")).backward()
    expect(optimizer, "rank 1: the gradient of 'a' has an infinity")
    for parameter in parameters:
        parameter.grad = None
    spoil(set()).backward()
    optimizer.step()
    optimizer.zero_grad()
    a.grad, b.grad = torch.ones(1), torch.tensor([float("nan") if rank == 2 else 1.0])
    expect(optimizer, "rank 2: the gradient of 'b' has a NaN, step 2")
    optimizer.zero_grad()
    spoil({0}).backward()  # of one parameter of a step, in a separate pass, like the other one
    (b * 2).backward()
    expect(optimizer, "rank 0: the gradient of 'a' has a NaN")
    optimizer.zero_grad()
    with optimizer.no_sync():
        spoil({1}).backward()
    spoil(set()).backward()
    expect(optimizer, "rank 1: the gradient of 'a' has a NaN")
    optimizer.zero_grad()
    spoil({1}).backward()
    with optimizer.skip_synchronize():
        expect(optimizer, "rank 1: ")

    optimizer.zero_grad()
    optimizer = wrap(backward_passes_per_step=2)
    spoil({1}).backward()
    spoil(set()).backward()
    expect(optimizer, "rank 1: the gradient of 'a' has a NaN, step 1")


def spoil_kinds_of_gradients() -> None:
    """Sparse and complex gradients, given memory, groups, compression, and a closure."""
    rank, last = hvd.rank(), hvd.size() - 1
    nan = float("nan") if rank == last else 1.0
    named = f"rank {last}: the gradient of 'x' has a NaN"

    def check(x: nn.Parameter, loss: Callable[[], Tensor], text: str = named, **options) -> None:
        parameters = [x, *weights(1)]
        wrapped = hvd.DistributedOptimizer(
            SGD(parameters, lr=0.1), [("x", x), ("y", parameters[1])], nan_check=True, **options
        )
        for _ in range(2):
            wrapped.zero_grad(set_to_none=x.grad is None)
            (loss() + parameters[1]).sum().backward()
            expect(wrapped, text)

    def plain(count: int = 5) -> nn.Parameter:
        return nn.Parameter(torch.ones(count))

    for options in ({}, {"sparse_as_dense": True}):
        rows = nn.Embedding(6, 3, sparse=True)
        check(rows.weight, lambda rows=rows: rows(torch.tensor([rank, 2])) * nan, **options)
    x = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    check(x, lambda x=x: (x * complex(1.0, nan)).abs())
    x = plain(6)
    x.grad = torch.zeros(12)[::2]  # strides of its own
    check(x, lambda x=x: x * nan)
    x = plain()
    check(x, lambda x=x: x * nan, groups=[[x]])
    for compression in (
        hvd.Compression.fp16,
        hvd.Compression.bf16,
        hvd.Compression.int8(),
        hvd.Compression.powersgd(),
    ):
        x = nn.Parameter(torch.ones(64, 64))
        check(x, lambda x=x: x * nan, compression=compression)
    x = plain()
    large = f"rank {last}: the gradient of 'x' has a number too large for float16"
    check(x, lambda: x * (7e4 if rank == last else 6e4), large, compression=hvd.Compression.fp16)

    x = plain()
    optimizer = hvd.DistributedOptimizer(LBFGS([x]), [("x", x)], nan_check=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (x * nan).square().sum()
        loss.backward()
        return loss

    text = expect_error(ERROR, named, lambda: optimizer.step(closure))
    assert text.startswith(named)


def come_again() -> None:
    """A layer has two gradients in a pass, whose bucket may be sent already: one is spoilt."""
    for first in (True, False):
        layer = nn.Linear(4, 4, bias=False)
        named = [("layer", layer.weight)]
        optimizer = hvd.DistributedOptimizer(SGD([layer.weight], lr=0.1), named, nan_check=True)
        spoilt = float("nan") if hvd.rank() == 1 else 1.0
        rows = torch.ones(2, 4, requires_grad=True)
        inner = checkpoint(layer, rows, use_reentrant=True) * (spoilt if first else 1.0)
        # The gradient of the outer use comes first.
        (layer(inner) * (1.0 if first else spoilt)).sum().backward()
        expect(optimizer, "rank 1: the gradient of 'layer' has a NaN")


def spoil_a_bucket_that_is_reduced_early() -> str:
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
        factor = float("nan") if step == 2 and hvd.rank() == 1 else 1.0
        (between + y * factor).backward()
        if step < 2:
            optimizer.step()
    return expect(optimizer, "rank 1: the gradient of 'y' has a NaN")


def test_a_rank_is_named_though_the_nan_is_everywhere():
    env = {"TORCH_RING_BUCKET_BYTES": "4"}
    run(spoil_a_bucket_that_is_reduced_early, 2, transport="tcp", env=env)


def spoil_compressed_rows(to_layout: Callable[[Tensor], Tensor]) -> None:
    rows = nn.Parameter(to_layout(torch.eye(4)))
    optimizer = hvd.DistributedOptimizer(SGD([rows], lr=0.1), [("rows", rows)], nan_check=True)
    rows.grad = to_layout(torch.eye(4) * float("nan"))
    expect_error(ERROR, "the gradient of 'rows' has a NaN", optimizer.step)


@pytest.mark.parametrize(
    "to_layout",
    [Tensor.to_sparse_csr, Tensor.to_sparse_csc, partial(Tensor.to_sparse_bsr, blocksize=(2, 2))],
    ids=["csr", "csc", "bsr"],
)
def test_a_nan_of_a_compressed_layout_is_found(to_layout):
    run(spoil_compressed_rows, 1, args=(to_layout,))


def join_and_spoil() -> None:
    """The remaining ranks have other positions among themselves, but errors keep their ranks."""
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.1), [("x", x)], nan_check=True)
    x.backward()
    optimizer.step()
    if hvd.rank() > 0:
        optimizer.zero_grad()
        (x * (float("nan") if hvd.rank() == 2 else 1.0)).backward()
        text = expect_error(ERROR, "rank 2: the gradient of 'x' has a NaN, step 2", optimizer.step)
        assert text.startswith("rank 2")
        optimizer.zero_grad()
    hvd.join()
    x.backward()
    optimizer.step()


def spoil_in_a_set() -> None:
    members = hvd.add_process_set([1, 2])
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(
        SGD([x], lr=0.1), [("x", x)], nan_check=True, process_set=members
    )
    (x * (float("nan") if hvd.rank() != 1 else 1.0)).backward()
    odd = f"rank {0 if hvd.rank() == 0 else 2}: "  # rank 0 steps alone
    text = expect_error(ERROR, odd + "the gradient of 'x' has a NaN", optimizer.step)
    assert text.startswith(odd)


def leave_it_to_a_scaler(enabled: bool, unscales: bool, fused: bool) -> None:
    """One rank overflows in the second step, which the scaler skips on all; then they go on."""
    x = nn.Parameter(torch.ones(3))
    plain = AdamW([x], lr=0.1, fused=True) if fused else SGD([x], lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, [("x", x)], nan_check=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100, enabled=enabled)
    for step in range(4):
        optimizer.zero_grad()
        spoilt = step == 1 and hvd.rank() == 1
        scaler.scale((x * (float("inf") if spoilt else 1.0)).sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        before = x.detach().clone()
        if step == 1 and not enabled:
            assert error_of(lambda: scaler.step(optimizer))[0] == ERROR
        else:
            scaler.step(optimizer)
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
        take_step(optimizer, layer(torch.ones(1, 2)).sum() * float("nan"))

    expect_error(ERROR, "", lambda: train(hvd.elastic.TorchState(layer, optimizer)))
    assert len(calls) == 1


def differ_when_wrapping() -> None:
    def wrap(nan_check: bool, op: hvd.ReduceOp = hvd.Average) -> None:
        hvd.DistributedOptimizer(SGD(weights(1), lr=0.1), nan_check=nan_check, op=op)

    text = expect_error("MismatchError", "nan_check=False", lambda: wrap(hvd.rank() == 1))
    assert "nan_check=True" in text
    with pytest.raises(ValueError, match=r"nan_check .* needs op=Average or Sum"):
        wrap(True, hvd.Adasum)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("check", "args", "size"),
    [
        (name_the_culprit, (float("nan"), "has a NaN", torch.float32), 2),
        (name_the_culprit, (float("nan"), "has a NaN", torch.bfloat16), 3),
        (name_the_culprit, (-float("inf"), "has an infinity", torch.float32), 3),
        (name_the_culprit, (float("nan"), "has a NaN", torch.float32, True), 3),
        (spoil_several, (), 3),
        (spoil_kinds_of_gradients, (), 2),
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


@pytest.mark.parametrize(
    ("check", "args"),
    [
        (leave_it_to_a_scaler, (True, False, False)),
        (leave_it_to_a_scaler, (True, True, False)),
        (leave_it_to_a_scaler, (True, False, True)),
        (leave_it_to_a_scaler, (True, True, True)),
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
    (x * float("nan")).backward()
    kind, text = error_of(optimizer.step)
    assert kind == (ERROR if is_error else "nothing")
    if is_error:
        who = {1: "rank 0", 2: "ranks 0, 1"}[hvd.size()]
        assert text.startswith(f"{who}: the gradient of 'x' has a NaN, step 2")
    assert x.isfinite().all() == is_error


@pytest.mark.parametrize(
    ("variable", "argument", "is_error", "size"),
    [("", None, False, 2), ("1", None, True, 2), ("1", False, False, 1), ("0", True, True, 1)],
)
def test_the_variable_and_the_argument(variable, argument, is_error, size):
    run(step_with, size, args=(argument, is_error), env={"TORCH_RING_NAN_CHECK": variable})
