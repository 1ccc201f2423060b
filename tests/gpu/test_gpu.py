# SPDX-License-Identifier: Apache-2.0
"""Tests on GPUs; one GPU is enough for all ranks, each of which NCCL takes for a host.

NCCL refuses two ranks of one host on one GPU. Between hosts it uses sockets, here the loopback
interface's: these tests check the results, but show nothing about speed.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pool
import pytest
import torch
import torch.distributed as dist
from device_compression import COMPRESSION
from device_data import DATA
from device_float16 import FLOAT16
from device_gradients import GRADIENTS
from device_groups import GROUPS, group_on, lose_a_rank_of_a_group
from device_hardships import (
    BUCKET_BYTES,
    count_polls,
    counting_nccl,
    fail_by_an_assertion,
    fill_the_launch_queue,
    loaded_library,
    reduce_many_elements,
    stop_and_lose_ranks,
    try_bucket_sizes,
)
from device_jobs import JOBS
from device_launches import LAUNCHES
from device_operations import OPERATIONS, busy
from device_places import PLACES
from device_training import TRAINING
from oracle import play_on
from program_runs import run_programs
from random_programs import make_program
from test_elastic_devices import PLACES as PLACES_OF_DEATH
from test_elastic_devices import check_survivors, lose_one
from test_hardships import check_failures
from test_process_set_order import SUMS, train_with_two_optimizers
from test_programs import AGREED, AHEAD, name_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from training import (
    assert_same_on_all_ranks,
    assert_same_weights,
    joined_batches,
    loss_of,
    make_model,
    part,
    train,
)

import torch_ring as hvd

# Ranks of one host on one GPU, as NCCL 2.30 and newer allow: they are local peers of NCCL.
ARE_LOCAL = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"

# The ranks' processes come from a server that has not initialised CUDA: asking here is safe.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.skipif(
        ARE_LOCAL and torch.cuda.is_available() and torch.cuda.nccl.version() < (2, 30),
        reason="NCCL before 2.30 knows no NCCL_MULTI_RANK_GPU_ENABLE",
    ),
]

ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "TORCH_RING_TIMEOUT": "30",
}
# Kernels of processes that share a GPU take turns of milliseconds, in every step of a ring. A hang
# is to be told before the deadline of most parts of benchmarks/gpu_check.py.
DEADLINE_S = 60.0


def take_gpu() -> None:
    if not ARE_LOCAL:
        # NCCL reads this once in a process, which may serve several tests.
        os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def call_on_gpu(program: Callable[[str], object]) -> object:
    take_gpu()
    return program("cuda")


def call_in_group(program: Callable[[str], object]) -> object:
    take_gpu()
    with group_on("cuda"):
        return program("cuda")


def run_in_group(program: Callable[[str], object], size: int, **options: Any) -> list[Any]:
    """Call a program in a group of torch.distributed."""
    options = {"env": ENVIRONMENT, "deadline_s": DEADLINE_S, "initialized": False, **options}
    return pool.run(call_in_group, size, args=(program,), **options)


def run(program: Callable[[str], object], size: int, **options: Any) -> list[Any]:
    """Call ``program("cuda")`` on `size` ranks and return the results."""
    options = {"env": ENVIRONMENT, "deadline_s": DEADLINE_S, **options}
    return pool.run(call_on_gpu, size, args=(program,), **options)


def call_alone(program: Callable[[str], object]) -> object:
    hvd.init()
    result = call_on_gpu(program)
    hvd.shutdown()
    return result


def run_alone(program: Callable[[str], object], size: int, **options: Any) -> list[Any]:
    """Do so in processes that serve no other test, and must exit with status 0."""
    options = {"env": ENVIRONMENT, "deadline_s": DEADLINE_S, **options}
    return pool.run(call_alone, size, args=(program,), initialized=False, **options)


def test_a_killed_rank_of_a_group(tmp_path):
    program = functools.partial(lose_a_rank_of_a_group, tmp_path)
    texts = run_in_group(program, 3, may_die={1}, deadline_s=60)
    for rank in (0, 2):
        assert "rank 1 (pid " in texts[rank], texts


def check_that_capture_is_refused(device: str) -> None:
    mine = torch.ones(3, device=device)
    hvd.allreduce(mine)
    torch.cuda.synchronize()
    message = "cannot be captured into a CUDA graph"
    with pytest.raises(ValueError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        hvd.allreduce_(mine)
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [hvd.size()] * 3


def check_that_a_captured_backward_is_refused(device: str) -> None:
    """Refuse it, and go on.

    The optimizer is wrapped on the stream of the capture: a gradient that autograd accumulates on
    another stream makes CUDA end the capture first, with an error of its own.
    """
    model = make_model().to(device)
    batches = [part(batch).to(device) for batch in joined_batches(3)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train(model, optimizer, batches)
        optimizer.zero_grad()
    torch.cuda.synchronize()
    message, graph = "a replay runs no hooks", torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match=message), torch.cuda.graph(graph, stream=stream):
        loss_of(model, batches[0]).backward()
    with torch.cuda.stream(stream):
        train(model, optimizer, batches)
    torch.cuda.synchronize()
    assert_same_on_all_ranks(*(weight.detach().cpu() for weight in model.parameters()))


def train_graphed_callables(device: str) -> None:
    """The way named by the error: graphs of a module, which autograd calls as one step."""
    models = [make_model().to(device), make_model().to(device)]
    batches = [part(batch).to(device) for batch in joined_batches(6)]
    graphed = torch.cuda.make_graphed_callables(models[1], (batches[0].clone(),))
    for model in (models[0], graphed):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    assert_same_on_all_ranks(*(p.cpu() for p in models[1].parameters()))
    assert_same_weights(models[1].cpu(), models[0].cpu())


def train_compiled(device: str) -> None:
    """Graphs of a compiled model, whose gradients are in memory of its own."""
    models = [make_model().to(device), make_model().to(device)]
    batches = [part(batch).to(device) for batch in joined_batches(8)]
    for model in models:
        forward = model
        if model is models[1]:
            forward = torch.compile(model, mode="reduce-overhead")
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in batches:
            torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            forward(batch).square().mean().backward()
            optimizer.step()
    assert_same_on_all_ranks(*(p.cpu() for p in models[1].parameters()))
    assert_same_weights(models[1].cpu(), models[0].cpu())


def capture_in_another_thread(device: str) -> None:
    """A capture in another thread stays whole while the engine polls pending collectives."""
    mine, counter = torch.ones(1000, device=device), torch.zeros(1000, device=device)
    hvd.allreduce_(mine)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    failures = []

    def capture() -> None:
        try:
            with torch.cuda.stream(side):
                graph.capture_begin()
                counter.add_(1.0)
                time.sleep(0.5)
                graph.capture_end()
        except BaseException as failure:
            failures.append(failure)

    busy(device, 1000)
    handles = [hvd.allreduce_async_(mine, name=f"polled {i}") for i in range(5)]
    thread = threading.Thread(target=capture)
    thread.start()
    thread.join()
    assert not failures, failures
    for handle in handles:
        hvd.synchronize(handle)
    for _ in range(3):
        graph.replay()
    assert counter.eq(3).all()
    assert mine.eq(1).all()


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize(
    "program",
    [
        check_that_a_captured_backward_is_refused,
        capture_in_another_thread,
        train_graphed_callables,
        train_compiled,
    ],
)
def test_graphs_of_training(program, size):
    run(program, size, deadline_s=100.0)  # compiling takes its time


@pytest.mark.parametrize("size", [1, 2])
def test_a_graph_cannot_have_collectives(size):
    run(check_that_capture_is_refused, size)


@pytest.mark.parametrize("size", [1, 2])
def test_many_elements(size):
    run(functools.partial(reduce_many_elements, 2**31 + 5), size)


@pytest.mark.parametrize("size", [1, 2])
def test_an_assertion_in_a_kernel(size, tmp_path):
    # Processes of their own, whose exit status counts.
    program = functools.partial(fail_by_an_assertion, tmp_path)
    failures = run_alone(program, size)
    print(f"# after a device-side assertion: {failures[-1]}; exit status 0")
    check_failures(failures)


def test_polls(tmp_path):
    library = counting_nccl(loaded_library("libnccl.so"), tmp_path)
    env = ENVIRONMENT | {
        "TORCH_RING_NCCL_LIBRARY": str(library),
        "TORCH_RING_BUCKET_BYTES": str(BUCKET_BYTES),
    }
    for polls in run_alone(count_polls, 2, env=env):
        print(f"# calls of ncclCommGetAsyncError: {polls}")


def test_stopped_and_killed_ranks(tmp_path):
    program = functools.partial(stop_and_lose_ranks, tmp_path, (20.0, 2.0, 2.0))
    results = run(program, 5, may_die={2, 3, 4}, deadline_s=100.0)
    assert results == [[5, 4, 3, 2]] * 2 + [None] * 3


def test_bucket_sizes():
    run(functools.partial(try_bucket_sizes, 300), 2)


@pytest.mark.parametrize("run_ahead", ["0", "1"])
def test_a_full_launch_queue(run_ahead):
    env = ENVIRONMENT | {"TORCH_RING_BUCKET_BYTES": "1", "TORCH_RING_RUN_AHEAD": run_ahead}
    run(functools.partial(fill_the_launch_queue, 3000, 2.0), 2, env=env)


# The stacked decorators make the size the outer loop: the longest tests come last.
@pytest.mark.parametrize(
    "program",
    [
        *JOBS,
        *TRAINING,
        *GRADIENTS,
        *COMPRESSION,
        *PLACES,
        *DATA,
        *FLOAT16,
        *LAUNCHES,
        *OPERATIONS,
    ],
    ids=lambda program: program.__name__,
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_on_gpu(size, program):
    run(program, size)


@pytest.mark.parametrize("program", GROUPS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_in_a_group_on_gpu(size, program):
    run_in_group(program, size)


@pytest.mark.parametrize("seed", range(28), ids="program {}".format)
def test_planned_passes_on_gpu(seed):
    programs = [functools.partial(make_program, seed)]
    run(functools.partial(run_programs, programs=programs, run_ahead=True), 2)


@pytest.mark.parametrize(
    ("run_ahead", "case"),
    [*(("0", case) for case in AGREED if case not in AHEAD), *(("1", case) for case in AHEAD)],
    ids=name_of,
)
@pytest.mark.parametrize("size", [4])
def test_training_programs_on_gpu(size, run_ahead, case):
    env = ENVIRONMENT | {"TORCH_RING_RUN_AHEAD": run_ahead, "TORCH_RING_BUCKET_BYTES": "256"}
    run(functools.partial(play_on, program=case[0], args=case[1:]), size, env=env)


@pytest.mark.parametrize(("program", "size"), [*SUMS, (train_with_two_optimizers, 3)])
def test_process_sets_on_gpu(program, size):
    run(program, size)


def lose_one_on_gpu(place: str) -> object:
    return call_on_gpu(functools.partial(lose_one, place=place))


@pytest.mark.parametrize("place", PLACES_OF_DEATH)
def test_survivors_go_on_with_the_step(place):
    options = {"args": (place,), "env": ENVIRONMENT, "may_die": [0], "deadline_s": DEADLINE_S}
    check_survivors(pool.run(lose_one_on_gpu, 3, **options), place)


def train_sharded(device: str) -> None:
    """FSDP2 of a model on the device ends where it does on the host."""

    def trained(place: str) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).to(place)
        mesh = dist.device_mesh.init_device_mesh(place, (dist.get_world_size(),))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
            batch = torch.randn(6, 16, generator=generator).to(place)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return [weight.full_tensor().detach().cpu() for weight in model.parameters()]

    for got, want in zip(trained(device), trained("cpu"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_fully_shard_on_gpu(size):
    run_in_group(train_sharded, size)
