# SPDX-License-Identifier: Apache-2.0
"""Ranks that may use little: address space, descriptors and threads.

init() makes do with them, or all ranks get the rank and the limit to raise.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from logs import logged
from on_ranks import on_ranks
from pool import error_of, run
from shared import is_shared
from slow import slow
from torch import nn
from torch.optim import SGD

import torch_ring as hvd
from torch_ring.setup import connect

RANKS = 2
BRIEFLY = {"TORCH_RING_INIT_TIMEOUT": "8"}
USER = 23451  # root may start any number of threads; this user has no other processes


def limit_address_space(spare: int) -> None:
    """Allow this process to map `spare` more bytes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))


@on_ranks(RANKS, initialized=False)
def test_ranks_with_a_limit_share_memory() -> None:
    limit_address_space((1 + int(os.environ["RANK"])) << 30)
    hvd.init()
    shared = hvd.empty_shared(1 << 20)
    assert is_shared(shared)
    shared.fill_(hvd.rank() + 1.0)
    hvd.allreduce_(shared, op=hvd.Sum)
    assert shared.eq(3).all()
    # The program keeps some address space for itself.
    private = torch.empty(100 << 20, dtype=torch.uint8)
    assert not is_shared(private)
    hvd.shutdown()


def init_with_next_to_nothing(broken: int, what: str, spare: int) -> tuple[str, str]:
    """One rank has only `spare` more bytes to map, or descriptors."""
    with contextlib.ExitStack() as stack:
        if int(os.environ["RANK"]) == broken and what == "bytes":
            limit_address_space(spare)
        elif int(os.environ["RANK"]) == broken:
            connect._raise_descriptor_limit = lambda *_: None  # as with a low hard limit
            taken = set(map(int, os.listdir("/proc/self/fd")))
            free = [number for number in range(len(taken) + 100) if number not in taken]
            stack.enter_context(limited(free[spare + 1]))  # one was this listing's
        outcome = error_of(hvd.init)
        if outcome[0] == "nothing":
            outcome = error_of(lambda: hvd.allreduce(torch.ones(1000)))
        hvd.shutdown()
    return outcome


