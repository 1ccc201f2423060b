# SPDX-License-Identifier: Apache-2.0
"""regroup: the survivors of a world find one another, and agree on the leader of the next one.

Every process of the job listens (`Listener`), and knows the addresses of the others. After a
failure each process asks the lowest living process below it to lead; a process that finds none
leads. The leader waits until every other process has joined or cannot be reached, and sends the
list of members and the address of its store to the processes that have joined. They make the next
world over this store, in the order of their old ranks.

If a leader dies, its connections close, and the waiting processes ask the next candidate. If a
process dies before the next world is made, that world fails, and all regroup once more: until a
world has been made, they keep the list of members of the last one.

A process counts as gone if its host refuses the connection; as lost if its host does not answer, or
if it is stopped for longer than the heartbeat timeout. Lost processes might live, and might form a
group of their own. So a group goes on only if it is a majority of the processes that are not gone,
or the half with the lowest old rank.

A host with a rank that was lost in the last world is a suspect: it has little time to answer a
connection. If the survivors would be no majority, all hosts are asked again with more patience.

A newcomer asks rank 0 of the present world. It waits there until the members regroup, and is added
after the survivors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

from torch_ring.errors import PeerLostError, RingError, TimeoutError
from torch_ring.membership.listener import JoinRequest, Listener
from torch_ring.membership.member import Member, MessageKey, Reach, dial, reach

__all__ = ["CallOverError", "LeftOutError", "Limits", "NextWorld", "come", "leavers_of", "regroup"]

_REQUESTS_S = 0.002  # duration of one wait for requests
_PROBE_EVERY_S = 0.1
_PROBERS = 32
_FIND_EVERY_S = 0.05


class LeftOutError(RingError):
    """The other ranks go on without this one: it was silent for too long, or cut off from them."""


class CallOverError(Exception):
    """The ranks have finished this newcomer's elastic function, and are in a later one."""


@dataclass(frozen=True)
class Limits:
    """Limits of a regrouping: its duration, and the processes.

    Attributes:
        timeout_s: seconds until the regrouping fails.
        silence_s: seconds of silence after which a process counts as lost.
        least: the fewest processes that may go on.
        takes_newcomers: whether newcomers may join: the launcher starts no more than it may.
    """

    timeout_s: float
    silence_s: float
    least: int = 1
    takes_newcomers: bool = True


def leavers_of(ranks: Sequence[tuple[bool, bool]], limits: Limits) -> list[int]:
    """Return the ranks that leave now; none if too few would be left and newcomers can come first.

    Args:
        ranks: for each rank, whether it wants to leave, and whether a newcomer waits at it.
        limits: the fewest processes.
    """
    leavers = [rank for rank, (leaves, _) in enumerate(ranks) if leaves]
    somebody_waits = any(waits for _, waits in ranks)
    are_too_few = len(ranks) - len(leavers) < max(1, limits.least)
    return [] if are_too_few and somebody_waits else leavers


@dataclass(frozen=True)
class NextWorld:
    """The processes of the next world.

    Attributes:
        members: the processes, by rank.
        store: the address of the store where they meet; one process needs none.
        generation: the number of worlds so far, this one included.
    """

    members: Sequence[Member]
    store: tuple[str, int]
    generation: int


def regroup(
    members: Sequence[Member],
    generation: int,
    own: Member,
    listener: Listener,
    limits: Limits,
    serve: Callable[[], tuple[str, int]],
    suspects: Collection[str] = (),
) -> NextWorld:
    """Return this process's next group.

    Args:
        members: the processes of the last world, by rank.
        generation: the generation of the last world.
        own: this process, one of them.
        listener: this process's listener.
        limits: limits of time and of the number of processes.
        serve: starts a new store, and returns its address; called if this process leads.
        suspects: other hosts that seem silent already.

    Raises:
        LeftOutError: the other processes go on without this one, or may do so.
        TimeoutError: the processes did not come in time; names them.
        RingError: too few processes are left.
    """
    deadline = time.monotonic() + limits.timeout_s
    rank = members.index(own)
    while True:
        try:
            for candidate in members[:rank]:
                is_suspect = candidate.host in suspects
                group = _ask(
                    "join", candidate, own, listener.key, limits, deadline, is_suspect=is_suspect
                )
                if group is not None:
                    return group
            leading = _Leading(members, generation, rank, listener, limits, deadline, suspects)
            return leading.run(serve)
        except _ElsewhereError:  # a lower process is alive after all: ask it again
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {rank} has found no leader within {limits.timeout_s:g} s after a "
                    "failure (TORCH_RING_ELASTIC_TIMEOUT): it reaches other ranks than they reach"
                ) from None
            time.sleep(_FIND_EVERY_S)


