"""Ranks that leave properly: no rank considers them dead, and all their data arrive."""

import multiprocessing
import os

import pytest
import torch
from pool import error_of, run
from slow import on_shm_and_slowly_on_tcp
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring._C import arm_failpoints


def come_and_go(rounds: int) -> None:
    for i in range(rounds):
        hvd.init()
        assert hvd.allreduce(torch.tensor([float(i)])).item() == i
        hvd.shutdown()


def compute(parent: int) -> None:
    while os.getppid() == parent:  # it may be killed
        pass


@pytest.mark.slow
@on_both_transports
def test_worlds_end_in_peace_on_a_loaded_machine(transport, full):
    """Fifty jobs of 400 rounds with --full: hours."""
    jobs, rounds = (50, 400) if full else (1, 15)
    context = multiprocessing.get_context("fork")
    run(come_and_go, 3, args=(1,), transport=transport, initialized=False)  # torch is loaded then
    busy = [context.Process(target=compute, args=(os.getpid(),), daemon=True) for _ in range(4)]
    for process in busy:
        process.start()
    try:
        for _ in range(jobs):
            run(
                come_and_go,
                3,
                args=(rounds,),
                transport=transport,
                initialized=False,
                deadline_s=60 + 2 * rounds,
            )
    finally:
        for process in busy:
            process.kill()
            process.join()


def reduce_and_leave() -> None:
    for count in (3, 100_000):
        hvd.init()
        size = hvd.size()
        mean = hvd.allreduce(torch.full((count,), float(hvd.rank())))
        assert mean.eq((size - 1) / 2).all()
        hvd.shutdown()


def test_the_last_data_of_a_rank_may_be_late():
    env = {"TORCH_RING_FAIL": "data.receive:2:late=600"}
    run(reduce_and_leave, 3, transport="tcp", env=env, initialized=False)


def miss_the_last_data_of_a_rank() -> tuple[str, str]:
    """Like a host of rank 1 that is cut off after its goodbye."""
    if hvd.rank() == 0:
        arm_failpoints("data.receive:1:late=60000")
    outcome = error_of(lambda: hvd.allreduce(torch.ones(3), name="last"))
    arm_failpoints("")
    return outcome


@pytest.mark.slow
def test_the_last_data_of_a_rank_may_never_come():
    env = {"TORCH_RING_HEARTBEAT_TIMEOUT": "3", "TORCH_RING_TIMEOUT": "40"}
    (kind, text), other = run(miss_the_last_data_of_a_rank, 2, transport="tcp", env=env)
    assert other == ("nothing", "")
    assert kind == "PeerLostError", text
    assert "rank 1 (pid " in text
    assert "has left, and its last data has not arrived for 3 s" in text


def train_until_a_rank_dies() -> tuple[str, str]:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    def step() -> None:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(8):
        kind, text = error_of(step)
        if kind != "nothing":
            return kind, text
    return "nothing", ""


@on_shm_and_slowly_on_tcp
def test_a_rank_dies_between_two_buckets(transport):
    """Fail at each of several moments of the first steps."""
    for nth in (4, 5, 7, 10):
        env = {
            "TORCH_RING_FAIL": f"collective:1:{nth}:kill",
            "TORCH_RING_BUCKET_BYTES": "20000",  # several buckets a step
        }
        outcomes = run(train_until_a_rank_dies, 3, transport=transport, env=env, may_die={1})
        assert outcomes[1] is None
        for kind, text in (outcomes[0], outcomes[2]):
            assert kind == "PeerLostError", text
            assert "rank 1 (pid " in text, text
            assert "died: its connection closed" in text, text


def error_of_init() -> tuple[str, str]:
    return error_of(hvd.init)


@pytest.mark.parametrize("end", ["connecting", "accepting"])
def test_a_rank_dies_in_the_handshake(end):
    """The others learn of it long before init() would give up."""
    env = {"TORCH_RING_FAIL": f"handshake.{end}:1:1:kill", "TORCH_RING_INIT_TIMEOUT": "600"}
    outcomes = run(error_of_init, 3, transport="tcp", env=env, initialized=False, may_die={1})
    assert outcomes[1] is None
    for kind, text in (outcomes[0], outcomes[2]):
        assert kind == "PeerLostError", text
        assert "rank 1" in text, text


@on_both_transports
def test_handshakes_that_fail_are_tried_again(transport):
    env = {"TORCH_RING_FAIL": "handshake.connecting:*:1:close,handshake.accepting:*:2:close"}
    run(reduce_and_leave, 3, transport=transport, env=env, initialized=False)


def outlive_a_departed_rank() -> tuple[str, str] | None:
    hvd.allreduce(torch.ones(100_000), name="together")
    if hvd.rank() == 1:
        hvd.shutdown()  # and dies during it
        return None
    return error_of(lambda: hvd.allreduce(torch.ones(3), name="more"))


@on_both_transports
def test_a_rank_that_dies_after_its_goodbye_has_left(transport):
    env = {"TORCH_RING_FAIL": "departed:1:kill"}
    outcomes = run(outlive_a_departed_rank, 3, transport=transport, env=env, may_die={1})
    assert outcomes[1] is None
    for kind, text in (outcomes[0], outcomes[2]):
        assert kind == "PeerLostError", text
        assert "rank 1 (pid " in text, text
        assert "has left" in text, text


def test_a_failpoint_that_does_not_exist_is_refused():
    for kind, text in run(
        error_of_init, 2, env={"TORCH_RING_FAIL": "nowhere:kill"}, initialized=False
    ):
        assert kind == "InvalidArgumentError"
        assert text.startswith("TORCH_RING_FAIL: 'nowhere:kill': there is no such place")
