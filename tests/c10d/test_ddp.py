# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel, its communication hooks and its relatives, on ring beside gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.support.groups import IS_TORCH_2_14, on_ring
from tests.support.shared import is_shared
from tests.support.slow import slow

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


class Complex(nn.Module):
    """A model of complex and real parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(3))
        self.shift = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, batch: Tensor, left: bool) -> Tensor:
        result: Tensor = batch.to(torch.complex64) @ self.weight * self.scale + self.shift
        return result.abs() * (1 if left else 2)


def batch(step: int, rank: int | None = None) -> Tensor:
    """Return a batch of a rank, by default of this one."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(step * 10 + rank))


def train(
    group: Any,
    *,
    hook: Any = None,
    both: bool = True,
    make: Callable[[], nn.Module] = Branches,
    accumulates: bool = False,
    shards: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Return the weights after some steps with the backend of `group`."""
    # A hook that begins operations in callbacks needs one bucket: with several, the operations
    # would come in another order on each rank.
    bucket_mb = 0.001 if hook is None else 25
    model = DistributedDataParallel(make(), process_group=group, bucket_cap_mb=bucket_mb, **options)
    if hook is not None:
        model.register_comm_hook(*hook(group))
    if shards:
        optimizer: Any = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, process_group=group, lr=0.01
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        if accumulates:
            with model.no_sync():
                model(batch(step + 200), True).square().mean().backward()
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
    "complex": {"make": Complex},
    "complex in bucket views": {"make": Complex, "gradient_as_bucket_view": True},
    "no_sync": {"accumulates": True},
    "ZeroRedundancyOptimizer": {"shards": True},
}


@pytest.mark.parametrize(("transport", "size"), [("shm", 3), slow("tcp", 2)])
def test_like_gloo(transport: str, size: int) -> None:
    on_ring(compare, size, OPTIONS, transport=transport)


def fp16(group: Any) -> tuple[Any, Callable[..., Any]]:
    return group, default_hooks.fp16_compress_hook


def bf16(group: Any) -> tuple[Any, Callable[..., Any]]:
    return group, default_hooks.bf16_compress_hook


def power_sgd(group: Any) -> tuple[Any, Callable[..., Any]]:
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    return state, powerSGD_hook.powerSGD_hook


def compressed_power_sgd(group: Any) -> tuple[Any, Callable[..., Any]]:
    state, hook = power_sgd(group)
    return state, default_hooks.fp16_compress_wrapper(hook)


HOOKS = [fp16, power_sgd, compressed_power_sgd, *([bf16] if IS_TORCH_2_14 else [])]


def test_hooks() -> None:
    # Two ranks: of three, gloo rounds each sum of two to 16 bits, ring only the sum of all.
    on_ring(compare, 2, {hook.__name__: {"hook": hook} for hook in HOOKS})


@on_ranks(2, by=on_ring)
def test_buckets_are_in_shared_memory() -> None:
    shared = []

    def look(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        shared.append(is_shared(bucket.buffer()))
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    model = DistributedDataParallel(Branches(), bucket_cap_mb=0.001, find_unused_parameters=True)
    model.register_comm_hook(None, lambda _, bucket: look(bucket))
    for step in range(2):  # torch makes the buckets anew after the first
        model(batch(step), left=True).sum().backward()
    assert len(shared) > 2
    assert all(shared)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    options: Any = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    assert is_shared(backend.allocate_tensor(1000, **options))


@on_ranks(3, by=on_ring)
def test_join() -> None:
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


def compile_collectives() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def summed(tensor: Tensor) -> Tensor:
        import torch.distributed._functional_collectives as functional

        total = functional.all_reduce(tensor * 2, "sum", dist.group.WORLD)
        gathered = functional.all_gather_tensor(total, 0, dist.group.WORLD)
        result: Tensor = functional.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD)
        return result

    size = dist.get_world_size()
    assert summed(torch.ones(4)).tolist() == [2.0 * size * size] * 4


def compile_model() -> None:
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
    assert graphs, "nothing was compiled"


@on_ranks(2, by=on_ring, is_fresh=True)
def test_torch_compile() -> None:
    compile_collectives()
    compile_model()
