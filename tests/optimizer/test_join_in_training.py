"""Ranks that run out of batches: join() in training."""

import gc
import os
import shutil

import namespaces
import pytest
import torch
from pool import run
from torch import nn
from torch.optim import SGD, Optimizer
from training import assert_same_on_all_ranks, assert_same_weights, make_model, weights

import torch_ring as hvd

on_larger_worlds = pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("tcp", 3)])


def rows_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + step))


def train_unevenly(first_out: int, options: dict[str, object]) -> None:
    """Rank `first_out` has one batch, the next one two, and so on; then all have some again."""
    rank, size = hvd.rank(), hvd.size()
    alone, together = make_model(), make_model()
    reference = SGD(alone.parameters(), lr=0.1, momentum=0.9)
    shuffled = list(together.parameters())[::-1]  # so that the order of readiness is unexpected
    optimizer = hvd.DistributedOptimizer(SGD(shuffled, lr=0.1, momentum=0.9), **options)
    for epoch in range(3):
        # In the first epoch the order of readiness is unknown; rank 0 may have joined already.
        counts = [(r - first_out) % size + (epoch == 2) for r in range(size)]
        for step in range(max(counts)):
            reference.zero_grad()
            for r in range(size):
                if step < counts[r]:
                    (alone(rows_of(r, step)).square().mean() / size).backward()
            reference.step()
        for step in range(counts[rank]):
            optimizer.zero_grad()
            together(rows_of(rank, step)).square().mean().backward()
            optimizer.step()
        last = hvd.join()
        assert counts[last] == max(counts)
        # A joined rank has not stepped, so it needs the weights of one that has.
        hvd.broadcast_parameters(together.state_dict(), last)
        hvd.broadcast_optimizer_state(optimizer, last)
        assert_same_weights(together, alone)
        assert_same_on_all_ranks(*together.parameters())
        plan = optimizer._reducer.layout.plan
        assert all(other == plan for other in hvd.allgather_object(plan))


@pytest.mark.parametrize("first_out", [0, 1])
@on_larger_worlds
def test_uneven_batches(transport, size, first_out):
    run(train_unevenly, size, args=(first_out, {}), transport=transport)


def train_on_an_equal_set() -> None:
    """A set that consists of all ranks is the global one: join() brings it in step again, too."""
    everyone = hvd.ProcessSet(range(hvd.size()))
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), process_set=everyone)
    for epoch in range(2):
        for step in range(1 + 2 * hvd.rank() + epoch):
            optimizer.zero_grad()
            model(rows_of(hvd.rank(), step)).square().mean().backward()
            optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), hvd.join())
    assert_same_on_all_ranks(*model.parameters())


def test_uneven_batches_on_a_set_that_equals_the_global_one():
    run(train_on_an_equal_set, 2)


@pytest.mark.parametrize("options", [{"groups": 2}, {"compression": hvd.Compression.none}])
def test_uneven_batches_in_many_buckets(options):
    env = {"TORCH_RING_BUCKET_BYTES": "256"}
    for transport in ("shm", "tcp"):
        run(train_unevenly, 2, args=(0, options), transport=transport, env=env)


def train_on_sparse_gradients() -> None:
    words = nn.Embedding(6, 2, sparse=True)
    nn.init.ones_(words.weight)
    optimizer: Optimizer = hvd.DistributedOptimizer(SGD(words.parameters(), lr=1.0))
    rank, size = hvd.rank(), hvd.size()
    for _ in range(2):
        for step in range(size - rank):
            optimizer.zero_grad()
            words(torch.tensor([rank, 5])).sum().backward()
            here = size - step
            expected = [1 / size if r < here else 0 for r in range(5)] + [here / size]
            assert words.weight.grad.to_dense()[:, 0].tolist() == pytest.approx(expected)
        assert hvd.join() == 0


@on_larger_worlds
def test_uneven_batches_with_sparse_gradients(transport, size):
    run(train_on_sparse_gradients, size, transport=transport)


