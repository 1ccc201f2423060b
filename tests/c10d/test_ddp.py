# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel, its communication hooks and its relatives, on ring beside gloo."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.support.groups import IS_TORCH_2_14, default_group, on_ring
from tests.support.pool import run
from tests.support.shared import is_shared
from tests.support.worlds import on_both_transports

STEPS = 4


class Branches(nn.Module):
    """A model in which one of two branches is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.left = nn.Linear(16, 4)
        self.right = nn.Linear(16, 4)

    def forward(self, batch: Tensor, left: bool) -> Tensor:
        hidden = self.norm(torch.relu(self.first(batch)))
        result: Tensor = (self.left if left else self.right)(hidden)
        return result


def batch(step: int, rank: int | None = None) -> Tensor:
    """Return a batch of a rank, by default of this one."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(step * 10 + rank))


def train(group: Any, *, hook: Any = None, both: bool = True, **options: Any) -> list[Tensor]:
    """Return the weights after some steps with the backend of `group`."""
    # A hook that begins operations in callbacks needs one bucket: with several, the operations
    # would come in another order on each rank.
    bucket_mb = 0.001 if hook is None else 25
    model = DistributedDataParallel(
        Branches(), process_group=group, bucket_cap_mb=bucket_mb, **options
    )
    if hook is not None:
        model.register_comm_hook(*hook(group))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step), True).square().mean()
        if both:
            loss = loss + model(batch(step + 100), False).square().mean()
        loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def compare(cases: dict[str, dict[str, Any]], tolerance: float = 1e-5) -> None:
    gloo = dist.new_group(backend="gloo")
    for name, options in cases.items():
        for got, want in zip(train(None, **options), train(gloo, **options), strict=True):
            torch.testing.assert_close(
                got,
                want,
                rtol=10 * tolerance,
                atol=tolerance,
                msg=lambda text, name=name: f"{name}: {text}",
            )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused parameters": {"both": False, "find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True},
}


@pytest.mark.parametrize(("transport", "size"), [("shm", 3), ("tcp", 2)])
def test_like_gloo(transport: str, size: int) -> None:
    on_ring(compare, size, OPTIONS, transport=transport)


class Complex(nn.Module):
    """A model of complex and real parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(3))
        self.shift = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, batch: Tensor) -> Tensor:
        result: Tensor = batch.to(torch.complex64) @ self.weight * self.scale + self.shift
        return result.abs()


def complex_gradients() -> None:
    gloo = dist.new_group(backend="gloo")
    for has_views in (False, True):
        gradients = []
        for group in (None, gloo):
            model = DistributedDataParallel(
                Complex(), process_group=group, gradient_as_bucket_view=has_views
            )
            for step in range(STEPS):
                model.zero_grad()
                model(batch(step)).square().sum().backward()
                gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        for got, want in zip(gradients[:STEPS], gradients[STEPS:], strict=True):
            torch.testing.assert_close(got, want)


@on_both_transports
def test_complex_parameters(transport: str) -> None:
    on_ring(complex_gradients, 2, transport=transport)


def fp16(group: Any) -> tuple[Any, Callable[..., Any]]:
    return group, default_hooks.fp16_compress_hook


def power_sgd(group: Any) -> tuple[Any, Callable[..., Any]]:
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    return state, powerSGD_hook.powerSGD_hook


def bf16(group: Any) -> tuple[Any, Callable[..., Any]]:
    return group, default_hooks.bf16_compress_hook


def compressed_power_sgd(group: Any) -> tuple[Any, Callable[..., Any]]:
    state, hook = power_sgd(group)
    return state, default_hooks.fp16_compress_wrapper(hook)


# gloo rounds each sum of two ranks to 16 bits, ring only the sum of all.
HOOKS = {2: {power_sgd: 1e-5, fp16: 1e-5}, 3: {power_sgd: 1e-5, fp16: 2e-3}}
for _hooks in HOOKS.values():
    _hooks[compressed_power_sgd] = _hooks[fp16]
if IS_TORCH_2_14:
    HOOKS[2][bf16], HOOKS[3][bf16] = 1e-5, 2e-2


def use_hooks() -> None:
    for hook, tolerance in HOOKS[dist.get_world_size()].items():
        compare({hook.__name__: {"hook": hook}}, tolerance)
    for got, want in zip(
        train(None, hook=bf16 if IS_TORCH_2_14 else fp16), train(None), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("size", [2, 3])
def test_hooks(size: int) -> None:
    on_ring(use_hooks, size)


def buckets_of_a_step() -> list[bool]:
    """Return for each bucket of two steps whether it lies in memory that the ranks share."""
    shared = []

    def look(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        shared.append(is_shared(bucket.buffer()))
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    model = DistributedDataParallel(Branches(), bucket_cap_mb=0.001, find_unused_parameters=True)
    model.register_comm_hook(None, lambda _, bucket: look(bucket))
    for step in range(2):  # torch makes the buckets anew after the first
        model(batch(step), left=True).sum().backward()
    return shared


@on_both_transports
def test_buckets_are_in_shared_memory(transport: str) -> None:
    for shared in on_ring(buckets_of_a_step, 2, transport=transport):
        assert len(shared) > 2
        assert set(shared) == {transport == "shm"}


def accumulate() -> None:
    model = DistributedDataParallel(nn.Linear(8, 1, bias=False))
    with model.no_sync():
        model(batch(0)).sum().backward()
    local = batch(0).sum(0)
    torch.testing.assert_close(model.module.weight.grad[0], local)
    model(batch(1)).sum().backward()
    total = local + batch(1).sum(0)
    dist.all_reduce(total, dist.ReduceOp.AVG)
    torch.testing.assert_close(model.module.weight.grad[0], total)


def test_no_sync() -> None:
    on_ring(accumulate, 2)


def uneven() -> None:
    """Each rank takes two steps more than the one before; all divide by the number of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    steps = [3 + 2 * other for other in range(size)]
    model = DistributedDataParallel(nn.Linear(8, 1, bias=False))
    with Join([model]):
        for step in range(steps[rank]):
            model.zero_grad()
            model(batch(step)).sum().backward()
            parts = [batch(step, other).sum(0) for other in range(size) if step < steps[other]]
            want = torch.stack(parts).sum(0) / size
            torch.testing.assert_close(model.module.weight.grad[0], want)


