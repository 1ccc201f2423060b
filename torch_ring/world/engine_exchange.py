"""EngineExchange: values and failures that all ranks exchange while a process set is made.

A store may be gone when a set is made, so the world's engine carries the exchange. The ranks
proceed in rounds; each is an allgather of one line a rank: a value, a failure, or "waiting", which
keeps the round going while a rank is busy. All ranks see the same rounds, and so end in the same
one, with values or with a failure.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence

import torch

from torch_ring._C import Engine, Work
from torch_ring.errors import MismatchError, PeerLostError, RingError, TimeoutError
from torch_ring.rendezvous.deadline import Deadline

__all__ = ["EngineExchange"]

_VALUE, _WAITING = "", "waiting"  # kinds of a line; any other is the type of a failure
_KINDS: dict[str, type[RingError]] = {
    error.__name__: error for error in (RingError, MismatchError, PeerLostError, TimeoutError)
}


class EngineExchange:
    """One rank's side of the exchange that makes one process set; a `SetupExchange`.

    All ranks of the world take part, and gather equally often. Its methods raise PeerLostError and
    TimeoutError as the world's engine does.

    Args:
        engine: the world's engine.
        rank: this process in the world.
        members: the set's ranks in the world.
        deadline: the deadline of the whole exchange.
    """

    def __init__(
        self, engine: Engine, rank: int, members: Sequence[int], deadline: Deadline
    ) -> None:
        self.deadline = deadline
        self._engine = engine
        self._rank = rank
        self._members = members
        self._pending: Work | None = None  # the round that this rank has entered
        self._over = False  # there will be no more rounds

    def gather(self, name: str, value: str) -> list[str]:  # noqa: ARG002  the order identifies it
        """Return the values that the members give, by rank in the set.

        Cost: one allgather of the world; more while a rank is late.

        Raises:
            RingError: a rank has failed; says why.
        """
        self._finish_round()
        while True:
            self._begin_round(_VALUE, value)
            lines = self._finish_round()
            if all(kind == _VALUE for kind, _ in lines):
                return [lines[member][1] for member in self._members]

    def check(self) -> None:
        """Raise the failure of another rank, if there is one. Does not block."""
        if self._pending is None:
            self._begin_round(_WAITING)
        elif self._pending.done():
            self._finish_round()

    def explain(self, error: RingError) -> RingError:
        """Return the failure of another rank behind `error`, or `error` itself.

        A rank that fails says why a round after its connections have closed.
        """
        try:
            self._finish_round()
            for _ in range(2):
                self._begin_round(_WAITING)
                self._finish_round()
        except RingError as failure:
            return failure
        return error

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one cannot go on, unless they have failed already."""
        kind = type(error).__name__ if type(error).__name__ in _KINDS else RingError.__name__
        with contextlib.suppress(RingError):
            self._finish_round()
            if not self._over:
                reason = str(error) or type(error).__name__
                self._begin_round(
                    kind, f"rank {self._rank} could not join the process set: {reason}"
                )
                self._finish_round()

    def _begin_round(self, kind: str, text: str = "") -> None:
        line = json.dumps([kind, text]) + "\n"
        payload = torch.frombuffer(bytearray(line.encode()), dtype=torch.uint8)
        with self._over_if_it_fails():
            self._pending = self._engine.allgather(payload, "torch_ring.process_sets")

    def _finish_round(self) -> list[list[str]]:
        """Return the lines of the pending round, [kind, text] by rank in the world."""
        if self._pending is None:
            return []
        with self._over_if_it_fails():
            payload = self._pending.wait()
            self._pending = None  # not after a KeyboardInterrupt: fail() has to wait then
            lines = [json.loads(line) for line in bytes(payload.numpy()).splitlines()]
            for kind, text in lines:
                if kind not in (_VALUE, _WAITING):
                    raise _KINDS[kind](text)
        return lines

    @contextlib.contextmanager
    def _over_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except RingError:
            self._over, self._pending = True, None
            raise
