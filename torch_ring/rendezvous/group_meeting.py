"""GroupMeeting: the leaders of groups get the cards of all, and find out who shares a machine.

A group claims a machine by the kernel's boot id and a network namespace. Copies of one virtual
machine have these in common, so the leader of each later group shows that it reaches the Unix
socket of the first group of its machine. One that does not is a machine of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch_ring.errors import RingError
from torch_ring.rendezvous.failure import other_size, two_of_a_rank
from torch_ring.rendezvous.group_card import (
    GroupCard,
    difference,
    pack_table,
    unpack_table,
)
from torch_ring.rendezvous.host_exchange import HostExchange, Question

__all__ = ["GroupMeeting"]

_APART = "apart"


class GroupMeeting:
    """One group's side.

    Its methods raise RingError if another group fails.

    Thread: one at a time. Blocking: all methods.

    Args:
        exchange: with the other groups.
        own: this group's card.
        size: the number of ranks of the world.

    Attributes:
        here: the ranks that have come, as far as this group knows.
    """

    def __init__(self, exchange: HostExchange, own: GroupCard, size: int) -> None:
        self._exchange, self._own, self._size = exchange, own, size
        self.here = own.ranks

    @property
    def has_rank_0(self) -> bool:
        """Whether this is the group that gathers the cards."""
        return 0 in self._own.ranks

    def meet(self, settings: Mapping[int, str]) -> tuple[list[GroupCard], bytes]:
        """Return the groups in the order of their places, and the table that says so.

        Args:
            settings: of this group's ranks, as JSON.

        Raises:
            MismatchError: those of another group differ.
            RingError: cards are wrong, or this group's was changed on the way.
        """
        if self.has_rank_0:
            groups = self._collect(settings[0])
            table = pack_table(groups)
            self._exchange.write_table(table)
            return groups, table
        self._exchange.publish(self._own.to_bytes())
        answer = self._exchange.await_table()
        if isinstance(answer, Question):
            rank = min(settings)
            raise difference(0, answer.text.decode(errors="replace"), rank, settings[rank])
        try:
            groups = unpack_table(answer, self._size).groups
        except ValueError as error:
            raise RingError(f"the table of the ranks in the store is damaged: {error}") from None
        if self._own not in groups:
            raise RingError(
                f"the table of the ranks in the store has another card of rank {self._own.leader} "
                "than it has sent: somebody else writes into the store"
            )
        return groups, answer

    def prove_machines(
        self, groups: Sequence[GroupCard], reach: Callable[[GroupCard], bool]
    ) -> list[GroupCard]:
        """Return the groups, each with the machine on which it is.

        Args:
            groups: the cards of all.
            reach: connects to a group's leader; returns whether it is on this machine.
        """
        first: dict[str, GroupCard] = {}
        later = [g for g in groups if first.setdefault(str(g.machine), g) is not g]
        if not later:
            return list(groups)
        if self._own in later:
            is_here = reach(first[str(self._own.machine)])
            self._exchange.tell(_reached(self._own), b"%d" % is_here)
        if self.has_rank_0:
            apart = [g.leader for g in later if self._exchange.hear(_reached(g)) != b"1"]
            self._exchange.tell(_APART, " ".join(map(str, apart)).encode())
        told = self._exchange.hear(_APART).split()
        return [g.apart() if g in later and b"%d" % g.leader in told else g for g in groups]

    def _collect(self, settings: str) -> list[GroupCard]:
        """Return the cards of all groups, in the order of their places."""
        groups = {self._exchange.place: self._own}
        come = dict.fromkeys(self._own.ranks)
        for place, data in self._exchange.collect():
            try:
                group = groups[place] = GroupCard.from_bytes(data, self._size)
            except ValueError as error:
                raise RingError(f"a host runs another version of torch_ring: {error}") from None
            if group.size != self._size:
                raise other_size(group.leader, group.size, self._size)
            for rank in group.ranks:
                if rank in come:
                    raise two_of_a_rank(rank, self._size)
                come[rank] = None
            if group.settings != self._own.settings:
                raise self._exchange.ask(Question(place, settings.encode()))
            self.here = list(come)
        return [groups[place] for place in sorted(groups)]


def _reached(group: GroupCard) -> str:
    return f"reached/{group.leader}"