class _ElsewhereError(Exception):
    """Another process leads."""


def come(
    find_members: Callable[[], Sequence[Member]],
    own: Member,
    key: MessageKey,
    limits: Limits,
    call: int = 1,
) -> NextWorld:
    """Return the group that this process, a newcomer, joins.

    Args:
        find_members: returns the processes of the present world, by rank; empty if there is none.
        own: this process.
        key: the key of the job.
        limits: limits of the wait.
        call: the number of elastic functions that this process has called.

    Raises:
        CallOverError: the ranks have called more elastic functions.
        TimeoutError: no rank has let this process in.
    """
    deadline = time.monotonic() + limits.timeout_s
    while time.monotonic() < deadline:
        for candidate in find_members():  # the first living one is, or becomes, rank 0
            group = _ask("newcomer", candidate, own, key, limits, deadline, call=call)
            if group is not None:
                return group
        time.sleep(_FIND_EVERY_S)
    raise TimeoutError(
        f"no rank of the job has let this process in within {limits.timeout_s:g} s "
        "(TORCH_RING_ELASTIC_TIMEOUT): do they call commit(), or check_host_updates()?"
    )


def _ask(
    kind: str,
    candidate: Member,
    own: Member,
    key: MessageKey,
    limits: Limits,
    deadline: float,
    *,
    is_suspect: bool = False,
    **more: Any,
) -> NextWorld | None:
    """Ask a process to lead; return its group, or None if it has died or cannot be reached."""
    try:
        channel = dial(candidate, key, limits.silence_s, is_suspect=is_suspect)
    except OSError:
        return None
    try:
        channel.send({"kind": kind, "member": own.packed(), **more})
        while True:
            answer = channel.receive(limits.silence_s)
            if answer["kind"] != "alive":
                return _group_of(answer)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the other ranks did not come within {limits.timeout_s:g} s after a failure "
                    "(TORCH_RING_ELASTIC_TIMEOUT): one of them is busy, in no collective"
                )
    except RingError:
        raise
    except OSError:
        return None
    finally:
        channel.close()


def _group_of(answer: dict[str, Any]) -> NextWorld:
    if answer["kind"] == "left out":
        raise LeftOutError(
            "the other ranks go on without this one, which was silent for too long or cut off from "
            "them: end this process, or start it anew"
        )
    if answer["kind"] == "over":
        raise CallOverError
    if answer["kind"] == "elsewhere":
        raise _ElsewhereError
    if answer["kind"] == "refused":
        known = {kind.__name__: kind for kind in (LeftOutError, PeerLostError, TimeoutError)}
        raise known.get(answer["error"], RingError)(answer["why"])
    members, (host, port) = answer["members"], answer["store"]
    return NextWorld([Member(*each) for each in members], (host, port), answer["generation"])


