# SPDX-License-Identifier: Apache-2.0
"""Memory of large results: written past the caches, into pages that later results reuse.

The pages belong to a tensor for as long as it lives.
"""

import os
from collections.abc import Callable

import torch
from on_ranks import on_ranks
from pool import eventually
from torch import Tensor

import torch_ring as hvd
from torch_ring import _C
from torch_ring.world import current

COUNT = 1_500_004  # elements: 6 MB, and no whole number of pages


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


# Calls on ranks that have the same tensor, and the results of these calls.
CALLS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "allreduce": (hvd.allreduce, unchanged),
    "allreduce_async": (lambda t: hvd.synchronize(hvd.allreduce_async(t)), unchanged),
    "broadcast": (lambda t: hvd.broadcast(t, 0), unchanged),
    "allgather": (hvd.allgather, lambda t: t.repeat(hvd.size())),
    "alltoall": (hvd.alltoall, lambda t: t.view(hvd.size(), -1)[hvd.rank()].repeat(hvd.size())),
    "reducescatter": (lambda t: hvd.reducescatter(t.repeat(hvd.size())), unchanged),
}


@on_ranks(2)
def test_pages_are_reused() -> None:
    first_input, second_input = torch.arange(COUNT) % 97.0, torch.arange(COUNT) % 89.0
    for name, (call, expected) in CALLS.items():
        for most_bytes in (0, 256 << 20):  # frees the pages of others
            _C.keep_results(most_bytes)
        first, second = call(first_input), call(second_input)
        assert torch.equal(first, expected(first_input)), name
        assert torch.equal(second, expected(second_input)), name
        address = first.data_ptr()
        assert address != second.data_ptr()
        view = first[1:]
        del first
        assert call(second_input).data_ptr() != address  # a view holds the memory
        assert torch.equal(view, expected(first_input)[1:])
        del view
        again = call(second_input)
        assert again.data_ptr() == address, name
        assert torch.equal(again, expected(second_input))


@on_ranks(2)
def test_results_are_ordinary_tensors() -> None:
    images = (torch.arange(4 * 3 * 600 * 700) % 97.0).view(4, 3, 600, 700)
    images = images.to(memory_format=torch.channels_last)
    for tensor in [images, images[:, :, ::2, ::2]]:
        reduced = hvd.allreduce(tensor)
        assert reduced.stride() == torch.empty_like(tensor).stride()
        assert torch.equal(reduced, tensor)

    leaf = torch.nn.Parameter(torch.ones(COUNT))
    assert not hvd.synchronize(hvd.allreduce_async(leaf)).requires_grad

    class Named(torch.Tensor):
        pass

    named = torch.ones(COUNT).as_subclass(Named)
    assert type(hvd.synchronize(hvd.broadcast_async(named, 0))) is Named

    with torch.inference_mode():
        assert hvd.allreduce(torch.ones(COUNT)).is_inference()

    result = hvd.allgather(torch.ones(COUNT, dtype=torch.int8).repeat(2))
    before = result.data_ptr()
    result.resize_(5 * COUNT)[4 * COUNT :] = 2
    assert int(result.sum(dtype=torch.int64)) == 6 * COUNT
    assert result.data_ptr() != before
    result.set_()
    assert torch.equal(result.resize_(3).fill_(7), torch.full((3,), 7, dtype=torch.int8))


@on_ranks(2)
def test_results_outlive_their_world() -> None:
    result = hvd.allgather(torch.ones(COUNT))
    hvd.allgather(torch.ones(COUNT))
    assert _C.kept_result_bytes() >= result.nbytes
    hvd.shutdown()
    assert _C.kept_result_bytes() == 0
    assert int(result.sum()) == 2 * COUNT
    hvd.init()
    assert int(hvd.allgather(torch.zeros(COUNT)).count_nonzero()) == 0
    assert int(result.sum()) == 2 * COUNT


@on_ranks(2)
def test_a_forked_child_has_results_of_its_own() -> None:
    """A child changes its parent's results; the parent does not see it."""
    kept, held = hvd.allgather(torch.ones(COUNT)), hvd.allgather(torch.ones(COUNT))
    del kept
    child = os.fork()
    if child == 0:
        passed = False
        try:
            held.fill_(2.0)
            passed = int(held.sum()) == 4 * COUNT
            del held
        finally:
            os._exit(0 if passed else 1)
    ones = [hvd.allgather(torch.ones(COUNT)) for _ in range(2)]
    assert os.waitpid(child, 0)[1] == 0
    assert all(int(tensor.sum()) == 2 * COUNT for tensor in [held, *ones])


@on_ranks(2)
def test_a_message_that_is_done_keeps_no_tensor() -> None:
    engine = current.engine()
    tensor = torch.zeros(100_000)
    storage = tensor.untyped_storage()
    alive = storage._weak_ref()
    work = engine.send(tensor, 1) if hvd.rank() == 0 else engine.receive(tensor, 0)
    work.wait()
    del tensor, storage
    assert eventually(lambda: torch.UntypedStorage._expired(alive)), "the request is still held"
    torch.UntypedStorage._free_weak_ref(alive)
