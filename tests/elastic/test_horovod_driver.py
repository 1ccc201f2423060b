"""Ranks that Horovod's elastic driver has started, with a stand-in for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from unittest import mock

import pool
import pytest
import torch
from horovods_driver import (
    AckResponse,
    Driver,
    HostsUpdatedRequest,
    HostUpdateResult,
)
from process_set_use import check_process_set

import torch_ring as hvd
from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.optimizer.distributed_optimizer import follow_world
from torch_ring.rendezvous.horovod_driver import HorovodDriver, Placement, horovod_driver
from torch_ring.world.process_set_keeper import ProcessSetKeeper

STEPS = 10
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver([])
    yield driver
    driver.close()


def environment(port: int, local_rank: object) -> dict[str, str]:
    return {
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_HOSTNAME": "box",
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_RANK": str(local_rank),
        "HOROVOD_SIZE": "9",
    }


def begin_worker(port: int, comes: int | None) -> tuple[int, HorovodDriver]:
    """Become a worker of the driver; the rank that `comes` waits until another asks for it."""
    index = int(os.environ["RANK"])
    for name in LAUNCHERS:
        os.environ.pop(name, None)
    os.environ.update(environment(port, index))
    store = horovod_driver()
    assert store is not None
    if index == comes:
        while store.get("test", "come") is None:
            time.sleep(0.01)
    return index, store


def train_under_a_driver(
    port: int, dies: int | None, asks: bool, comes: int | None
) -> tuple[str, int, int, float, list[int]]:
    """Train as a worker. One may kill itself, another come later, when rank 0 has asked for it."""
    index, store = begin_worker(port, comes)
    hvd.init()
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.step < STEPS:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 1)).sum()
            if index == dies and state.step == 3:
                store.put("died", store.worker, b"")
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            state.step += 1
            if asks and state.step == 3 and hvd.rank() == 0:
                store.put("hosts", "change", b"")
            state.check_host_updates()

    ended = "trained"
    try:
        train(state)
    except SystemExit as error:
        ended = f"left with {error.code}"
    place = (hvd.rank(), hvd.size()) if hvd.is_initialized() else (-1, -1)
    hvd.shutdown()
    return (ended, *place, model.weight.item(), resets)


def test_a_worker_dies(driver: Driver) -> None:
    driver.order = [f"box:{index}" for index in range(3)]
    driver.living = set(driver.order)
    driver.on_put["died"] = driver.lose
    results = pool.run(
        *(train_under_a_driver, 3),
        args=(driver.port, 0, False, None),
        transport="",
        initialized=False,
        may_die=[0],
    )
    assert results[1:] == [("trained", rank, 2, -float(STEPS), [2]) for rank in range(2)]
    assert driver.worlds == [["box:0", "box:1", "box:2"], ["box:1", "box:2"]]


def test_a_host_goes_and_another_one_comes(driver: Driver) -> None:
    driver.order = ["box:0", "box:1"]
    driver.living = {"box:0", "box:1"}
    answers = []

    def change(_: str) -> None:
        driver.order = ["box:0", "box:2"]
        driver.living = {"box:0", "box:1", "box:2"}
        driver._store["/test/come"] = b""
        request = HostsUpdatedRequest(time.time(), HostUpdateResult.added)
        answers.append(driver.notify("box:0", request))

    driver.on_put["hosts"] = change
    results = pool.run(
        *(train_under_a_driver, 3),
        args=(driver.port, None, True, 2),
        transport="",
        initialized=False,
    )
    assert [type(answer) for answer in answers] == [AckResponse]
    assert driver.worlds == [["box:0", "box:1"], ["box:0", "box:2"]]
    assert results[0] == ("trained", 0, 2, -float(STEPS), [2])
    assert results[2] == ("trained", 1, 2, -float(STEPS), [])
    assert results[1][:3] == ("left with 0", -1, -1)


# --- process sets


def use_sets_under_a_driver(
    port: int, dies: int, comes: int | None, dies_later: int | None = None
) -> tuple[object, ...]:
    """Use the sets [0, 1] and [1, 2], and an optimizer on the latter, while ranks die.

    Args:
        port: of the driver.
        dies: the rank that dies in a step.
        comes: the one that comes when another has asked for it.
        dies_later: the one that dies while the sets are made again.
    """
    index, store = begin_worker(port, comes)

    def die(*_: object) -> None:
        store.put("died", store.worker, b"")
        os.kill(os.getpid(), signal.SIGKILL)

    if index == dies_later:
        mock.patch.object(ProcessSetKeeper, "restore", die).start()
    pairs = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])]
    hvd.init(process_sets=pairs)  # a process that comes makes none
    if index == comes:
        pairs = []
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if pairs:
        optimizer = hvd.DistributedOptimizer(optimizer, process_set=pairs[1])
    state = hvd.elastic.ObjectState(step=0, end=-1, has_asked=False)
    state.register_reset_callbacks([lambda: follow_world(optimizer)])

    @hvd.elastic.run
    def go_on(state: hvd.elastic.ObjectState) -> None:
        if hvd.size() == 3 and state.has_asked:  # not in a callback: who comes calls none
            added = hvd.add_process_set([0, 2])
        while state.step != state.end:
            if index == dies and state.step == 2:
                die()
            hvd.barrier()
            if state.step < 2:
                for each, ranks in zip(pairs, ([0, 1], [1, 2]), strict=True):
                    check_process_set(each, ranks)
            elif hvd.size() == 2:
                check_process_set(pairs[1], [0, 1])
                assert pool.error_of(pairs[0].included)[0] == "ProcessSetLostError"
                check_average(optimizer, model)
                if comes is not None:
                    if hvd.rank() == 0 and not state.has_asked:
                        store.put("hosts", "change", b"")
                    state.has_asked = True
                elif state.end < 0:
                    state.end = state.step + 3
            else:
                check_process_set(hvd.ProcessSet([0, 1]), [0, 1])
                check_process_set(added, [0, 2])
                state.end = state.step + 3 if state.end < 0 else state.end
            state.step += 1
            state.commit()

    go_on(state)
    kinds = [pool.error_of(each.included)[0] for each in pairs]
    found = hvd.rank(), kinds, hvd._basics._get_process_set_ids_and_ranks()
    hvd.shutdown()
    return found


def check_average(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Check that gradients are averaged over two ranks."""
    optimizer.zero_grad()
    model(torch.full((1, 1), float(hvd.rank()))).sum().backward()
    assert model.weight.grad.item() == 0.5
    optimizer.step()