def test_join() -> None:
    on_ring(uneven, 3)


def sharded_optimizer() -> None:
    weights = []
    for group in (None, dist.new_group(backend="gloo")):
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Linear(8, 5), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, process_group=group, lr=0.01
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(step)).square().sum().backward()
            optimizer.step()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    for got, want in zip(*weights, strict=True):
        torch.testing.assert_close(got, want)


def test_zero_redundancy_optimizer() -> None:
    on_ring(sharded_optimizer, 2)


def callback_that_waits() -> list[float]:
    """A callback of a future waits for an operation that it starts itself, three levels deep."""

    def reduce_again(left: int) -> Callable[[Any], Tensor]:
        def callback(future: Any) -> Tensor:
            tensor: Tensor = future.value()[0]
            if left == 0:
                return tensor
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            result: Tensor = work.get_future().then(reduce_again(left - 1)).wait()
            return result

        return callback

    sums = []
    for i in range(10):
        work = dist.all_reduce(torch.full((4,), float(i)), async_op=True)
        assert work is not None
        sums.append(work.get_future().then(reduce_again(2)).wait()[0].item())
    return sums


def test_callbacks_may_wait() -> None:
    assert on_ring(callback_that_waits, 2) == [[8.0 * i for i in range(10)]] * 2


def many_futures() -> tuple[int, list[float]]:
    """Return the number of additional threads, and the results of the callbacks."""
    before, seen, values = len(os.listdir("/proc/self/task")), [0], []

    def callback(future: Any) -> float:
        seen.append(len(os.listdir("/proc/self/task")))
        return float(future.value()[0])

    for i in range(1500):
        work = dist.all_reduce(torch.tensor(float(i)), async_op=True)
        assert work is not None
        values.append(work.get_future().then(callback))
    results = [value.wait() for value in values]
    return max(seen) - before, results


def test_many_futures_need_few_threads() -> None:
    for more, results in on_ring(many_futures, 2):
        assert results == [2.0 * i for i in range(1500)]
        assert more <= 30  # a busy machine may keep some waiting for Python's lock


def futures_out_of_order() -> float:
    """Callbacks wait for futures that the program requested after theirs."""
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(4)]
    futures: list[Any] = []
    has_all = threading.Event()

    def callback(index: int) -> Callable[[Any], float]:
        def wait_for_next(future: Any) -> float:
            assert has_all.wait(20)
            rest = futures[index + 1].wait() if index + 1 < len(works) else 0.0
            return float(future.value()[0]) + rest

        return wait_for_next

    for index, work in enumerate(works):
        assert work is not None
        futures.append(work.get_future().then(callback(index)))
    has_all.set()
    total: float = futures[0].wait()
    return total


def test_callbacks_may_wait_for_later_futures() -> None:
    assert on_ring(futures_out_of_order, 2) == [8.0, 8.0]


def compiled() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def summed(tensor: Tensor) -> Tensor:
        import torch.distributed._functional_collectives as functional

        total = functional.all_reduce(tensor * 2, "sum", dist.group.WORLD)
        gathered = functional.all_gather_tensor(total, 0, dist.group.WORLD)
        result: Tensor = functional.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD)
        return result

    size = dist.get_world_size()
    assert summed(torch.ones(4)).tolist() == [2.0 * size * size] * 4


def test_compiled_functional_collectives() -> None:
    run(in_default_group, 2, args=(compiled,), initialized=False)


def compiled_training() -> None:
    """A compiled DDP model ends with the same weights as an uncompiled one."""
    graphs = []

    def remember(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    weights = []
    for compiles in (False, True):
        model: Any = DistributedDataParallel(Branches(), find_unused_parameters=True)
        step_of: Any = torch.compile(model, backend=remember) if compiles else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            optimizer.zero_grad()
            step_of(batch(step), True).square().mean().backward()
            optimizer.step()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    for got, want in zip(*weights, strict=True):
        torch.testing.assert_close(got, want)
    mine = weights[1][0].clone()
    dist.broadcast(mine, 0)
    assert torch.equal(mine, weights[1][0]), "the ranks' weights differ"
    assert graphs, "nothing was compiled"


def test_compiled_ddp() -> None:
    run(in_default_group, 2, args=(compiled_training,), initialized=False)


def in_default_group(fn: Callable[[], None]) -> None:
    with default_group():
        fn()
