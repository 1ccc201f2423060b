"""What goes wrong is an error on every surviving rank, soon, and says who, what and with whom."""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pool import RanksFailed, error_of, run

import torch_ring as hvd

both_transports = pytest.mark.parametrize("transport", ["shm", "tcp"])


# --- the ranks disagree, and go on

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


def mismatches(case: str) -> None:
    call, text = MISMATCHES[case]
    begin = time.monotonic()
    kind, message = error_of(call)
    assert kind == "MismatchError", (kind, message)
    assert text in message
    assert time.monotonic() - begin < 5  # the promise is a second; the machine may be busy
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [float(hvd.size())] * 2


@both_transports
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch(case, size, transport):
    run(mismatches, size, args=(case,), transport=transport)


# --- this rank is wrong, and nothing is sent


def without_memory() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def misuses() -> None:
    t = torch.zeros(3)
    first = hvd.allreduce_async(t, name="twice")
    kind, text = error_of(lambda: hvd.allreduce_async(t, name="twice"))
    assert kind == "nothing" or (kind == "InvalidArgumentError" and "in flight" in text)
    hvd.synchronize(first)
    for call, message in [
        (lambda: hvd.allreduce(t.long(), op=hvd.Adasum), "Adasum needs floating point"),
        (lambda: hvd.allreduce(t, op=17), "17 is not a valid ReduceOp"),
        (lambda: hvd.allreduce(t, average=True, op=hvd.Sum), "not both"),
        (lambda: hvd.allreduce(t.to(torch.complex64)), "dtype ComplexFloat is not supported"),
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
        (lambda: hvd.allgather(without_memory()), "storage was resized"),
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
    for operation in (hvd.allgather, hvd.alltoall):  # of what torch.func knows nothing about
        captured = torch.ones(4)
        gradient = torch.func.grad(lambda x, f=operation, c=captured: (x * f(c).sum()).sum())
        with pytest.raises(RuntimeError, match="setup_context"):
            gradient(torch.ones(1))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def no_tensors() -> None:
    for name in ("allreduce", "allgather", "alltoall", "reducescatter"):
        for call in (getattr(hvd, name), getattr(hvd, f"{name}_async")):
            with pytest.raises(TypeError, match=rf"^{name}\w* takes a torch.Tensor, not list$"):
                call([1.0, 2.0])
    for call in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_):
        with pytest.raises(TypeError, match=r"takes a torch.Tensor, not NoneType$"):
            call(None, 0)
    for call in (hvd.allreduce_, hvd.allreduce_async_):
        with pytest.raises(TypeError, match=r"takes a torch.Tensor, not str$"):
            call("weight")
    with pytest.raises(ValueError, match="a group is a list of tensors"):
        hvd.grouped_allreduce(None)
    with pytest.raises(ValueError, match="not a Linear"):
        hvd.broadcast_parameters(torch.nn.Linear(2, 2), 0)
    with pytest.raises(ValueError, match="root_rank='0'"):
        hvd.broadcast(torch.zeros(1), "0")


def test_no_tensors():
    run(no_tensors, 2)


def handlers_communicate() -> None:
    """A signal handler runs within whatever its thread waits for."""
    rank, size = hvd.rank(), hvd.size()
    seen: list[list[float]] = []

    def handler(*_: object) -> None:
        seen.append(hvd.allreduce(torch.ones(2), op=hvd.Sum, name="handler").tolist())
        if rank == 0:
            seen.append(hvd.broadcast_object([1.0], 0, name="again"))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        else:
            time.sleep(0.3)
            handler()
            hvd.broadcast_object(None, 0, name="again")
        assert hvd.allreduce(torch.ones(3), name="main").tolist() == [1.0] * 3
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [[float(size)] * 2] + [[1.0]] * (rank == 0)


@both_transports
def test_a_signal_handler_may_communicate(transport):
    run(handlers_communicate, 3, transport=transport)


def handler_shuts_down() -> None:
    if hvd.rank() == 0:
        before = signal.signal(signal.SIGALRM, lambda *_: hvd.shutdown())
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        kind, text = error_of(lambda: hvd.allreduce(torch.ones(2)))
        signal.signal(signal.SIGALRM, before)
        assert (kind, "shut down" in text) == ("RingError", True), text
        assert not hvd.is_initialized()
    else:
        kind, text = error_of(lambda: hvd.allreduce(torch.ones(2), name="other"))
        assert (kind, "rank 0" in text) == ("PeerLostError", True), text
        hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@both_transports
