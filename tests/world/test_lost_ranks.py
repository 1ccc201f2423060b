"""Ranks that die, stop, leave or come late: the other ranks soon get an error that names them."""

import io
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pool import all_have_passed, error_of, eventually, has_asked, run
from scripts import ROOT
from slow import slow
from worlds import on_both_transports

import torch_ring as hvd


def outlive(victim: int, how: str, bytes_each: int, passed: Path) -> tuple[str, str]:
    """Reduce until it fails, because the victim ends. Return the error."""
    tensor = torch.ones(bytes_each // 4)
    hvd.allreduce(tensor)
    all_have_passed(passed, hvd.size())
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
    again, _ = error_of(lambda: hvd.allreduce(tensor, name="later"))
    assert again == kind
    begin = time.monotonic()
    hvd.shutdown()
    assert time.monotonic() - begin < 5
    assert threading.active_count() == 1
    return kind, text


@on_both_transports
@pytest.mark.parametrize("bytes_each", [slow(256), 1 << 22])
@pytest.mark.parametrize("how", ["kill", "leave", "stop"])
def test_a_lost_rank_is_named(how, bytes_each, transport, tmp_path):
    # On a loaded machine, a late third rank could be given up in place of the victim.
    size, env = (2, {"TORCH_RING_HEARTBEAT_TIMEOUT": "1.5"}) if how == "stop" else (3, {})
    victim = size - 1
    results = run(
        outlive,
        size,
        args=(victim, how, bytes_each, tmp_path),
        transport=transport,
        env=env,
        may_die={victim},
    )
    for kind, text in results[:victim]:
        assert kind == "PeerLostError", text
        assert f"rank {victim} (pid " in text, text
        # The second: it died between two of them.
        assert "allreduce 'doomed' float32" in text or "this world has ended" in text, text


def lines_logged(call: Callable[[], object]) -> list[str]:
    """Return the log of torch_ring during a call."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    log = logging.getLogger("torch_ring")
    log.addHandler(handler)
    call()
    log.removeHandler(handler)
    return stream.getvalue().splitlines()


def reduce_on_rank_0(others: str, folder: Path) -> tuple[list[str], list[str]]:
    """Reduce on rank 0 only, and again. Return its errors, as tracebacks show them, and its log.

    Rank 1 has made its other calls before that, and comes after rank 0 has given up.
    """
    loss = torch.ones(3)
    if others == "gather":  # both wait for each other: rank 0 must be the first to give up
        hvd.shutdown()
        os.environ["TORCH_RING_TIMEOUT"] = "2.5" if os.environ["RANK"] == "0" else "20"
        hvd.init()
    hvd.barrier()
    called, given_up = folder / "called", folder / "given up"

    def reduce_late() -> None:
        assert hvd.allreduce(loss, name="loss").tolist() == [1.0] * 3

    if hvd.rank() != 0:
        if others == "leave":
            hvd.shutdown()
        elif others == "gather":
            hvd.allgather_async(torch.ones(1, 2), name="rows")
        called.touch()
        assert eventually(given_up.exists)
        kind, _ = error_of(reduce_late)
        if kind == "nothing":  # rank 0's data came before the report that it has given up
            kind, _ = error_of(reduce_late)
        assert kind in ("TimeoutError", "PeerLostError", "NotInitializedError"), kind
        return [], []
    errors: list[str] = []

    def reduce() -> None:
        errors.append("{}: {}".format(*error_of(lambda: hvd.allreduce(loss, name="loss"))))

    assert eventually(called.exists)
    # Without the late rank's position, which follows when that rank has answered.
    log = [line for line in lines_logged(reduce) if "its main thread is" not in line]
    reduce()
    given_up.touch()
    return errors, log


def without_numbers(text: str) -> str:
    """Return a text without pids, addresses and times, the same in every run."""
    text = re.sub(r"\d+(\.\d+)? s\b", "N s", text)
    return re.sub(r"\((?:[\d.]+, )?pid \d+\)", "(pid N)", text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "transport"), [("compute", "tcp"), ("gather", "shm"), ("leave", "shm")]
)
def test_rank_0_calls_a_collective_alone(others, transport, tmp_path):
    """The texts equal those in docs/errors.md."""
    env = {"TORCH_RING_TIMEOUT": "2.5", "TORCH_RING_STALL_WARNING": "2"}
    args = (others, tmp_path)
    (errors, log), *_ = run(reduce_on_rank_0, 2, args=args, transport=transport, env=env)
    found = [without_numbers(text) for text in (*errors, *log)]
    request = "allreduce 'loss' float32 [3] Average: "
    must_call = "All ranks must call it, in the same order"
    if others == "leave":
        cause = (
            "rank 1 (pid N) has left: it called shutdown() or exited. All ranks must call the same "
            "collectives, in the same order"
        )
        expected = [f"PeerLostError: rank 0: {request}{cause}"]
        ended = f"PeerLostError: rank 0: this world has ended: {cause}"
    else:
        doing = {
            "compute": "computing, in no collective",
            "gather": "in allgather 'rows' float32 [*, 2]",
        }[others]
        late = f"rank 1 (pid N) has not called it (it is {doing}). {must_call}"
        cause = f"{request}gave up after N s (TORCH_RING_TIMEOUT): {late}"
        expected = [
            f"TimeoutError: rank 0: {cause}",
            f"rank 0 has waited N s for {request}{late}. Ready: rank 0. It fails after N s "
            "(TORCH_RING_TIMEOUT)",
        ]
        ended = f"TimeoutError: rank 0: this world has ended: {cause}"
    expected.insert(1, f"{ended}. Call shutdown() and init(), or exit")
    assert found == expected
    page = without_numbers((ROOT / "docs" / "errors.md").read_text())
    for line in expected:
        text = line.replace(
            "fails after N s (TORCH_RING_TIMEOUT)", "goes on waiting: TORCH_RING_TIMEOUT is not set"
        )
        assert others == "gather" or ended in text or text in page, text


def kill_rank_1_in_a_pass() -> str:
    pids = hvd.allgather_object(os.getpid())
    if hvd.rank() == 1:
        time.sleep(60)
    handle = hvd.allreduce_async(torch.ones(4000000), name="gradients.0.17.3.0")
    os.kill(pids[1], signal.SIGKILL)
    return "{}: {}".format(*error_of(lambda: hvd.synchronize(handle)))


def test_the_text_of_a_death_is_that_of_the_page():
    text = without_numbers(run(kill_rank_1_in_a_pass, 2, may_die={1})[0])
    assert text.endswith("rank 1 (pid N) died: its connection closed; see its output")
    assert text in without_numbers((ROOT / "docs" / "errors.md").read_text())


def has_come_to_rest(pid: int) -> bool:
    """Return whether the main thread of a process sleeps, or has been stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith(("S", "T"))


def pass_a_barrier_late(waits: Path) -> str:
    """Return the error of a rank that wakes after another one has passed its barrier and died.

    Rank 1 waits in the barrier, and is stopped; rank 0 completes it, and dies; rank 2 continues
    rank 1.
    """
    pids = hvd.allgather_object(os.getpid())
    if hvd.rank() == 1:
        threading.Thread(target=lambda: eventually(has_asked) and waits.touch()).start()
    else:
        assert eventually(lambda: waits.exists() and has_come_to_rest(pids[1]))
    if hvd.rank() == 0:
        os.kill(pids[1], signal.SIGSTOP)
    error = error_of(hvd.barrier)[1]
    if hvd.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if hvd.rank() == 2:
        assert error_of(hvd.barrier)[0] == "PeerLostError"
        os.kill(pids[1], signal.SIGCONT)
    return error


def test_what_all_ranks_have_come_to_is_done_though_one_has_died_since(tmp_path):
    args = (tmp_path / "waits",)
    assert run(pass_a_barrier_late, 3, args=args, may_die={0})[1:] == ["", ""]


def disagree() -> str:
    return "{}: {}".format(
        *error_of(lambda: hvd.allreduce(torch.ones(3 + hvd.rank()), name="loss"))
    )


def test_the_text_of_a_mismatch_is_that_of_the_page():
    assert run(disagree, 2)[0] in (ROOT / "docs" / "errors.md").read_text()


def call_one_more_on_rank_0() -> str:
    """Return the error of a collective that mismatches an additional one of rank 0."""
    if hvd.rank() == 0:
        return error_of(lambda: hvd.allreduce(torch.ones(3)))[1]
    return error_of(lambda: hvd.broadcast(torch.ones(2), root_rank=0))[1]


@on_both_transports
def test_one_collective_more_on_rank_0(transport):
    for text in run(call_one_more_on_rank_0, 2, transport=transport):
        assert "rank 0: allreduce '#1' float32 [3] Average; rank 1: broadcast '#1'" in text
        assert ". All ranks must call the same collectives, in the same order" in text
