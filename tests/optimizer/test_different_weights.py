"""Ranks that start from different weights: a warning that names the first one, once."""

from __future__ import annotations

import pytest
import torch
from logs import told
from torch import nn
from torch.optim import SGD
from training import grads, make_model, take_step, weights

import torch_ring as hvd
from torch_ring.collectives.compare import digests_of, find_difference


def forget_to_broadcast(broadcast: str, op: hvd.ReduceOp = hvd.Average) -> None:
    """Train models of different seeds; `broadcast`: "never", or its point in the set-up."""
    model = make_model(seed=hvd.rank())
    if broadcast == "first":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), op=op
    )
    if broadcast == "last":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(3):
        take_step(optimizer, model(torch.ones(2, 8)).sum())


@pytest.mark.parametrize(
    ("transport", "size", "others"), [("shm", 3, "ranks 1, 2"), ("tcp", 2, "rank 1")]
)
def test_a_forgotten_broadcast_is_told(transport, size, others):
    assert told(forget_to_broadcast, size, "never", transport=transport) == [
        f"the ranks train different weights: '0.weight' on {others} is not that on rank 0 (6 of 6 "
        "parameters of this optimizer differ). Gradients are averaged, weights are not, so they "
        "stay different: call broadcast_parameters(model.state_dict(), root_rank=0) before the "
        "first step, and after join(), from the rank that join() returns"
    ]


def test_adasum_warns_too():
    (message,) = told(forget_to_broadcast, 2, "never", hvd.Adasum)
    assert "'0.weight' on rank 1 is not that on rank 0" in message


@pytest.mark.parametrize("broadcast", ["first", "last"])
def test_a_broadcast_before_the_first_step_is_enough(broadcast):
    assert told(forget_to_broadcast, 3, broadcast) == []


def change_one_of_many(change: int | None) -> None:
    """The value or the sign of one weight of rank 1 differs from the others'."""
    parameters = weights(1.0, float("nan"), 0.0)
    if hvd.rank() == 1 and change is not None:
        parameters[change].data.copy_(torch.tensor(2.0 if change == 0 else -0.0))
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0))
    for _ in range(2):
        take_step(optimizer, sum(parameters))


@pytest.mark.parametrize("change", [0, 2, None])
def test_bits_decide(change):
    messages = told(change_one_of_many, 3, change)
    assert all("(1 of 3 parameters of this optimizer differ)" in message for message in messages)
    found = [message.partition(" (")[0] for message in messages]
    name = f"'allreduce.noname.0.{change}'"
    text = f"the ranks train different weights: {name} on rank 1 is not that on rank 0"
    assert found == ([] if change is None else [text])


def start_late(kind: str, differs: bool) -> None:
    """Not all ranks have a gradient when the optimizer's first ones are reduced."""
    rank = hvd.rank()
    (a,), (b,) = weights(1), weights(3 if differs and rank == 1 else 2)
    first = hvd.DistributedOptimizer(SGD([a], lr=1.0))
    second = hvd.DistributedOptimizer(
        SGD([b], lr=0.0), backward_passes_per_step=2 if kind == "accumulates" else 1
    )
    if kind == "one optimizer each":
        (2 * a if rank == 0 else 4 * b).backward()
        first.step()
        second.step()
    elif kind == "skips":
        if rank == 0:
            (a + b).backward()
        first.step()
        second.step()
    elif kind == "one after the other":
        take_step(first, a * 2)
        take_step(second, b * 2)
    else:
        b.backward()
        b.backward()
        second.step()
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        (a + (rank + 1) * b).backward()
        if kind == "accumulates":
            (a + (rank + 1) * b).backward()
        assert grads([b])[0] == 1.5 * second.backward_passes_per_step
        first.step()
        second.step()


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize(
    "kind", ["one optimizer each", "skips", "one after the other", "accumulates"]
)
def test_optimizers_that_start_late(kind, differs):
    assert [message.partition(" is not")[0] for message in told(start_late, 2, kind, differs)] == [
        "the ranks train different weights: 'allreduce.noname.0.0' on rank 1"
    ] * differs


def train_in_a_set() -> None:
    """The lowest rank of the set warns, and is the root to broadcast from."""
    pair = hvd.add_process_set([1, 2])
    words = nn.Embedding(4, 2, sparse=True)
    nn.init.constant_(words.weight, hvd.rank())
    optimizer = hvd.DistributedOptimizer(
        SGD(words.parameters(), lr=0.1), words.named_parameters(), process_set=pair
    )
    for _ in range(2):
        take_step(optimizer, words(torch.tensor([1, 3])).sum())


