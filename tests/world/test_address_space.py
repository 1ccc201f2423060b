"""Scarce address space: the shared memory is smaller, and tensors outside of it are copied."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch
from logs import logged
from pool import error_of, run
from shared import is_shared
from slow import slow
from torch import nn
from torch.optim import SGD

import torch_ring as hvd

RANKS = 2
FEW = {"TORCH_RING_ADDRESS_SPACE": str(64 << 20)}  # arenas of 12 MiB


def limit_address_space(spare: int) -> None:
    """Allow this process to map `spare` more bytes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))


def init_with_a_limit() -> None:
    # Ranks with different limits share as much as all of them can map.
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


def test_ranks_with_a_limit_share_memory():
    run(init_with_a_limit, RANKS, initialized=False)


def init_with_next_to_nothing(spare: int) -> tuple[str, str]:
    """Rank 1 can map `spare` bytes more: too few for memory, for threads, or for anything else."""
    if int(os.environ["RANK"]) == 1:
        limit_address_space(spare)
    outcome = error_of(hvd.init)
    if outcome[0] == "nothing":
        outcome = error_of(lambda: hvd.allreduce(torch.ones(1000)))
    hvd.shutdown()
    return outcome


@pytest.mark.parametrize("transport", ["", slow("shm")])
def test_a_rank_without_address_space_fails_all_by_name(transport):
    failed = 0
    for spare in (1 << 20, 4 << 20, 20 << 20, 60 << 20):
        env = {"TORCH_RING_INIT_TIMEOUT": "8"}
        outcomes = run(
            init_with_next_to_nothing,
            RANKS,
            args=(spare,),
            transport=transport,
            initialized=False,
            env=env,
        )
        kinds = {kind for kind, _ in outcomes}
        assert kinds <= {"nothing", "RingError", "PeerLostError"}, outcomes
        assert "nothing" not in kinds or len(kinds) == 1, outcomes
        for kind, text in outcomes:
            assert kind == "nothing" or "rank 1" in text, outcomes
            assert kind == "nothing" or "ulimit -" in text, outcomes
        failed += "nothing" not in kinds
    assert failed > 0


def reduce_more_than_fits() -> None:
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
    assert "TORCH_RING_ADDRESS_SPACE" in message
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


@pytest.mark.parametrize("direct", ["0", "1000"], ids=["in buckets", "in blocks"])
def test_what_does_not_fit_is_copied(direct):
    more = {"TORCH_RING_DIRECT_GRADIENT_BYTES": direct, "TORCH_RING_BUCKET_BYTES": "4000000"}
    run(reduce_more_than_fits, RANKS, env=FEW | more)


def add_more_sets_than_fit() -> None:
    hvd.add_process_set([0, 1])
    kept = hvd.empty_shared(11 << 18) if hvd.rank() == 1 else None
    kind, text = error_of(lambda: hvd.add_process_set([1, 2]))
    assert kind == "RingError"
    assert "rank 1 could not join the process set: this rank's part of the shared memory" in text
    assert "TORCH_RING_ADDRESS_SPACE" in text
    del kept
    pair = hvd.add_process_set([1, 2])
    if pair.included():
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=pair).eq(2).all()


def test_a_set_that_does_not_fit_is_refused_on_all_ranks():
    # Arenas for two slots, of 20 MiB each.
    run(add_more_sets_than_fit, 3, env={"TORCH_RING_ADDRESS_SPACE": str(3 * 60 << 20)})


def init_with_too_little(messages_of: int) -> tuple[str, str]:
    with logged() as messages:
        outcome = error_of(hvd.init)
    if outcome[0] == "nothing":
        assert hvd.allreduce(torch.ones(1000), op=hvd.Sum).eq(RANKS).all()
        assert not is_shared(hvd.empty_shared(1000))
        said = [text for text in messages if "all ranks use TCP: rank 0 can map 8 MiB" in text]
        assert len(said) == (hvd.rank() == messages_of), messages
    hvd.shutdown()
    return outcome


def test_too_little_for_all_ranks_means_tcp():
    env = {"TORCH_RING_ADDRESS_SPACE": str(8 << 20)}
    run(init_with_too_little, RANKS, args=(0,), transport="", env=env, initialized=False)
    for kind, text in run(
        init_with_too_little, RANKS, args=(0,), transport="shm", env=env, initialized=False
    ):
        assert kind == "RingError"
        assert "TORCH_RING_TRANSPORT=shm, but rank 0 can map 8 MiB" in text
        assert "need 44 MiB: raise `ulimit -v` or TORCH_RING_ADDRESS_SPACE" in text