LOST_AND_KEPT = ["ProcessSetLostError", "nothing"]


def test_sets_are_made_again(driver: Driver) -> None:
    driver.order = [f"box:{index}" for index in range(3)]
    driver.living = set(driver.order)
    driver.on_put["died"] = driver.lose
    results = pool.run(
        *(use_sets_under_a_driver, 3),
        args=(driver.port, 0, None),
        transport="",
        initialized=False,
        may_die=[0],
    )
    sets = {0: [0, 1], 1: [0, 1]}
    assert results == [None, *((rank, LOST_AND_KEPT, sets) for rank in range(2))]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["first", "last"])
def test_another_worker_dies_while_sets_are_made_again(driver: Driver, place: str) -> None:
    dies, dies_later = (3, 0) if place == "first" else (0, 3)
    driver.order = [f"box:{index}" for index in range(4)]
    driver.living = set(driver.order)
    driver.on_put["died"] = driver.lose
    results = pool.run(
        *(use_sets_under_a_driver, 4),
        args=(driver.port, dies, None, dies_later),
        transport="",
        initialized=False,
        may_die=[dies, dies_later],
    )
    left = [(rank, LOST_AND_KEPT, {0: [0, 1], 1: [0, 1]}) for rank in range(2)]
    assert results == [None, *left, None]


@pytest.mark.slow
def test_processes_that_come_know_the_sets(driver: Driver) -> None:
    driver.order = [f"box:{index}" for index in range(3)]
    driver.living = set(driver.order)
    driver.on_put["died"] = driver.lose

    def change(_: str) -> None:
        driver.order = ["box:1", "box:2", "box:3"]
        driver.living = set(driver.order)
        driver._store["/test/come"] = b""
        driver.notify("box:1", HostsUpdatedRequest(time.time(), HostUpdateResult.added))

    driver.on_put["hosts"] = change
    results = pool.run(
        *(use_sets_under_a_driver, 4),
        args=(driver.port, 0, 3),
        transport="",
        initialized=False,
        may_die=[0],
    )
    sets = {0: [0, 1, 2], 1: [0, 1], 2: [0, 2]}
    left = [(0, LOST_AND_KEPT, sets), (1, LOST_AND_KEPT, sets), (2, [], sets)]
    assert results == [None, *left]


def begin_with_sets(port: int, sets: list[object]) -> tuple[str, str]:
    index = int(os.environ["RANK"])
    for name in LAUNCHERS:
        os.environ.pop(name, None)
    os.environ.update(environment(port, index))
    error = pool.error_of(lambda: hvd.init(process_sets=sets[index]))
    assert not hvd.is_initialized()
    return error


@pytest.mark.parametrize(
    ("sets", "kind", "text"),
    [
        (
            [[[0]], [[1]]],
            "MismatchError",
            "init(process_sets=...) differs: rank 0 gives [[0]], rank 1 [[1]]",
        ),
        ([[[0, 2]], [[0, 2]]], "InvalidArgumentError", "2"),
        (["static", "static"], "InvalidArgumentError", "'static'"),
    ],
)
def test_sets_that_cannot_be_made(driver: Driver, sets: list[object], kind: str, text: str) -> None:
    driver.order = ["box:0", "box:1"]
    driver.living = set(driver.order)
    errors = pool.run(
        *(begin_with_sets, 2), args=(driver.port, sets), transport="", initialized=False
    )
    for found, says in errors:
        assert found == kind
        assert text in says


# --- what it says


def test_which_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = environment(1234, 3)
    assert horovod_driver(variables) == HorovodDriver("127.0.0.1", 1234, "box:3")
    assert horovod_driver(variables | {"HOROVOD_ELASTIC": "0"}) is None
    assert horovod_driver(variables | {"HOROVOD_GLOO_RENDEZVOUS_ADDR": ""}) is None
    for name in ("HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_HOSTNAME", "HOROVOD_LOCAL_RANK"):
        with pytest.raises(InvalidArgumentError, match=name):
            horovod_driver(variables | {name: ""})


def test_what_the_driver_says(driver: Driver) -> None:
    driver.order = ["box:0"]
    known, unknown = (HorovodDriver("127.0.0.1", driver.port, f"box:{n}") for n in range(2))
    assert known.placement(30.0) == Placement(0, 1, 0, 1)
    assert unknown.placement(30.0) is None
    assert known.get("scope", "key") is None
    known.put("scope", "key", b"value")
    assert unknown.get("scope", "key") == b"value"
    driver.living = {"box:0", "box:1"}
    with pytest.raises(hvd.TimeoutError, match=r"did not answer within 0\.2 s: it waits for other"):
        known.placement(0.2)
    driver.close()
    with pytest.raises(RingError, match=r"driver at 127\.0\.0\.1:\d+ cannot be reached"):
        known.placement(30.0)