def test_a_signal_handler_may_shut_down(transport):
    run(handler_shuts_down, 2, transport=transport)


def test_misuse():
    run(misuses, 2)
    run(misuses, 1)


def without_init() -> None:
    for call in (hvd.rank, hvd.size, hvd.barrier, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"call init\(\) first"):
            call()
    assert not hvd.is_initialized()


def test_use_before_init():
    run(without_init, 1, initialized=False)


# --- ranks that die, stop, leave or dawdle


def survives_the_end_of(victim: int, how: str, bytes_each: int) -> tuple[str, str, float]:
    """Reduce until it fails; the victim ends in the middle. Return the error and when it came."""
    tensor = torch.ones(bytes_each // 4)
    hvd.allreduce(tensor)
    if hvd.rank() == victim:
        if how == "kill":
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif how == "stop":
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        else:
            hvd.shutdown()
            time.sleep(2)
            os._exit(0)
    kind = "nothing"
    while kind == "nothing":
        kind, text = error_of(lambda: hvd.allreduce(tensor, name="doomed"))
    failed = time.time()
    again, _ = error_of(lambda: hvd.allreduce(tensor, name="later"))
    assert again == kind
    begin = time.monotonic()
    hvd.shutdown()
    assert time.monotonic() - begin < 5
    assert threading.active_count() == 1
    return kind, text, failed


@both_transports
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bytes_each", [256, 1 << 22])
@pytest.mark.parametrize("how", ["kill", "leave", "stop"])
def test_a_lost_rank_is_named(how, bytes_each, size, transport):
    victim = size - 1
    results = run(
        survives_the_end_of,
        size,
        args=(victim, how, bytes_each),
        transport=transport,
        env={"TORCH_RING_HEARTBEAT_TIMEOUT": "1.5"},
        may_die={victim},
    )
    for kind, text, _ in results[:victim]:
        assert kind == "PeerLostError", text
        assert f"rank {victim} (pid " in text, text
        assert "allreduce 'doomed' float32" in text, text


def is_late() -> str:
    if hvd.rank() == 1:
        time.sleep(3)
    kind, text = error_of(lambda: hvd.allreduce(torch.ones(3), name="slow"))
    assert kind == "TimeoutError", (kind, text)
    return text


@both_transports
def test_a_late_rank_is_named(transport):
    texts = run(is_late, 2, transport=transport, env={"TORCH_RING_TIMEOUT": "1"})
    assert "rank 1 (pid " in texts[0]
    assert "has not submitted it" in texts[0]


def test_missing_ranks_are_named():
    def message(failed: RanksFailed) -> str:
        return str(failed)

    env = {"TORCH_RING_INIT_TIMEOUT": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    with pytest.raises(RanksFailed) as failed:
        run(hvd.rank, 2, env=env)
    assert "ranks 2, 3 of 4 did not arrive" in message(failed.value)


def has_few_addresses() -> None:
    """Under `ulimit -v` there may be no room for the memory of the ranks: TCP needs none."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if int(os.environ["RANK"]) == 1:
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    try:
        hvd.init()
        assert hvd.allreduce(torch.ones(10_000), op=hvd.Sum).sum() == 10_000 * hvd.size()
        assert not hvd.world.engine().has_shared_memory()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    hvd.shutdown()


def test_few_addresses():
    run(has_few_addresses, 2, transport="", initialized=False)
    with pytest.raises(RanksFailed, match=r"TORCH_RING_TRANSPORT=shm.*`ulimit -v` allows \d+ MiB"):
        run(has_few_addresses, 2, transport="shm", initialized=False)


def test_a_bad_setting_is_named():
    with pytest.raises(RanksFailed, match="TORCH_RING_TIMEOUT='soon': must be a number"):
        run(hvd.rank, 1, env={"TORCH_RING_TIMEOUT": "soon"})


def test_different_secrets_are_refused():
    with pytest.raises(RanksFailed, match="secret"):
        run(with_own_secret, 2, initialized=False)


def with_own_secret() -> None:
    os.environ["TORCH_RING_SECRET"] = "of rank " + os.environ["RANK"]
    os.environ["TORCH_RING_INIT_TIMEOUT"] = "3"
    hvd.init()
