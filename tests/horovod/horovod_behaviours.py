"""What a user of horovod.torch relies on, a function for each behaviour.

Each function runs on the ranks of an initialised world of 2 or 3 and leaves it usable. As a script,
all of them run in one job of any launcher. The numbers are those by which the project lists them.
"""

from __future__ import annotations

import copy
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torch_ring as hvd


@contextmanager
def raises(kind: type[BaseException], text: str = "") -> Iterator[None]:
    with pytest.raises(kind, match=re.escape(text)):
        yield


def everyone(value: object) -> list[object]:
    return hvd.allgather_object(value)


def same_everywhere(*tensors: Tensor) -> bool:
    return all(
        all(torch.equal(tensor, other) for other in hvd.allgather_object(tensor))
        for tensor in tensors
    )


def behaviour_01_names_not_order() -> None:
    order = ["a", "b", "c"]
    names = order[hvd.rank() % 3 :] + order[: hvd.rank() % 3]
    handles = {n: hvd.allreduce_async(torch.full((3,), ord(n)), name=n) for n in names}
    for name in order:
        assert hvd.synchronize(handles[name]).tolist() == [ord(name)] * 3
    if hvd.rank() == 0:  # the other ranks have not submitted it, so it is in flight
        first = hvd.allreduce_async(torch.ones(1), name="twice")
        with raises(ValueError, "in flight"):
            hvd.allreduce_async(torch.ones(1), name="twice")
        assert not hvd.poll(first)
        hvd.allgather_object(None)
        hvd.synchronize(first)
    else:
        hvd.allgather_object(None)
        hvd.allreduce(torch.ones(1), name="twice")
    hvd.allreduce(torch.ones(1), name="twice")  # free again


def behaviour_02_asynchronous() -> None:
    late = threading.Event()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="async")
        assert not hvd.poll(handle)  # nobody else has submitted it
        hvd.barrier()
        while not hvd.poll(handle):  # done by itself, without a waiting thread
            late.wait(0.001)
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="async")
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2


def behaviour_03_mismatches() -> None:
    rank = hvd.rank()
    cases: list[Callable[[], object]] = [
        lambda: hvd.allreduce(torch.ones(2 + rank), name="shape"),
        lambda: hvd.allreduce(torch.ones(2).to([torch.int32, torch.float64][rank % 2]), name="d"),
        lambda: hvd.allreduce(torch.ones(2), op=[hvd.Min, hvd.Sum][rank % 2], name="op"),
        lambda: hvd.broadcast(torch.ones(2), rank % 2, name="root"),
        lambda: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + rank, name="factor"),
        lambda: hvd.alltoall(torch.ones(hvd.size(), 1 + rank), name="columns"),
        lambda: hvd.reducescatter(torch.ones(2 + rank), name="rows"),
    ]
    for case in cases:
        with raises(RuntimeError, "rank 1"):
            case()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    with raises(ValueError):
        hvd.alltoall(torch.ones(3), torch.tensor([9] * hvd.size()))
    with raises(ValueError):
        hvd.allgather(torch.tensor(1.0))
    with raises(ValueError):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)


def behaviour_04_handles() -> None:
    handle = hvd.allreduce_async(torch.ones(1))
    assert hvd.synchronize(handle).item() == 1
    assert hvd.synchronize(handle) is None
    tensor, splits = hvd.synchronize(hvd.alltoall_async(torch.ones(hvd.size()), [1] * hvd.size()))
    assert splits.tolist() == [1] * hvd.size() == [int(x) for x in tensor.tolist()]
    group = hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(1), torch.ones(2)]))
    assert [len(t) for t in group] == [1, 2]
    for function in (hvd.poll, hvd.synchronize):
        with raises(ValueError):
            function(12345)