def join_before_the_step() -> None:
    """A rank that joins between backward and step trains on with the others afterwards."""
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.0))
    (2 * x).backward()
    if hvd.rank() == 1:
        hvd.join()
    else:
        optimizer.step()
        for _ in range(2):
            optimizer.zero_grad()
            (4 * x).backward()
            assert x.grad.item() == pytest.approx(4 * (hvd.size() - 1) / hvd.size())
            optimizer.step()
        hvd.join()
    x.grad = None  # like model.zero_grad()
    if hvd.rank() == 0:  # only one has a gradient: the others learn of it at the step
        (6 * x).backward()
    optimizer.step()
    assert x.grad.item() == pytest.approx(6 / hvd.size())


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_are_in_step_after_join(size):
    run(join_before_the_step, size)


def compress_unevenly(name: str) -> str:
    """A stateful compressor needs every rank: ranks that go on get an error, and do not hang."""
    model = make_model()
    compression = getattr(hvd.Compression, name)()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), compression=compression)
    if hvd.rank() == 0:
        hvd.join()
        return ""
    with pytest.raises(hvd.MismatchError) as error:
        model(rows_of(1, 0)).sum().backward()
    hvd.join()
    optimizer.zero_grad()
    return str(error.value)


@pytest.mark.parametrize("name", ["int8", "powersgd"])
def test_stateful_compressors_need_all_ranks(name):
    messages = run(compress_unevenly, 3, args=(name,))
    assert all("join" in message for message in messages[1:])


def add_up_passes(op: hvd.ReduceOp, zero: str) -> None:
    """Two backward passes a step, each reduced, while one rank after the other runs out of data."""
    rank, size = hvd.rank(), hvd.size()
    parameters = [nn.Parameter(torch.full((40, 2), 1.0, dtype=torch.float64)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.25), op=op)
    expected = 1.0
    for epoch in range(2):
        for step in range(2 * size):
            active = [r for r in range(size) if step < 2 * (r + 1)]
            gradient = sum(2.0 * (1 + r + step) + 1 for r in active) / (
                1 if op == hvd.Sum else size
            )
            if rank in active:
                if zero == "to none":
                    optimizer.zero_grad()
                elif zero == "to zero":
                    optimizer.zero_grad(set_to_none=False)
                else:
                    for parameter in parameters:
                        if parameter.grad is not None:
                            parameter.grad.zero_()
                for number in range(2):
                    factor = 1.0 + rank + step + number
                    sum((parameter * factor).sum() for parameter in parameters).backward()
                optimizer.step()
                expected -= 0.25 * gradient
                for parameter in parameters:
                    assert (parameter.grad - gradient).abs().max() < 1e-10
                    assert (parameter - expected).abs().max() < 1e-10
        last = hvd.join()
        assert last == size - 1, (epoch, last)
        for parameter in parameters:
            hvd.broadcast_(parameter.data, last)
        expected = parameters[0][0, 0].item()


@on_larger_worlds
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("zero", ["to none", "to zero", "by hand"])
def test_passes_that_are_added_up(transport, size, op, zero):
    run(add_up_passes, size, args=(op, zero), transport=transport)


def keep_gradients(op: hvd.ReduceOp, how: str) -> None:
    """No zero_grad(): each pass adds to averaged gradients, while ranks join one after another."""
    rank, size = hvd.rank(), hvd.size()
    of_step = 3 if how == "in the middle of a step" else 1  # passes
    counts = [2 * of_step * (r + 1) + of_step // 3 for r in range(size)]
    parameters = [nn.Parameter(torch.ones(*of, dtype=torch.float64)) for of in [(40, 2), (300,)]]
    parameters.append(nn.Parameter(torch.ones(4, 3, dtype=torch.complex128).t()))
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=op)

    def uses(r: int) -> int:
        return 1 if how == "some parameters" and r % 2 else len(parameters)

    for _ in range(2):
        for parameter in parameters:
            given = torch.zeros(2, *parameter.shape, dtype=parameter.dtype)[1]
            parameter.grad = given if how == "in the program's memory" else None
        expected = [0.0 for _ in parameters]
        for number in range(counts[-1]):
            for r in range(size):
                if number < counts[r]:
                    for index in range(uses(r)):
                        expected[index] += (1.0 + r + number) / (1 if op == hvd.Sum else size)
            if number < counts[rank]:
                factor = 1.0 + rank + number
                sum((factor * p.real).sum() for p in parameters[: uses(rank)]).backward()
                for parameter, value in zip(parameters, expected, strict=True):
                    assert (parameter.grad - value).abs().max() < 1e-10
                if number % of_step == of_step - 1:
                    optimizer.step()
        assert hvd.join() == size - 1


