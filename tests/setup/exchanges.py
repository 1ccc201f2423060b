# SPDX-License-Identifier: Apache-2.0
"""Exchanges for tests: ranks are threads, hosts are made up."""

import contextlib
import os

import made_up

from torch_ring.setup.exchange import FailurePath, exchange_hosts, failing_together
from torch_ring.setup.host_socket import meet_on_host
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import Deadline
from torch_ring.setup.peer_info import parse_table
from torch_ring.setup.store import StorePlace

_numbers = iter(range(1 << 30))


def new_name():
    """Return a socket's name that no other test uses."""
    return f"\0torch_ring test {os.getpid()} {next(_numbers)}"


def place_of(store, key=None):
    return StorePlace(None, False, lambda *_: store, key)


def path_on_host(identity, timeout_s, place, name, missed=lambda _: ()):
    """Meet the ranks of this host as init() does; return the path of failures."""
    deadline = Deadline(timeout_s)
    path = FailurePath(identity, deadline, place, missed)
    has_store = place is not None
    path.host = meet_on_host(name, identity, deadline, path.watch, has_store=has_store)
    return path


def exchange_on(path, host=0, settings=None):
    """Exchange the descriptions of a made-up host; return the table, and the leader."""
    own = made_up.info(path.identity.rank, host)
    table = exchange_hosts(own, settings or {}, path)
    return pass_on(path, table) if table else path.host.receive().payload, bool(table)


def pass_on(path, data, fds=()):
    """Pass data from this machine's leader, this rank, to the others; return them."""
    path.host.broadcast(data, fds)
    return data


@contextlib.contextmanager
def meet(rank, size, *, name, store=None, host=0, local_size=None, settings=None, timeout_s=20.0):
    """Meet as a rank of a made-up host; yield the path of failures, the peers, and the leader."""
    identity = Identity(rank, size, local_size=local_size)
    place = place_of(store) if store is not None else None
    path = path_on_host(identity, timeout_s, place, name)
    with failing_together(path):
        table, leads = exchange_on(path, host, settings or {"A": 1})
        yield path, parse_table(table, size).peers, leads


def ranks_met(rank, size, **more):
    with meet(rank, size, **more) as (_, peers, _leads):
        return [peer.rank for peer in peers]