def behaviour_05_arithmetic() -> None:
    size, rank = hvd.size(), hvd.rank()
    total = size * (size - 1) // 2
    for dtype in (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64):
        assert hvd.allreduce(torch.full((2,), rank, dtype=dtype), op=hvd.Sum)[0] == total
    for asked in (False, 0, np.bool_(False)):  # whatever is false
        assert hvd.allreduce(torch.tensor(float(rank)), average=asked) == total
    for asked in (None, True, 1):
        assert hvd.allreduce(torch.tensor(float(rank)), average=asked) == (size - 1) / 2
    negative = hvd.allreduce(torch.full((1,), -1 - (rank == 0), dtype=torch.int64))
    assert negative.item() == -1  # truncated toward zero
    scaled = hvd.allreduce(torch.tensor([3]), op=hvd.Sum, prescale_factor=0.5)
    assert scaled.item() == size  # the factor comes first, and truncates
    assert hvd.allreduce(torch.full((1,), 1.5).bfloat16()).dtype == torch.bfloat16
    image = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for strange in (image, torch.rand(4, 6).t(), torch.rand(8)[::2], torch.tensor(1.5)):
        torch.testing.assert_close(hvd.broadcast(strange, 0), hvd.broadcast(strange + 0, 0))
    assert hvd.allgather(torch.tensor([rank > 0])).tolist() == [r > 0 for r in range(size)]


def behaviour_06_in_place() -> None:
    leaf = torch.full((2,), float(hvd.rank()), requires_grad=True)
    version = leaf._version
    assert hvd.allreduce_(leaf, op=hvd.Max) is leaf
    assert leaf.tolist() == [hvd.size() - 1] * 2
    assert leaf._version > version
    assert hvd.synchronize(hvd.broadcast_async_(leaf, 0)) is leaf
    assert hvd.grouped_allreduce_([leaf])[0] is leaf


def behaviour_07_roots_and_rows() -> None:
    size, rank = hvd.size(), hvd.rank()
    upper = hvd.add_process_set(list(range(1, size)))
    if upper.included():
        got = hvd.broadcast(torch.tensor([rank]), root_rank=size - 1, process_set=upper)
        assert got.item() == size - 1
        with raises(ValueError):
            hvd.broadcast(torch.ones(1), root_rank=0, process_set=upper)
    hvd.remove_process_set(upper)
    rows = hvd.reducescatter(torch.ones(size + 1, 2), op=hvd.Sum)
    assert rows.shape == (2 if rank == 0 else 1, 2)
    with raises(ValueError):
        hvd.reducescatter(torch.tensor(1.0))
    with raises(ValueError):
        hvd.reducescatter(torch.ones(2), op=hvd.Max)
    assert isinstance(hvd.alltoall(torch.ones(size)), Tensor)


def behaviour_08_gradients() -> None:
    size, rank = hvd.size(), hvd.rank()
    weights = torch.arange(1.0, size + 1)

    def gradient(function: Callable[[Tensor], Tensor], rows: int) -> Tensor:
        x = torch.ones(rows, requires_grad=True)
        (function(x).sum() * weights[rank]).backward()
        assert x.grad is not None
        return x.grad

    mean = float(weights.mean())
    assert gradient(lambda x: hvd.allreduce(x), 2).tolist() == [mean] * 2
    assert gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), 2).tolist() == [mean * size] * 2
    assert gradient(hvd.allgather, 1 + rank).tolist() == [mean] * (1 + rank)
    assert gradient(lambda x: hvd.broadcast(x, 0), 2).tolist() == [mean * (rank == 0)] * 2
    assert gradient(hvd.reducescatter, size).tolist() == weights.tolist()
    summed = gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), size)
    assert summed.tolist() == (size * weights).tolist()
    assert gradient(lambda x: hvd.alltoall(x, [1] * size)[0], size).tolist() == weights.tolist()


def behaviour_09_join() -> None:
    rank, size = hvd.rank(), hvd.size()
    model = nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    for step in range(rank + 1):  # uneven data
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert model.bias.grad is not None
        torch.testing.assert_close(model.bias.grad, torch.tensor([(size - step) / size]))
        optimizer.step()
        assert hvd.allreduce(torch.ones(1), op=hvd.Product, name=f"loss.{step}").item() == 1
    assert hvd.join() == size - 1
    hvd.broadcast_parameters(model.state_dict(), size - 1)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size  # numbered alike again
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert same_everywhere(*model.parameters())