def test_a_process_set_warns_for_itself():
    (message,) = told(train_in_a_set, 3, by=1)
    assert "'weight' on rank 2 is not that on rank 1 (1 of 1" in message
    assert message.endswith("root_rank=1, process_set=...) before the first step")


def join_and_go_on(broadcast: bool, fewer: int = 1, op: hvd.ReduceOp = hvd.Average) -> None:
    """Rank 1 has fewer batches: after join() its weights are older than the others'."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), op=op)
    for epoch in range(4):
        for _ in range(fewer if hvd.rank() == 1 and epoch < 3 else 3):
            take_step(optimizer, model(torch.ones(2, 8)).sum())
        last = hvd.join()
        if broadcast:
            hvd.broadcast_parameters(model.state_dict(), last)


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize(
    ("transport", "fewer", "op"),
    [("shm", 1, hvd.Average), ("tcp", 1, hvd.Average), ("shm", 0, hvd.Adasum)],
)
def test_a_forgotten_broadcast_after_join(transport, fewer, op, broadcast):
    """A rank that had joined before its first step compares weights when the others do."""
    messages = told(join_and_go_on, 2, broadcast, fewer, op, transport=transport)
    assert ["on rank 1 is not that on rank 0 (6 of 6" in message for message in messages] == (
        [] if broadcast else [True]
    )


def join_before_the_first_step() -> None:
    """The ranks that have not joined compare theirs."""
    model = make_model(seed=hvd.rank())
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))
    if hvd.rank() > 0:
        take_step(optimizer, model(torch.ones(2, 8)).sum())
    hvd.join()


def test_joined_ranks_do_not_compare():
    (message,) = told(join_before_the_first_step, 3, by=1)
    assert "on rank 2 is not that on rank 1 (6 of 6" in message


_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.bool,
]


@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (2, 1024), (2047,), (8190,), (3, 4097)])
def test_a_digest_sees_every_element(shape):
    for dtype in _DTYPES:
        original = torch.zeros(shape, dtype=torch.float32).to(dtype)
        for position in {0, original.numel() // 2, original.numel() - 1}:
            changed = original.clone()
            changed.view(-1)[position] = 1
            same = original.clone()
            digests = digests_of([original, same, changed])
            assert digests[0] == digests[1] != digests[2], (dtype, position)


def test_a_digest_sees_layout_order_places_and_the_highest_bits():
    ramp = torch.arange(64 * 64 * 9.0)
    columns = ramp.view(64, 64, 3, 3).to(memory_format=torch.channels_last)
    shifted = torch.cat([torch.zeros(1), ramp])[1:]  # begins in the middle of a word
    order = torch.arange(4096)
    swapped = order.clone()
    swapped[[1, 2]] = swapped[[2, 1]]
    rows = order.view(-1, 512).flip(0).reshape(-1)
    signs = torch.ones(4096, dtype=torch.float64)
    one, other = signs.clone(), signs.clone()
    one[5], other[6] = -1, -1
    constants = [torch.full((64, 64), value) for value in (0.0, 1.0, 2.0)]
    small = [torch.tensor(value) for value in (5, 256, 1 << 62, -(1 << 62))]
    pairs = [torch.tensor(value) for value in ([1, 2], [2, 1], [3, 0], [0, 3])]
    sparse = [torch.sparse_coo_tensor([[i]], [v], (9,)) for i, v in ((1, 2.0), (2, 1.0), (2, 2.0))]
    different = [ramp, ramp.roll(1024), *constants, order, swapped, rows, signs, one, other]
    different += [*small, *pairs, *sparse]
    assert len(set(digests_of(different).tolist())) == len(different)
    assert len(set(digests_of([ramp, columns, shifted]).tolist())) == 1
    unreadable = [torch.empty(3, device="meta"), torch.eye(3).to_sparse_csr(), torch.empty(0, 3)]
    assert digests_of([*unreadable, torch.ones(3)]).ne(0).tolist() == [False, False, False, True]
    assert digests_of([]).tolist() == []


def test_many_ranks_are_not_listed():
    ones, twos = [["a", "", 1], ["b", "", 1]], [["a", "", 1], ["b", "", 2]]
    difference = find_difference(
        {**dict.fromkeys([0, 3, 5, 7, 10, 11, 12], ones), **dict.fromkeys([1, 2, 4, 6, 8, 9], twos)}
    )
    assert difference is not None
    assert difference.names == ["b"]
    assert difference.compared == 2
    assert difference.others_in_words == "ranks 1, 2, 4, 6 and 2 more"
    assert find_difference({0: ones, 1: ones}) is None
