"""Meetings for tests: ranks are threads, hosts are made up."""

import contextlib
import os

import made_up

from torch_ring.setup.exchange import Meeting, failing_together
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import Deadline
from torch_ring.setup.peer_info import parse_table
from torch_ring.setup.store import StorePlace

_numbers = iter(range(1 << 30))


def new_name():
    """Return a socket's name that no other test uses."""
    return f"\0torch_ring test {os.getpid()} {next(_numbers)}"


def place_of(store):
    return StorePlace(None, False, lambda *_: store)


@contextlib.contextmanager
def meet(rank, size, *, name, store=None, host=0, local_size=None, settings=None, timeout_s=20.0):
    """Meet as a rank of a made-up host; yield the meeting and the peers."""
    identity = Identity(rank, size, local_size=local_size)
    place = place_of(store) if store is not None else None
    with contextlib.closing(Meeting(identity, Deadline(timeout_s), place, name)) as met:
        with failing_together(met):
            met.meet(made_up.card(rank, host), settings or {"A": 1})
            table, _ = met.pass_down(met.table)
            peers = parse_table(table, size).peers
        yield met, peers


def ranks_met(rank, size, barrier=None, **more):
    with meet(rank, size, **more) as (_, peers):
        if barrier:
            barrier.wait(20)
        return [peer.rank for peer in peers]
