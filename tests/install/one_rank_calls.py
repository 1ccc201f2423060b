# SPDX-License-Identifier: Apache-2.0
"""Calls of every public name in a world of one rank: ``python one_rank_calls.py results.pt``.

Each call returns what a user sees: values, or the type of an error. `WITHOUT_CALL` has the names
that are no calls of their own. A new public name needs an entry in one of the two.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import torch_ring as hvd
from torch_ring import checkpoint, data, elastic, preemption

# Exceptions, types of arguments, and modules, whose own names count below.
WITHOUT_CALL = {
    *("HostsUpdatedInterrupt", "InvalidArgumentError", "MismatchError", "NonFiniteGradientError"),
    *("NotInitializedError", "PeerLostError", "RingError", "TimeoutError", "HorovodInternalError"),
    *("checkpoint", "data", "elastic", "functions", "lr_schedules", "metrics", "mpi_ops"),
    *("preemption", "Handle", "ReduceOp", "_basics", "StatefulCompressor", "Gather", "Reduce"),
    *("Adasum", "Average", "Band", "Bor", "Bxor", "Max", "Min", "Product", "Sum", "nccl_built"),
    *("elastic.HorovodInternalError", "elastic.HostsUpdatedInterrupt", "elastic.State"),
    *("elastic.ProcessSetLostError", "elastic.StateDamagedError", "elastic.StateLostError"),
    *("data.MODES", "data.InputReport", "checkpoint.CheckpointError", "elastic.ObjectState"),
    *("start_timeline", "stop_timeline"),  # test_one_rank.py has their messages
}
MODULES = (elastic, data, checkpoint)
CALLS: dict[str, Callable[[], Any]] = {}


def public_names() -> set[str]:
    """Return the names of the package, and those of its modules for users."""
    own = {f"{each.__name__.split('.')[-1]}.{name}" for each in MODULES for name in each.__all__}
    return {*hvd.__all__, *own}


def call(*names: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Make a function the call of public names."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        CALLS.update(dict.fromkeys(names, function))
        return function

    return add


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64)
DTYPES += (torch.uint8, torch.int8, torch.bool, torch.complex64)


def tensors() -> Iterator[Tensor]:
    """Yield tensors of many dtypes and layouts, with a row at least."""
    for dtype in DTYPES:
        yield torch.tensor([[0, 1, 3], [5, 77, 111]]).to(dtype)
    yield torch.arange(12.0).view(3, 4).t()
    yield torch.arange(6.0)[::2]
    yield torch.ones(1).expand(4)
    yield torch.empty(0, 3)
    yield torch.tensor([1 + 2j, 3j]).conj()
    yield torch.tensor([1 + 2j, 3j]).conj().imag
    yield torch.tensor([2**62, -(2**62), 2**53 + 1, 7])


def outcome(function: Callable[[], Any]) -> Any:
    """Return the result of a call, or the type of its error."""
    try:
        return function()
    except Exception as error:
        return type(error).__name__


def each(function: Callable[[Tensor], Any]) -> list[Any]:
    """Return the outcomes for all tensors, and for some wrong arguments."""
    wrong = [torch.tensor(1.0), torch.eye(2).to_sparse(), torch.ones(2, device="meta"), 3, None]
    return [outcome(lambda t=t: function(t)) for t in (*tensors(), *wrong)]


def applied(name: str, tensor: Tensor, *arguments: Any, **more: Any) -> Any:
    """Return the result of a collective of a tensor, or of two if it takes several."""
    given = [tensor, 2 * tensor] if name.startswith("grouped") else tensor
    result = getattr(hvd, name)(given, *arguments, **more)
    return hvd.synchronize(result) if "async" in name else result


def reductions(name: str) -> list[Any]:
    """Return the outcomes of a reduction with all operators, and with factors."""
    found = [each(lambda t, op=op: applied(name, t, op=op)) for op in hvd.ReduceOp]
    for op, factors in itertools.product((hvd.Sum, hvd.Adasum), FACTORS):
        more = {"op": op, "prescale_factor": factors[0], "postscale_factor": factors[1]}
        found.append(each(lambda t, more=more: applied(name, t, **more)))
    return found


FACTORS = [(1.0, 1.0), (0.3, 1.0), (2.0, -0.7), (1e30, 1.0), (3.0, 5.0), (0.3, 0.7)]
FACTORS += [(math.nan, 1.0), (math.inf, 1.0)]
for _name in ("allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "reducescatter"):
    CALLS[_name] = lambda name=_name: reductions(name)
    CALLS[f"grouped_{_name}"] = lambda name=f"grouped_{_name}": reductions(name)
for _name in ("reducescatter_async", "grouped_reducescatter_async"):
    CALLS[_name] = lambda name=_name: reductions(name)
for _name in ("allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"):
    CALLS[_name] = lambda name=_name: each(lambda t: applied(name, t))
for _name in ("broadcast", "broadcast_", "broadcast_async", "broadcast_async_"):
    CALLS[_name] = lambda name=_name: [
        each(lambda t, root=root: applied(name, t.clone(), root)) for root in (0, 1)
    ]
for _name in (
    *("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous"),
    *("is_initialized", "gloo_built", "gloo_enabled", "cuda_built", "mpi_built", "mpi_enabled"),
    *("mpi_threads_supported", "ccl_built", "ddl_built", "rocm_built", "barrier", "join"),
):
    CALLS[_name] = getattr(hvd, _name)
CALLS["check_extension"] = lambda: hvd.check_extension("horovod.torch", "", "")


@call("alltoall", "alltoall_async")
def alltoall() -> Any:
    splits = [None, [2], [1], [0], [9], [-1], [1, 1], torch.tensor([2])]
    return [
        each(lambda t, s=s, name=name: applied(name, t, s))
        for name in ("alltoall", "alltoall_async")
        for s in splits
    ]


@call("poll", "synchronize")
def handles() -> Any:
    handle = hvd.allreduce_async(torch.arange(3.0))
    result = hvd.synchronize(handle)
    return result, hvd.poll(handle), handle.wait(), outcome(lambda: hvd.poll(3))


@call("any_rank")
def any_rank() -> Any:
    return hvd.any_rank(True), hvd.any_rank(torch.tensor(0))


@call("allgather_object", "broadcast_object", "functions.broadcast_object")
def objects() -> Any:
    wrong = outcome(lambda: hvd.broadcast_object(lambda: 1, root_rank=1))
    return hvd.allgather_object({"a": [1]}), hvd.broadcast_object((2, "b")), wrong


@call("sparse_allreduce_async")
def sparse() -> Any:
    tensor = torch.sparse_coo_tensor([[1, 1, 0]], [1.0, 2.0, 3.0], (4,))
    found = [hvd.sparse_allreduce_async(tensor, op=op)() for op in (hvd.Sum, hvd.Average)]
    return [(each.to_dense(), each.is_coalesced()) for each in found]


@call("empty_shared")
def empty_shared() -> Any:
    made = hvd.empty_shared(2, 3, dtype=torch.float16)
    return made.shape, made.dtype, hvd.empty_shared([4]).numel()


@call("verify_consistency")
def verified() -> Any:
    return hvd.verify_consistency(nn.Linear(2, 2))


@call("global_process_set", "ProcessSet", "add_process_set", "remove_process_set", "hierarchy")
def process_sets() -> Any:
    host, firsts = hvd.hierarchy()
    found = [host.size(), host.rank(), host.ranks, hvd.global_process_set.ranks, firsts.included()]
    found += [
        hvd.allreduce(torch.ones(2), process_set=each) for each in (host, hvd.ProcessSet([0]))
    ]
    wrong = [outcome(lambda r=r: hvd.add_process_set(r)) for r in ([0], [0, 1], [])]
    return found, wrong, hvd.remove_process_set(host)


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def trained(**arguments: Any) -> Any:
    """Train in some of the ways of a user; return weights, state and gradients."""
    model = model_of()
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer: Any = hvd.DistributedOptimizer(plain, model.named_parameters(), **arguments)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    gradients = []
    for step in range(4):
        optimizer.zero_grad()
        for _ in range(arguments.get("backward_passes_per_step", 1)):
            model(torch.randn(5, 3)).square().sum().backward()
        if step == 1 and arguments.get("op") != hvd.Adasum:
            with optimizer.no_sync():
                model(torch.randn(5, 3)).sum().backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        gradients.append([p.grad.clone() for p in model.parameters()])
    hvd.broadcast_buffers(model)
    return model.state_dict(), optimizer.state_dict(), gradients


@call("DistributedOptimizer", "broadcast_parameters", "broadcast_optimizer_state")
def optimizers() -> Any:
    kinds = [{}, {"backward_passes_per_step": 2}, {"op": hvd.Sum}, {"op": hvd.Adasum}]
    kinds += [{"shard_state": True}, {"nan_check": True}, {"num_groups": 2}]
    kinds += [{"gradient_predivide_factor": 2.0}]
    wrong = outcome(lambda: trained(op=hvd.Min)), outcome(lambda: trained(groups=1.5))
    return [trained(**kind) for kind in kinds], wrong


class Halves(hvd.ErrorFeedback):
    """Sends every second element."""

    def send(self, gradient: Tensor, state: dict[str, Any]) -> Any:
        sent = torch.zeros_like(gradient)
        sent.view(-1)[::2] = gradient.reshape(-1)[::2]
        return (yield hvd.Reduce(sent)), sent


@call("Compression", "Compressor", "ErrorFeedback", "broadcast_buffers")
def compressed() -> Any:
    kinds = [hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compression.int8()]
    kinds += [hvd.Compression.powersgd(), Halves()]
    reduced = hvd.allreduce(torch.tensor([1.0001, 3.0]), compression=hvd.Compression.fp16)
    return reduced, [trained(compression=kind) for kind in kinds]


@call("nan_check")
def nan_check() -> Any:
    model = model_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), nan_check=True)
    found = []
    for number in (torch.nan, torch.inf):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, number)
        found.append(words(optimizer.step))
    rows = nn.Parameter(torch.eye(2).to_sparse_csr())
    rows.grad = torch.full((2, 2), torch.nan).to_sparse_csr()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([rows], lr=0.1), nan_check=True)
    return [*found, words(optimizer.step)]


def words(step: Callable[[], Any]) -> str:
    """Return the error of a step."""
    try:
        step()
    except hvd.NonFiniteGradientError as error:
        return str(error)
    return "none"


@call("LocalSGD", "DiLoCo")
def local_steps() -> Any:
    found = []
    for wrap in (hvd.LocalSGD, hvd.DiLoCo):
        model = model_of()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), every=2)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(5, 3)).square().sum().backward()
            optimizer.step()
        found.append(model.state_dict())
    return found


@call("SyncBatchNorm", "convert_sync_batchnorm")
def batch_norm() -> Any:
    model = hvd.convert_sync_batchnorm(model_of())
    model(torch.randn(5, 3)).sum().backward()
    return model.state_dict(), [p.grad for p in model.parameters()]


@call("derivatives")
def derivatives() -> Any:
    found = []
    for function in (hvd.allreduce, hvd.allgather, hvd.reducescatter, hvd.alltoall):
        tensor = torch.arange(4.0).requires_grad_()
        function(tensor).square().sum().backward()
        found.append(tensor.grad)
    return found


@call("in_autograd")
def in_autograd() -> Any:
    """A write in place makes a saved value stale; results require no gradient."""
    tensor = torch.ones(2, requires_grad=True)
    kept = tensor * 1.0
    loss = kept.square().sum()
    hvd.allreduce_(kept.detach())
    with torch.inference_mode():
        inference = hvd.allreduce_(torch.ones(2))
    result = hvd.allreduce_async(tensor).wait()
    refused = [outcome(lambda: torch.func.vmap(hvd.allreduce_async)(torch.ones(2)))]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        refused += [outcome(lambda: hvd.allreduce(dual)), outcome(lambda: hvd.broadcast_(dual, 0))]
    return [outcome(loss.backward), inference, result.requires_grad, refused]


@call("elastic.run", "elastic.TorchState", "elastic.ElasticSampler")
def elastic_training() -> Any:
    model, seen = model_of(), []
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    sampler = elastic.ElasticSampler(range(6), shuffle=False)
    state = elastic.TorchState(model, optimizer, batch=0, sampler=sampler)
    state.register_reset_callbacks([lambda: seen.append("reset")])

    @elastic.run
    def train(state: Any) -> str:
        while state.batch < 4:
            model(torch.randn(5, 3)).sum().backward()
            optimizer.step()
            state.batch += 1
            if state.batch == 3 and "failed" not in seen:
                seen.append("failed")
                raise hvd.RingError("made up")
            state.commit()
        return "finished"

    result = train(state)
    return result, state.batch, list(sampler), seen, hvd.size()


@call("data.ShardedSampler", "data.split", "data.InputPipeline", "data.DevicePrefetcher")
@call("data.default_num_workers")
def loading() -> Any:
    sampler = data.ShardedSampler(range(7), shuffle=True)
    sampler.set_epoch(2)
    batches = data.DevicePrefetcher([torch.ones(2), (torch.zeros(1), "a")], "cpu")
    has_number = data.default_num_workers() >= 0
    return list(sampler), list(data.split(iter(range(5)))), list(batches), has_number


@call("checkpoint.save", "checkpoint.load")
def checkpoints() -> Any:
    model = model_of()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved.pt"
        checkpoint.save(path, {"model": model.state_dict(), "epoch": 3})
        return checkpoint.load(path), outcome(lambda: checkpoint.load(path.parent / "none"))


@call("preemption.watch")
def preempted() -> Any:
    preemption.watch()
    return preemption.requested(), preemption.reason(), preemption.watch([])


@call("init", "shutdown")
def again() -> Any:
    hvd.shutdown()
    before = outcome(lambda: hvd.allreduce(torch.ones(1)))
    hvd.init()
    return before, hvd.size(), outcome(lambda: hvd.init(rank=0, size=1))


def main(path: str) -> None:
    torch.set_num_threads(1)
    hvd.init()
    found = {}
    for name, function in CALLS.items():
        torch.manual_seed(5)
        found[name] = outcome(function)
    torch.save(found, path)


if __name__ == "__main__":
    main(sys.argv[1])