@dataclass
class _Leading:
    """The leader's side of a regrouping."""

    members: Sequence[Member]
    generation: int
    rank: int
    listener: Listener
    limits: Limits
    deadline: float
    suspects: Collection[str]
    joined: dict[str, JoinRequest] = field(default_factory=dict)
    found: dict[str, Reach] = field(default_factory=dict)  # for processes that have not joined

    def run(self, serve: Callable[[], tuple[str, int]]) -> NextWorld:
        """Wait for the others, and send them the group."""
        try:
            self._gather()
            if self.suspects and not self._may_go_on():
                self.suspects = ()
                self.found.clear()
                self._gather()
            survivors = self._survivors()
            for request in self.listener.take_newcomers() if self.limits.takes_newcomers else ():
                self.joined[request.member.id] = request
                survivors.append(request.member)
            self._require_enough(survivors)
            store = serve() if len(survivors) > 1 else ("", 0)
            group = NextWorld(survivors, store, self.generation + 1)
        except _ElsewhereError:
            self._tell({"kind": "elsewhere"})
            raise
        except RingError as error:
            answer = {"kind": "refused", "error": type(error).__name__, "why": str(error)}
            self._tell(answer)
            raise
        packed = [member.packed() for member in survivors]
        self._tell({"kind": "group", **vars(group), "members": packed})
        return group

    def _missing(self) -> list[Member]:
        here = {*self.joined, self.members[self.rank].id}
        return [member for member in self.members if member.id not in here]

    def _gather(self) -> None:
        """Wait until every other process has joined, or is gone or lost."""
        probes: dict[str, Future[Reach]] = {}
        next_probe = 0.0
        probers = ThreadPoolExecutor(_PROBERS, thread_name_prefix="torch_ring regroup")
        try:
            while True:
                self._take_requests()
                missing = self._missing()
                for member in missing:
                    if member.id in probes and probes[member.id].done():
                        self.found[member.id] = probes.pop(member.id).result()
                lower = self.members[: self.rank]
                if any(self.found.get(member.id) is Reach.ALIVE for member in lower):
                    raise _ElsewhereError
                if all(map(self._is_given_up, missing)):
                    return
                now = time.monotonic()
                if now > self.deadline:
                    raise TimeoutError(self._too_late(missing))
                if now < next_probe:
                    continue
                next_probe = now + _PROBE_EVERY_S
                for member in missing:
                    if member.id not in probes:
                        probes[member.id] = probers.submit(self._reach, member)
        finally:
            probers.shutdown(wait=False, cancel_futures=True)

    def _take_requests(self) -> None:
        with contextlib.suppress(Empty):
            request = self.listener.requests.get(timeout=_REQUESTS_S)
            while True:
                self.joined[request.member.id] = request  # keep the latest of several requests
                request = self.listener.requests.get_nowait()
        for process, request in list(self.joined.items()):
            if request.channel.is_closed():  # it has died since
                del self.joined[process]

    def _is_given_up(self, member: Member) -> bool:
        return self.found.get(member.id, Reach.ALIVE) is not Reach.ALIVE

    def _reach(self, member: Member) -> Reach:
        is_suspect = member.host in self.suspects
        return reach(member, self.listener.key, self.limits.silence_s, is_suspect=is_suspect)

    def _lost(self) -> list[Member]:
        """Return the processes that may be alive, and may form a group of their own."""
        return [each for each in self._missing() if self.found[each.id] is not Reach.GONE]

    def _may_go_on(self) -> bool:
        """Return whether the joined processes are a majority, or the half with the lowest rank."""
        lost = self._lost()
        living = [each for each in self.members if each in lost or each not in self._missing()]
        joined = len(living) - len(lost)
        return 2 * joined > len(living) or (2 * joined == len(living) and living[0] not in lost)

    def _survivors(self) -> list[Member]:
        """Return the processes that go on, in the old order."""
        missing, lost = self._missing(), self._lost()
        survivors = [member for member in self.members if member not in missing]
        if not self._may_go_on():
            raise LeftOutError(
                f"{len(survivors)} ranks of {len(survivors) + len(lost)} find one another; "
                f"{self._names(lost)} may live, and continue: these ranks end"
            )
        return survivors

    def _require_enough(self, group: Sequence[Member]) -> None:
        if len(group) < self.limits.least:
            missing = self._missing()
            ended = f": {self._names(missing)} have ended" if missing else ""
            raise RingError(
                f"{len(group)} ranks are left, and TORCH_RING_MIN_RANKS is "
                f"{self.limits.least}{ended}"
            )

    def _too_late(self, missing: Sequence[Member]) -> str:
        late = [member for member in missing if not self._is_given_up(member)]
        return (
            f"after a failure {self._names(late)} did not come within {self.limits.timeout_s:g} s "
            "(TORCH_RING_ELASTIC_TIMEOUT): busy, in no collective"
        )

    def _names(self, members: Sequence[Member]) -> str:
        ranks = [str(self.members.index(member)) for member in members]
        return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(ranks)}"

    def _tell(self, answer: dict[str, Any]) -> None:
        for request in self.joined.values():
            with contextlib.suppress(OSError):  # it has died: the next world fails, all regroup
                request.answer(answer)