keeping = pytest.mark.parametrize(
    "how",
    ["after each step", "in the middle of a step", "in the program's memory", "some parameters"],
)


@on_larger_worlds
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@keeping
def test_a_rank_joins_while_gradients_are_kept(transport, size, op, how):
    run(keep_gradients, size, args=(op, how), transport=transport)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@keeping
def test_a_rank_joins_while_gradients_are_kept_in_many_buckets(op, how):
    env = {"TORCH_RING_BUCKET_BYTES": "256", "TORCH_RING_DIRECT_GRADIENT_BYTES": "512"}
    run(keep_gradients, 3, args=(op, how), transport="tcp", env=env)


def keep_gradients_on_hosts(how: str) -> None:
    hvd.init()
    keep_gradients(hvd.Average, how)
    hvd.shutdown()


@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` (iproute2)")
@keeping
def test_a_rank_joins_while_gradients_are_kept_on_two_hosts(hosts, how):
    run(
        keep_gradients_on_hosts,
        3,
        args=(how,),
        initialized=False,
        transport="",
        env={"MASTER_ADDR": f"{namespaces.NETWORK}.1"},
        namespaces=[hosts[0], hosts[0], hosts[1]],
    )


def join_with_other_gradients(how: str) -> None:
    """An averaged gradient that the program has changed on a rank stays that rank's own."""
    a, b = weights(1, 2)
    optimizer = hvd.DistributedOptimizer(SGD([a, b], lr=0.0), [("a", a), ("b", b)])
    (a + b).backward()
    if how != "clipped here":
        optimizer.step()
    kept = 1.0
    if hvd.rank() == 0:
        if how == "changed there":
            a.grad.mul_(2)
        elif how == "dropped there":
            a.grad = None
    else:
        if how in ("changed here", "clipped here"):
            a.grad.mul_(0.5)
            kept = 0.5
        elif how == "changed on one":
            kept = float(hvd.rank())
            a.grad.fill_(kept)
        a.backward()
        assert a.grad.item() == pytest.approx(kept + 2 / 3)
        assert b.grad.item() == 1.0
    hvd.join()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    "how", ["changed there", "dropped there", "changed here", "clipped here", "changed on one"]
)
def test_a_rank_joins_with_other_gradients(transport, how):
    run(join_with_other_gradients, 3, args=(how,), transport=transport)


def join_while_gradients_accumulate(op: hvd.ReduceOp) -> None:
    """A rank joins; another optimizer's pass tells it, and kept gradients are reduced later.

    `c` is in no pass then, and step() averages it once more.
    """
    a, b, c = weights(1, 2, 3)
    first = hvd.DistributedOptimizer(SGD([a, c], lr=0.0), op=op, backward_passes_per_step=2)
    second = hvd.DistributedOptimizer(SGD([b], lr=0.0), op=op)
    size, count = hvd.size(), 1 if op == hvd.Sum else hvd.size()
    for _ in range(2):
        ((1 + hvd.rank()) * (a + b + c)).backward()
    first.step()
    second.step()
    total = sum(1 + rank for rank in range(size))
    assert (a.grad.item(), b.grad.item()) == pytest.approx((2 * total / count, 2 * total / count))
    if hvd.rank() > 0:
        ((1 + hvd.rank()) * a).backward()  # accumulates
        ((1 + hvd.rank()) * b).backward()
        left = total - 1
        assert b.grad.item() == pytest.approx((2 * total + left) / count)
        first.step()
        assert a.grad.item() == pytest.approx((2 * total + left) / count)
        assert c.grad.item() == pytest.approx(2 * total / count)
    hvd.join()


@on_larger_worlds
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_rank_joins_while_kept_gradients_accumulate(transport, size, op):
    run(join_while_gradients_accumulate, size, args=(op,), transport=transport)


def join_before_a_step_without_a_pass(op: hvd.ReduceOp) -> None:
    """The others step with their kept gradients, and with a gradient that they set."""
    a, b = weights(1, 2)
    optimizer = hvd.DistributedOptimizer(SGD([a, b], lr=0.0), op=op)
    size, count = hvd.size(), 1 if op == hvd.Sum else hvd.size()
    ((1 + hvd.rank()) * (a + b)).backward()
    optimizer.step()
    total = sum(1 + rank for rank in range(size))
    if hvd.rank() > 0:
        b.grad = torch.ones_like(b)
        optimizer.step()
        assert a.grad.item() == pytest.approx(total / count)
        assert b.grad.item() == pytest.approx((size - 1) / count)
        ((1 + hvd.rank()) * a).backward()
        assert a.grad.item() == pytest.approx((2 * total - 1) / count)
    hvd.join()


@on_larger_worlds
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_rank_joins_before_a_step_without_a_pass(transport, size, op):
    run(join_before_a_step_without_a_pass, size, args=(op,), transport=transport)


def add_up_shared_gradients() -> None:
    """Two optimizers share a parameter: its averaged gradient is scaled for both, and only once."""
    shared, *own = weights(1, 2, 3)
    optimizers = [hvd.DistributedOptimizer(SGD([each, shared], lr=0.0)) for each in own]

    def backward(*used: nn.Parameter) -> None:
        ((1 + hvd.rank()) * sum([shared, *used])).backward()

    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(*own)
    for optimizer in optimizers:
        optimizer.step()
    if hvd.rank() > 0:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        of_pass = sum(1 + rank for rank in range(1, hvd.size())) / hvd.size()
        for number in range(3):
            backward(*own[: hvd.rank()] if number == 0 else own)
            assert shared.grad.item() == pytest.approx((number + 1) * of_pass)
    hvd.join()


@on_larger_worlds
def test_shared_gradients_of_several_passes(transport, size):
    run(add_up_shared_gradients, size, transport=transport)


def keep_large_halves() -> None:
    """Two ranks join at once; the sum of their parts exceeds 16 bits."""
    a = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = hvd.DistributedOptimizer(SGD([a], lr=0.0))
    (a * 40000).sum().backward()
    optimizer.step()
    if hvd.rank() > 1:
        (a * 1600).sum().backward()
        assert a.grad.tolist() == [40000 + 800] * 4
        optimizer.step()
    hvd.join()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_joined_ranks_give_does_not_overflow(transport):
    run(keep_large_halves, 4, transport=transport)


def join_beside_a_dropped_optimizer() -> None:
    """One rank has dropped an optimizer with accumulating gradients when another rank joins."""
    a, b = weights(1, 2)
    first = hvd.DistributedOptimizer(SGD([a], lr=0.0), backward_passes_per_step=2)
    second = hvd.DistributedOptimizer(SGD([b], lr=0.0))
    (a + b).backward()
    second.step()
    if hvd.rank() == 1:
        del first
        gc.collect()
    if hvd.rank() > 0:
        (b * hvd.rank()).backward()
        assert b.grad.item() == pytest.approx(1 + sum(range(hvd.size())) / hvd.size())
        second.step()
    hvd.join()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_joins_beside_a_dropped_optimizer(transport):
    run(join_beside_a_dropped_optimizer, 3, transport=transport)
