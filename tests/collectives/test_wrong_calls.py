"""Mismatches among the ranks, and wrong arguments: an error, and the job goes on."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from pool import error_of, run

import torch_ring as hvd

MISMATCHES: dict[str, tuple[Callable[[], object], str]] = {
    "shape": (
        lambda: hvd.allreduce(torch.zeros(3 + hvd.rank()), name="a"),
        "rank 0: allreduce 'a' float32 [3] Average; rank 1: allreduce 'a' float32 [4] Average",
    ),
    "dtype": (
        lambda: hvd.allreduce(torch.zeros(3).to([torch.float32, torch.int32][hvd.rank() % 2])),
        " int32 [3] Average",
    ),
    "op": (
        lambda: hvd.allreduce(torch.zeros(3), name="a", op=[hvd.Sum, hvd.Max][hvd.rank() % 2]),
        "float32 [3] Sum; rank 1: allreduce 'a' float32 [3] Max",
    ),
    "factor": (
        lambda: hvd.allreduce(torch.zeros(3), name="a", prescale_factor=1.0 + hvd.rank()),
        "prescale 2",
    ),
    "root": (
        lambda: hvd.broadcast(torch.zeros(3), root_rank=hvd.rank() % 2, name="b"),
        "root 0; rank 1: broadcast 'b' float32 [3] root 1",
    ),
    "columns": (
        lambda: hvd.allgather(torch.zeros(2, 3 + hvd.rank()), name="g"),
        "rank 0: allgather 'g' float32 [*, 3]; rank 1: allgather 'g' float32 [*, 4]",
    ),
    "operation": (
        lambda: hvd.barrier() if hvd.rank() else hvd.allreduce(torch.zeros(3)),
        ": barrier '#barrier.1'",
    ),
    "name": (
        lambda: hvd.allreduce(torch.zeros(3), name=f"of {hvd.rank()}"),
        "the ranks wait for different collectives",
    ),
    "large": (
        lambda: hvd.allreduce(torch.zeros(1_000_000 + hvd.rank()), name="large"),
        "float32 [1000000]",
    ),
}


def check_mismatch(case: str) -> None:
    call, text = MISMATCHES[case]
    begin = time.monotonic()
    kind, message = error_of(call)
    assert kind == "MismatchError", (kind, message)
    assert text in message
    assert time.monotonic() - begin < 5  # the promise is a second; the machine may be busy
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [float(hvd.size())] * 2


@pytest.mark.parametrize(("size", "transport"), [(2, "shm"), (3, "tcp")])
@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch(case, size, transport):
    # In processes of its own: for a Python thread that another test has left, ranks wait 10 s.
    run(check_mismatch, size, args=(case,), transport=transport, kind="one thread")


def tensor_without_memory() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def check_wrong_arguments() -> None:
    t = torch.zeros(3)
    first = hvd.allreduce_async(t, name="twice")
    kind, text = error_of(lambda: hvd.allreduce_async(t, name="twice"))
    assert kind == "nothing" or (kind == "InvalidArgumentError" and "in flight" in text)
    hvd.synchronize(first)
    for call, message in [
        (lambda: hvd.allreduce(t.long(), op=hvd.Adasum), "Adasum needs floating point"),
        (lambda: hvd.allreduce(t, op=17), "or hvd.Bxor; got 17$"),
        (lambda: hvd.allreduce(t, average=True, op=hvd.Sum), "not both"),
        (lambda: hvd.allreduce(t.to(torch.complex32)), "there is no Average of complex32: reduc"),
        (lambda: hvd.allreduce(t.to_sparse()), "not dense"),
        (lambda: hvd.allreduce(t.to("meta")), "meta"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "a scalar has no first dimension"),
        (lambda: hvd.broadcast(t, root_rank=9), "root_rank=9 is not in the process set"),
        (lambda: hvd.allreduce(t, name="#1"), "reserved"),
        (lambda: hvd.allreduce(t, name="x" * 5000), "longer than 4096"),
        (lambda: hvd.allreduce(torch.nested.nested_tensor([t, t])), "not dense"),
        (lambda: hvd.allreduce(torch.nested.nested_tensor([torch.ones(1 << 20)] * 2)), "not dense"),
        (lambda: hvd.allreduce_(torch.ones(1).expand(5)), r"expanded tensor.*clone\(\) it"),
        (lambda: hvd.grouped_allreduce_([torch.ones(1).expand(5)]), "expanded tensor"),
        (lambda: hvd.broadcast_(torch.ones(1).expand(5), 0), "expanded tensor"),
        (lambda: hvd.broadcast_(torch._efficientzerotensor((4,)), 0), "ZeroTensor"),
        (lambda: hvd.allgather(tensor_without_memory()), "storage was resized"),
        (lambda: torch.func.vmap(hvd.allreduce)(torch.ones(2, 3)), "has no memory"),
        (lambda: hvd.reducescatter(t.to_sparse()), "not dense"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    for operation in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(torch.ones(4), torch.ones(4))
            with pytest.raises(ValueError, match="forward-mode"):
                operation(dual)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_wrong_arguments():
    run(check_wrong_arguments, 2)
    run(check_wrong_arguments, 1)


def check_misuse_of_horovods_kinds() -> None:
    """A misuse that is a RuntimeError in Horovod is one here, and a ValueError, on all ranks."""
    t, size = torch.ones(4), hvd.size()
    for call in [
        lambda: hvd.reducescatter(t, op=hvd.Adasum),
        lambda: hvd.grouped_reducescatter([t], op=hvd.Adasum),
        lambda: hvd.reducescatter(torch.tensor(1.0)),
        lambda: hvd.allgather(torch.tensor(1.0)),
        lambda: hvd.alltoall(t, [1] * (size + 1)),
        lambda: hvd.alltoall(t, [5] * size),
        lambda: hvd.alltoall(t, [0.5] * size),
        lambda: hvd.alltoall(torch.ones(size + 1)),
        lambda: hvd.allreduce(t.to(torch.float8_e5m2)),
        lambda: hvd.allreduce(t.int(), op=hvd.Adasum),
        lambda: hvd.allreduce(t, average=True, op=hvd.Sum),
        lambda: hvd.allreduce(t, process_set=hvd.ProcessSet([0])),
        lambda: hvd.broadcast(t, size),
        lambda: hvd.sparse_allreduce_async(t),
        lambda: hvd.poll(17),
    ]:
        for kind in (ValueError, RuntimeError):
            with pytest.raises(kind) as caught:
                call()
            assert not isinstance(caught.value, hvd.HorovodInternalError)  # elastic must not retry
    with pytest.raises(RuntimeError, match="the ranks disagree"):
        hvd.allreduce(t.int() if hvd.rank() else t)
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: list(range(size))}
    pair = hvd.add_process_set([0, 1])
    ids = {0: list(range(size)), pair.process_set_id: [0, 1]}
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == ids


def test_misuse_is_what_it_is_in_horovod():
    run(check_misuse_of_horovods_kinds, 3)


def check_wrong_types() -> None:
    for name in ("allreduce", "allgather", "alltoall", "reducescatter"):
        for call in (getattr(hvd, name), getattr(hvd, f"{name}_async")):
            takes = rf"^{name}\w* takes a torch.Tensor, not "
            with pytest.raises(TypeError, match=rf"{takes}list: use torch.as_tensor\(\)$"):
                call([1.0, 2.0])
            with pytest.raises(TypeError, match=rf"{takes}ndarray: use torch.as_tensor\(\)$"):
                call(torch.ones(2).numpy())
            grouped = f"grouped_{call.__name__}" if name != "alltoall" else r"torch.stack\(\)"
            with pytest.raises(TypeError, match=rf"{takes}list: use {grouped}$"):
                call([torch.ones(2)])
    for call in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_):
        with pytest.raises(TypeError, match=r"takes a torch.Tensor, not NoneType$"):
            call(None, 0)
    tensor = torch.ones(2)
    for name in ("allreduce", "allgather", "alltoall", "reducescatter", "grouped_allreduce"):
        for call in (getattr(hvd, name), getattr(hvd, f"{name}_async")):
            given = [tensor] if name.startswith("grouped") else tensor
            for wrong, kind in ((5, "int"), (0, "int"), ([], "list"), (b"a", "bytes")):
                kinds = rf"^{name.removeprefix('grouped_')}: name must be a string, not {kind}$"
                with pytest.raises(TypeError, match=kinds):
                    call(given, name=wrong)
    for call in (hvd.allreduce_, hvd.allreduce_async, hvd.reducescatter):
        with pytest.raises(TypeError, match=r"prescale_factor must be a number, not str$"):
            call(tensor, prescale_factor="2")
        with pytest.raises(TypeError, match=r"postscale_factor must be a number, not NoneType$"):
            call(tensor, postscale_factor=None)
    for call in (hvd.allreduce_, hvd.allreduce_async_):
        with pytest.raises(TypeError, match=r"takes a torch.Tensor, not str$"):
            call("weight")
    with pytest.raises(ValueError, match=r"a group is a list of tensors, .* got Tensor$"):
        hvd.grouped_allreduce(torch.ones(2))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for params, message in [
        (model, r"takes model.state_dict\(\) or a list of tensors, not Linear$"),
        (torch.nn.Sequential(model), r"takes model.state_dict\(\) .*, not Sequential$"),
        (optimizer, r"not SGD: use broadcast_optimizer_state\(\)$"),
        ([torch.ones(1), torch.ones(1).numpy()], "item 1 of the list is ndarray"),
    ]:
        with pytest.raises(ValueError, match=message):
            hvd.broadcast_parameters(params, 0)
    with pytest.raises(TypeError, match=r"not Linear: use broadcast_parameters\(\)$"):
        hvd.broadcast_optimizer_state(model, 0)
    with pytest.raises(TypeError, match=r"the optimizer itself, not dict$"):
        hvd.broadcast_optimizer_state(optimizer.state_dict(), 0)
    with pytest.raises(ValueError, match="root_rank='0'"):
        hvd.broadcast(torch.zeros(1), "0")


def test_arguments_that_are_no_tensors():
    run(check_wrong_types, 2)


def check_wrong_operators() -> None:
    t = torch.ones(3)
    every = (
        "hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product, hvd.Band, hvd.Bor or "
        "hvd.Bxor"
    )
    theirs = torch.distributed.ReduceOp
    for op, got in [
        ("sum", "'sum': use hvd.Sum"),
        ("mean", "'mean': use hvd.Average"),
        (theirs.SUM, "<RedOpType.SUM: 0>: use hvd.Sum"),  # 0 is Average here
        (theirs.AVG, "<RedOpType.AVG: 1>: use hvd.Average"),
        (torch.max, f"{torch.max!r}: use hvd.Max"),
        (9, "9"),
        (-1, "-1"),
        (1.0, "1.0"),
        (True, "True"),
        (theirs.BAND, f"{theirs.BAND!r}: use hvd.Band"),
    ]:
        for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
            assert error_of(lambda call=call, op=op: call(t, op=op)) == (
                "InvalidArgumentError",
                f"op must be {every}; got {got}",
            )
        for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_async_):
            kind, text = error_of(lambda call=call, op=op: call([t], op=op))
            assert (kind, text) == ("InvalidArgumentError", f"op must be {every}; got {got}")
    few = "op must be hvd.Average or hvd.Sum; got "
    for call, argument in [
        (hvd.reducescatter, t),
        (hvd.reducescatter_async, t),
        (hvd.grouped_reducescatter, [t]),
        (hvd.sparse_allreduce_async, t.to_sparse()),
    ]:
        for op, got in [("sum", "'sum': use hvd.Sum"), (hvd.Max, "hvd.Max"), (theirs.MAX, None)]:
            kind, text = error_of(lambda call=call, x=argument, op=op: call(x, op=op))
            assert kind == "InvalidArgumentError"
            assert text == few + (got or repr(op))
    assert hvd.allreduce(t, op=1).tolist() == [hvd.size()] * 3  # Horovod's number of Sum


def test_operators_that_are_none():
    run(check_wrong_operators, 2)


def check_average() -> None:
    t = torch.ones(3)
    for flag, use in [(hvd.Sum, "op=hvd.Sum"), ("sum", "op=hvd.Sum"), ("loss", "name='loss'")]:
        kind, text = error_of(lambda flag=flag: hvd.allreduce(t, flag))
        assert kind == "InvalidArgumentError"
        assert text.startswith("`average` must be True or False; got ")
        assert text.endswith(f": use {use}")
    assert hvd.allreduce(t, True).tolist() == [1.0] * 3
    assert hvd.allreduce(t, average=0).tolist() == [hvd.size()] * 3
    assert hvd.allreduce(t, op=np.int64(1)).tolist() == [hvd.size()] * 3  # Horovod's number


def test_average_is_a_flag():
    run(check_average, 2)


def check_two_threads() -> None:
    """Two operations, of which rank 1 begins one in a second thread, in another order."""
    hvd.barrier()
    reduce = partial(hvd.allreduce_async, torch.ones(3))
    cast = partial(hvd.broadcast_async, torch.ones(5), 0)
    if hvd.rank() == 1:
        with ThreadPoolExecutor(1) as thread:
            handles = [thread.submit(reduce).result(), cast()]
    else:
        handles = [cast(), reduce()]
    for handle in handles:
        kind, text = error_of(partial(hvd.synchronize, handle))
        assert kind == "MismatchError", text
        assert "Operations of this world come from two threads of rank 1: give them names" in text
    hvd.barrier()
    kind, text = error_of(lambda: hvd.allreduce(torch.zeros(3 + hvd.rank()), name="a"))
    assert kind == "MismatchError"
    assert "threads" not in text


def test_two_threads_without_names() -> None:
    run(check_two_threads, 2)