def trained(scheme: str) -> Tensor:
    """Return the weights after three steps, taken in one of the ways of Horovod's scripts."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    for step in range(3):
        data = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        if scheme == "plain":
            optimizer.step()
            continue
        optimizer.synchronize()
        if scheme == "skip":
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
    return model.weight.detach().clone()


def behaviour_10_synchronize() -> None:
    weights = [trained(scheme) for scheme in ("plain", "skip", "twice")]
    assert all(torch.equal(weights[0], other) for other in weights)
    assert same_everywhere(weights[0])


def behaviour_11_backward_passes() -> None:
    size = hvd.size()
    x = torch.zeros(1, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([x], lr=1.0), [("x", x)], backward_passes_per_step=2
    )
    mean = (size - 1) / 2
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            (x * hvd.rank()).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, torch.tensor([2 * mean]))  # summed, then averaged
        optimizer.step()
    optimizer.zero_grad()
    (x * hvd.rank()).sum().backward()
    optimizer.step()  # fewer: what is there
    torch.testing.assert_close(x.detach(), torch.tensor([-5 * mean]))
    optimizer.zero_grad()
    for _ in range(2):
        (x * hvd.rank()).sum().backward()
    with raises(AssertionError):
        (x * hvd.rank()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.backward_passes_per_step == 2
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    (x * hvd.rank()).sum().backward()
    assert x.grad.item() == mean
    optimizer.step()


def behaviour_12_predivide_and_groups() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    hvd.broadcast_parameters(model.state_dict(), 0)
    reference: list[Tensor] = []
    parameters = list(model.parameters())
    for options in (
        {},
        {"gradient_predivide_factor": 4.0},
        {"groups": 2},
        {"groups": [parameters[:2], parameters[2:3]]},
        {"num_groups": 2},
    ):
        copied = copy.deepcopy(model)
        if isinstance(options.get("groups"), list):
            own = list(copied.parameters())
            options = {"groups": [own[:2], own[2:3]]}
        sgd = torch.optim.SGD(copied.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = hvd.DistributedOptimizer(sgd, copied.named_parameters(), **options)
        copied(torch.full((1, 2), 1.0 + hvd.rank())).sum().backward()
        optimizer.step()
        reference = reference or [p.detach().clone() for p in copied.parameters()]
        for ours, theirs in zip(copied.parameters(), reference, strict=True):
            torch.testing.assert_close(ours.detach(), theirs)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in (
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        {"groups": -1},
        {"groups": [[torch.ones(1)]]},
        {"groups": [parameters[:1], parameters[:1]]},
    ):
        with raises(ValueError):
            hvd.DistributedOptimizer(sgd, model.named_parameters(), **wrong)


def behaviour_13_wrapping() -> None:
    model = nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(adam, model.named_parameters())
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert optimizer.defaults["lr"] == 0.5
    assert pickle.loads(pickle.dumps(optimizer)).defaults["lr"] == 0.5
    weight, bias = model.parameters()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for names in ([("a", weight), ("a", bias)], [("a", weight)], ["weight", "bias"]):
        with raises(ValueError):
            hvd.DistributedOptimizer(sgd, names)
    late = nn.Linear(1, 1)
    optimizer.add_param_group({"params": late.parameters()})
    late(model(torch.full((1, 2), float(hvd.rank())))).sum().backward()
    assert late.bias.grad is not None
    assert same_everywhere(late.weight.grad, model.weight.grad)
    optimizer.zero_grad(set_to_none=True)
    assert late.bias.grad is None


def behaviour_14_zero_grad() -> None:
    x = torch.zeros(1, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), [("x", x)])
    x.sum().backward()
    optimizer.zero_grad()  # nothing is outstanding: Horovod's assertion has no cause
    x.sum().backward()
    optimizer.step()
    assert x.item() == -1


def behaviour_15_optimizer_state() -> None:
    rank = hvd.rank()
    model = nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    before = model.weight.detach().clone()
    plain = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), weight_decay=0.5)
    hvd.broadcast_optimizer_state(plain, root_rank=0)
    assert plain.param_groups[0]["lr"] == 0.1
    adam = torch.optim.AdamW(model.parameters(), lr=1, betas=(0.5, 0.6 + 0.1 * rank))
    if rank == 0:
        model(torch.ones(1, 2)).sum().backward()
        adam.step()
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(adam, root_rank=0)
    assert adam.param_groups[0]["betas"] == (0.5, 0.6)
    assert type(adam.param_groups[0]["lr"]) is int
    assert adam.state[model.weight]["step"] == 1
    assert same_everywhere(adam.state[model.weight]["exp_avg"], model.weight.detach())
    assert not torch.equal(before, model.weight)


def behaviour_16_adasum() -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    if hvd.size() == 3:
        with raises(ValueError, "power of two"):
            hvd.allreduce(torch.ones(1), op=hvd.Adasum)
        with raises(ValueError, "power of two"):
            hvd.DistributedOptimizer(sgd, model.named_parameters(), op=hvd.Adasum)
        return
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    ab, aa, bb = (a @ b).item(), (a @ a).item(), (b @ b).item()
    want = (1 - ab / (2 * aa)) * a + (1 - ab / (2 * bb)) * b
    torch.testing.assert_close(hvd.allreduce([a, b][hvd.rank()], op=hvd.Adasum), want)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), op=hvd.Adasum)
    start = model.weight.detach().clone()
    model([a, b][hvd.rank()]).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), start - 0.1 * want)
    with raises(AssertionError), optimizer.skip_synchronize():
        pass


def behaviour_17_sparse() -> None:
    size, rank = hvd.size(), hvd.rank()
    gradients = []
    for as_dense in (False, True):
        embedding = nn.Embedding(size + 2, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(embedding.parameters(), lr=1.0),
            embedding.named_parameters(),
            sparse_as_dense=as_dense,
        )
        embedding(torch.tensor([0, rank + 1])).sum().backward()
        optimizer.synchronize()
        gradient = embedding.weight.grad
        assert gradient is not None
        assert gradient.is_sparse
        gradients.append(gradient.to_dense())
        with optimizer.skip_synchronize():
            optimizer.step()
    want = torch.tensor([1.0] + [1 / size] * size + [0.0])
    for dense in gradients:
        torch.testing.assert_close(dense[:, 0], want)


def behaviour_18_again_and_again() -> None:
    for _ in range(3):
        hvd.shutdown()
        assert not hvd.is_initialized()
        with raises(ValueError, "init"):
            hvd.allreduce(torch.ones(1))
        hvd.init()
        hvd.init()  # nothing
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def behaviour_19_process_sets() -> None:
    size, rank = hvd.size(), hvd.rank()
    first = hvd.add_process_set([0])
    rest = hvd.add_process_set(hvd.ProcessSet(list(range(1, size))))
    mine, other = (first, rest) if rank == 0 else (rest, first)
    assert mine.included()
    assert not other.included()
    assert hvd.global_process_set.process_set_id == 0
    assert (first.process_set_id, rest.process_set_id) == (1, 2)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=mine).item() == mine.size()
    assert hvd.allgather_object(rank, process_set=mine) == mine.ranks
    for call in (
        lambda: hvd.allreduce(torch.ones(1), process_set=other),
        lambda: hvd.barrier(process_set=other),
        lambda: hvd.add_process_set([0]),
    ):
        with raises(ValueError):
            call()
    x = torch.zeros(1, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), [("x", x)], process_set=rest)
    (x * rank).sum().backward()
    optimizer.step()
    assert -x.item() == (0 if rank == 0 else sum(range(1, size)) / (size - 1))
    assert hvd.remove_process_set(rest)
    assert hvd.remove_process_set(first)
    assert not hvd.remove_process_set(hvd.global_process_set)


def behaviour_20_sync_batch_norm() -> None:
    size, rank = hvd.size(), hvd.rank()
    data = torch.randn(2 * size, 3, 4, generator=torch.Generator().manual_seed(1))
    joined = nn.BatchNorm1d(3)(data)[2 * rank : 2 * rank + 2]
    sync = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))
    torch.testing.assert_close(sync(data[2 * rank : 2 * rank + 2]), joined)


BEHAVIOURS = [value for name, value in list(globals().items()) if name.startswith("behaviour_")]


def main() -> None:
    hvd.init()
    for behaviour in BEHAVIOURS:
        behaviour()
    print(f"rank {hvd.rank()} of {hvd.size()}: {len(BEHAVIOURS)} behaviours", flush=True)
