"""ProcessSetTable: the process sets of a world, their ids and their engines.

Every set has an engine of its own, with its own connections, threads and watchdog, so that
operations of one set never wait for those of another.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from torch_ring._C import Engine
from torch_ring.config import Config
from torch_ring.connections.connect import Met, connect_full_mesh
from torch_ring.connections.full_mesh import FullMesh
from torch_ring.connections.peer_info import PeerInfo
from torch_ring.errors import InvalidArgumentError, MismatchError, NotInitializedError
from torch_ring.rendezvous.deadline import Deadline
from torch_ring.rendezvous.exchange import failing_together
from torch_ring.rendezvous.launchers import Identity
from torch_ring.world.engine import make_engine, wait_for_all
from torch_ring.world.engine_exchange import EngineExchange
from torch_ring.world.ranks import Ranks, require_below

__all__ = ["ProcessSetRecord", "ProcessSetTable"]


@dataclass(frozen=True)
class ProcessSetRecord:
    """One process set.

    Attributes:
        id: the same on all ranks.
        ranks: its members, ascending ranks of the world.
        engine: runs its collectives; None in a process that is no member.
        owned: state of higher layers for this set, by type; it ends with the set.
    """

    id: int
    ranks: Ranks
    engine: Engine | None
    owned: dict[type, Any] = field(default_factory=dict, compare=False, repr=False)


class ProcessSetTable:
    """The process sets of a world. Set 0 has all ranks, and always exists.

    Thread: any. `add` and `remove` are collectives of all ranks, and run one at a time; the other
    methods do not block.

    Args:
        identity: this process in the world.
        config: the world's settings.
        towards: a host to which the route leads to the other ranks, if known.
        engine: the world's engine.
        labels: the ranks' names in messages.

    Attributes:
        everyone: set 0, of all ranks.
        records: all sets, by id.
    """

    records: tuple[ProcessSetRecord, ...]

    def __init__(
        self,
        identity: Identity,
        config: Config,
        towards: str | None,
        engine: Engine,
        labels: Sequence[str],
    ) -> None:
        self._identity = identity
        self._config = config
        self._towards = towards
        self._engine = engine
        self._labels = labels
        self.everyone = ProcessSetRecord(0, tuple(range(identity.size)), engine)
        self._keep([self.everyone])
        self._closed = False
        self._changing = threading.RLock()  # held while the records change, or the table closes
        self._in_collective = threading.Lock()

    def find(self, ranks: Ranks) -> ProcessSetRecord | None:
        """Return the set of these ranks, if there is one."""
        return self._by_ranks.get(ranks)

    def add(self, ranks: Ranks) -> ProcessSetRecord:
        """Make a set.

        Raises:
            InvalidArgumentError: on all ranks: the set exists already, or a rank does not exist.
            MismatchError: on all ranks: not all of them add this set.
            RingError: on all ranks: a member could not connect; says why.
        """
        with self._in_collective:
            exchange = self._agree("add_process_set", ranks)
            require_below(ranks, self._identity.size)
            if ranks in self._by_ranks:
                raise InvalidArgumentError(f"there is a process set of the ranks {list(ranks)}")
            engine = self._join(ranks, exchange)
            with self._changing:
                if not self._closed:
                    ids = {record.id for record in self.records}
                    free = next(number for number in range(1, len(ids) + 1) if number not in ids)
                    record = ProcessSetRecord(free, ranks, engine)
                    self._keep([*self.records, record])
                    return record
            if engine is not None:
                engine.shutdown()
            raise NotInitializedError

    def remove(self, ranks: Ranks) -> bool:
        """End a set and fail its operations in flight. Return whether it existed; set 0 stays.

        Raises:
            MismatchError: on all ranks: not all of them remove this set.
        """
        with self._in_collective:
            self._agree("remove_process_set", ranks)
            with self._changing:
                record = self._by_ranks.get(ranks)
                if record is None or record.id == 0:
                    return False
                self._keep(other for other in self.records if other is not record)
            record.owned.clear()
            if record.engine is not None:
                record.engine.shutdown()
            return True

    def close(self) -> None:
        """Shut down the engines of all sets, the world's last."""
        with self._changing:
            self._closed = True
            records = self.records
            self._keep([])
        for record in reversed(records):
            record.owned.clear()
            if record.engine is not None:
                record.engine.shutdown()

    def abandon(self) -> None:
        """Let go of the parent's engines in a forked child; the records can still be read."""
        self._changing = threading.RLock()  # the child lacks the parent's thread that held it
        for record in self.records:
            if record.engine is not None:
                record.engine.abandon()

    def _keep(self, records: Iterable[ProcessSetRecord]) -> None:
        """Make `records` the sets. Readers take no lock, so nothing changes in place."""
        self.records = tuple(sorted(records, key=lambda record: record.id))
        self._by_ranks = {record.ranks: record for record in self.records}

    def _agree(self, function: str, ranks: Ranks) -> EngineExchange:
        """Check that all ranks call `function` for the same set; return an exchange to make it."""
        identity = self._identity
        everyone = range(identity.size)
        deadline = Deadline(self._config.init_timeout_s)
        request = f"{function}({list(ranks)})"
        exchange = EngineExchange(self._engine, identity.rank, everyone, deadline)
        requests = exchange.gather("", request)
        for rank, other in enumerate(requests):
            if other != requests[0]:
                raise MismatchError(
                    f"all ranks must add and remove the same process sets in the same order: rank "
                    f"0: {requests[0]}; rank {rank}: {other}"
                )
        deadline = Deadline(self._config.init_timeout_s)  # waiting for the others does not count
        return EngineExchange(self._engine, identity.rank, ranks, deadline)

    def _join(self, ranks: Ranks, exchange: EngineExchange) -> Engine | None:
        """Return the set's running engine, or None in a process that is no member."""
        engine = None
        with contextlib.ExitStack() as cleanup:
            with failing_together(exchange):
                if self._identity.rank in ranks:
                    engine = self._start_engine(ranks, exchange)
                    cleanup.callback(engine.shutdown)
                else:
                    exchange.gather("peer_info", "")
                exchange.gather("started", "")
            cleanup.pop_all()
        return engine

    def _start_engine(self, ranks: Ranks, exchange: EngineExchange) -> Engine:
        labels = [self._labels[rank] for rank in ranks]
        if len(ranks) == 1:
            exchange.gather("peer_info", "")
            return make_engine(0, FullMesh(labels=labels), self._config)
        identity = self._identity.among(ranks)

        def publish(own: PeerInfo) -> Met:
            texts = exchange.gather("peer_info", json.dumps([own.to_json(), token_hex(32)]))
            sent = [json.loads(text) for text in texts]
            peers = [PeerInfo.from_json(rank, info) for rank, (info, _) in enumerate(sent)]
            return Met(peers, bytes.fromhex(sent[0][1]))

        with contextlib.closing(
            connect_full_mesh(
                identity, self._config, self._towards, exchange, publish, labels=labels
            )
        ) as mesh:
            engine = make_engine(identity.rank, mesh, self._config)
        try:
            wait_for_all(engine, exchange.deadline)
        except BaseException:
            engine.shutdown()
            raise
        return engine
