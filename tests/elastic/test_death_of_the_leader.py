"""The leader dies after it has told the others the address of its store."""

from __future__ import annotations

import os
import signal
import socket
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pool

import torch_ring as hvd
from torch_ring.elastic import job as elastic_job
from torch_ring.elastic.regroup import NextWorld
from torch_ring.setup import store_client as stores


def refuses(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 5).close()
    except (ConnectionRefusedError, ConnectionResetError):  # the latter: it ends at this moment
        return True
    return False


def lose_the_leader() -> tuple[int, list[bool]]:
    """Rank 2 dies, and rank 0 before the others have connected to its store.

    Returns:
        The number of remaining ranks; and for each store to which torch was asked to connect,
        whether it had no server.
    """
    name, state = hvd.rank(), hvd.elastic.ObjectState(step=0)
    join, call = elastic_job.ElasticJob._join, stores.StoreCall
    others = {each: getattr(call, each) for each in dir(call) if not each.startswith("_")}
    asked: list[bool] = []

    def join_late(self: elastic_job.ElasticJob, group: NextWorld) -> None:
        if name == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(group.members) == 3:
            assert pool.eventually(lambda: refuses(group.store), 20)
        join(self, group)

    def connect(host: str, port: int, timeout_s: float) -> Any:
        asked.append(refuses((host, port)))
        return call.connect(host, port, timeout_s)

    def serve(*of_store: Any) -> Any:  # connects to itself
        asked.append(False)
        return call.serve(*of_store)

    @hvd.elastic.run
    def train(state: Any) -> None:
        for state.step in range(state.step, 4):
            if (name, state.step) == (2, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.barrier()

    with (
        mock.patch.object(elastic_job.ElasticJob, "_join", join_late),
        mock.patch.object(
            stores, "StoreCall", SimpleNamespace(**others | {"connect": connect, "serve": serve})
        ),
    ):
        train(state)
    return hvd.size(), asked


def test_nobody_waits_for_the_store_of_a_leader_that_has_died() -> None:
    """torch tries for seconds to connect to a missing store."""
    results = pool.run(lose_the_leader, 4, may_die=[0, 2])
    assert results == [None, (2, [False]), None, (2, [False])]
