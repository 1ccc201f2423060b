"""Ranks that die, stop, leave or come late: the other ranks get an error soon that names them."""

import os
import signal
import threading
import time

import pytest
import torch
from pool import error_of, run
from worlds import on_both_transports

import torch_ring as hvd


def outlive(victim: int, how: str, bytes_each: int) -> tuple[str, str, float]:
    """Reduce until it fails, as the victim ends. Return the error and its time."""
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


@on_both_transports
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bytes_each", [256, 1 << 22])
@pytest.mark.parametrize("how", ["kill", "leave", "stop"])
def test_a_lost_rank_is_named(how, bytes_each, size, transport):
    victim = size - 1
    results = run(
        outlive,
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


def wait_for_a_late_rank() -> str:
    if hvd.rank() == 1:
        time.sleep(3)
    kind, text = error_of(lambda: hvd.allreduce(torch.ones(3), name="slow"))
    assert kind == "TimeoutError", (kind, text)
    return text


@on_both_transports
def test_a_late_rank_is_named(transport):
    texts = run(wait_for_a_late_rank, 2, transport=transport, env={"TORCH_RING_TIMEOUT": "1"})
    assert "rank 1 (pid " in texts[0]
    assert "has not submitted it" in texts[0]