@contextlib.contextmanager
def limited(soft: int) -> Iterator[None]:
    """Limit the descriptors of this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    ("what", "spare", "broken", "transport"),
    [
        ("bytes", 1 << 20, 1, ""),
        slow("bytes", 4 << 20, 1, ""),
        slow("descriptors", 3, 2, "shm"),
        ("descriptors", 6, 2, "shm"),
        ("descriptors", 0, 0, "tcp"),
        slow("descriptors", 6, 0, "tcp"),
    ],
)
def test_a_rank_without_enough_fails_all_by_name(what, spare, broken, transport):
    outcomes = run(
        init_with_next_to_nothing,
        3,
        args=(broken, what, spare),
        transport=transport,
        initialized=False,
        env=BRIEFLY,
    )
    lack = "Too many open files: raise `ulimit -n` (now" if what != "bytes" else "ulimit -"
    for kind, text in outcomes:
        assert what != "bytes" or kind in ("RingError", "PeerLostError"), outcomes
        is_told = lack in text and f"rank {broken}" in text
        # A rank without any descriptor cannot report to the others why it does not come.
        assert is_told or (spare == 0 and "rank 0 of 3 did not arrive" in text), outcomes


@on_ranks(3, initialized=False)
def test_init_raises_a_low_limit_of_descriptors() -> None:
    with limited(256):
        hvd.init()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft > 256
        size = hvd.size()
        assert hvd.allreduce(torch.ones(1000), op=hvd.Sum).eq(size).all()
        hvd.shutdown()


def run_out_of_threads(at_init: bool) -> tuple[str, str]:
    os.setuid(USER)
    rank = int(os.environ["RANK"])

    def limit() -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))

    if at_init:
        limit()
        return error_of(hvd.init)
    hvd.init()
    pair = hvd.add_process_set([0, 1])
    hvd.barrier()
    limit()
    if pair.included():
        return error_of(lambda: hvd.allreduce(torch.ones(3), process_set=pair))
    return error_of(hvd.barrier)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize("at_init", [True, False])
def test_a_rank_without_threads(at_init):
    for kind, text in run(run_out_of_threads, 3, args=[at_init], initialized=False)[:2]:
        assert kind in ("RingError", "PeerLostError"), text
        assert "rank 1" in text
        assert "cannot start a thread: Resource temporarily unavailable" in text
        assert "raise `ulimit -u` (now 1)" in text


# --- what does not fit into the shared memory


def map_at_most(mebibytes: int) -> None:
    """Let this process share no more memory, as under `ulimit -v`."""
    connect.mappable_bytes = lambda: mebibytes << 20


def reduce_more_than_fits() -> None:
    map_at_most(64)  # arenas of 12 MiB
    hvd.init()
    torch.manual_seed(1)
    ones = 1 << 20  # 4 MiB of gradients each, and as much again in a step
    weights = [nn.Parameter(torch.zeros(ones)) for _ in range(4)]
    with logged() as messages:
        kept = [hvd.empty_shared(3 << 18) for _ in range(6)]
        assert [is_shared(tensor) for tensor in kept] == [True] * 4 + [False] * 2
        for index, tensor in enumerate(kept):
            hvd.allreduce_(tensor.fill_(hvd.rank() + index), op=hvd.Sum)
            assert tensor.eq(1 + 2 * index).all()
    (message,) = messages
    assert f"rank {hvd.rank()}: its part of the shared memory has no room" in message
    assert "`ulimit -v`" in message
    if hvd.rank() == 0:
        del kept[:3]  # the ranks' gradients lie in different memory
    optimizer = hvd.DistributedOptimizer(SGD(weights, lr=1.0))
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 1)
        sum((i + 1) * (hvd.rank() + 1) * w.sum() for i, w in enumerate(weights)).backward()
        optimizer.step()
        for i, weight in enumerate(weights):
            assert weight.grad.eq(1.5 * (i + 1)).all()
    assert any(is_shared(weight.grad) for weight in weights) == (hvd.rank() == 0)
    hvd.shutdown()


@pytest.mark.parametrize("direct", ["0", "1000"], ids=["in buckets", "in blocks"])
def test_what_does_not_fit_is_copied(direct):
    more = {"TORCH_RING_DIRECT_GRADIENT_BYTES": direct, "TORCH_RING_BUCKET_BYTES": "4000000"}
    run(reduce_more_than_fits, RANKS, env=more, initialized=False)


@on_ranks(3, initialized=False)
def test_a_set_that_does_not_fit_is_refused_on_all_ranks() -> None:
    map_at_most(3 * 60)  # arenas for two slots, of 20 MiB each
    hvd.init()
    hvd.add_process_set([0, 1])
    kept = hvd.empty_shared(11 << 18) if hvd.rank() == 1 else None
    kind, text = error_of(lambda: hvd.add_process_set([1, 2]))
    assert kind == "RingError"
    assert "rank 1 could not join the process set: this rank's part of the shared memory" in text
    assert "`ulimit -v`" in text
    del kept
    pair = hvd.add_process_set([1, 2])
    if pair.included():
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=pair).eq(2).all()
    hvd.shutdown()


def init_with_too_little() -> tuple[str, str]:
    map_at_most(8)
    with logged() as messages:
        outcome = error_of(hvd.init)
    if outcome[0] == "nothing":
        assert hvd.allreduce(torch.ones(1000), op=hvd.Sum).eq(RANKS).all()
        assert not is_shared(hvd.empty_shared(1000))
        said = [text for text in messages if "all ranks use TCP: rank 0 can map 8 MiB" in text]
        assert len(said) == (hvd.rank() == 0), messages
    hvd.shutdown()
    return outcome


def test_too_little_for_all_ranks_means_tcp():
    run(init_with_too_little, RANKS, transport="", initialized=False)
    for kind, text in run(init_with_too_little, RANKS, transport="shm", initialized=False):
        assert kind == "RingError"
        assert "TORCH_RING_TRANSPORT=shm, but rank 0 can map 8 MiB" in text
        assert "need 44 MiB: raise `ulimit -v`" in text
