"""ReachedHosts: the hosts of a job, as far as their agents answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence

from torch_ring.errors import InvalidArgumentError
from torch_ring.rendezvous.network import is_loopback, is_loopback_name, own_address
from torch_ring.run.events import Ready
from torch_ring.run.host_connection import HostConnection, Ssh
from torch_ring.run.hosts import is_this_host
from torch_ring.run.job_spec import JobSpec
from torch_ring.run.rank_environment import JobFacts
from torch_ring.run.supervisor import Supervisor

__all__ = ["ReachedHosts"]


class ReachedHosts:
    """Connects to hosts, and knows which of them have answered.

    Args:
        spec: what to run there.
        supervisor: to which connections are added.
        ssh: how other hosts are reached.
    """

    def __init__(self, spec: JobSpec, supervisor: Supervisor, ssh: Ssh) -> None:
        self._spec, self._supervisor, self._ssh = spec, supervisor, ssh
        self._ready: dict[str, Ready] = {}
        self._deadlines: dict[str, float] = {}  # of hosts that have not answered yet

    def connect(self, host: str) -> None:
        """Begin to connect to a host.

        Raises:
            InvalidArgumentError: there is no ssh here.
        """
        spec = self._spec
        # An agent's own variables are those of its ranks, too.
        environment = {n: text for n, text in spec.environment.items() if n not in spec.unset}
        ssh = None if is_this_host(host) else self._ssh
        before = self._supervisor.connections.get(host)
        if before is not None:
            before.close()
        connection = HostConnection(host, ssh, environment, spec.interface.partition(",")[0])
        self._supervisor.add(connection)
        self._deadlines[host] = time.monotonic() + spec.start_timeout_s
        if spec.is_verbose and ssh is not None:
            self._supervisor.screen.say(f"{host} is reached by: {connection.command}")

    def note(self, event: Ready) -> None:
        """Note that a host has answered.

        Raises:
            InvalidArgumentError: it cannot run ranks.
        """
        self._deadlines.pop(event.host, None)
        if event.problem:
            raise InvalidArgumentError(f"{event.host}: {event.problem}")
        self._ready[event.host] = event

    def lose(self, host: str) -> None:
        """Note that a host does not answer any more, or never has."""
        if self._deadlines.pop(host, None) is not None:
            self._supervisor.connections[host].close()
        self._ready.pop(host, None)

    def is_ready(self, host: str) -> bool:
        """Return whether ranks can be started on a host."""
        return host in self._ready

    @property
    def ready(self) -> Collection[str]:
        """The hosts on which ranks can be started."""
        return self._ready

    @property
    def awaited(self) -> list[str]:
        """The hosts that have not answered yet."""
        return list(self._deadlines)

    def overdue(self) -> list[str]:
        """Return the hosts that have not answered in time."""
        now = time.monotonic()
        return [host for host, deadline in self._deadlines.items() if deadline <= now]

    @property
    def next_at(self) -> float | None:
        """When the next host will be overdue; None: all have answered."""
        return min(self._deadlines.values(), default=None)

    def facts(self) -> JobFacts:
        """Return what the ranks have in common, when all hosts of their slots have answered."""
        spec = self._spec
        first = self._ready[spec.slots[0].host]
        facts = JobFacts(
            run_id=secrets.token_hex(8),
            secret=spec.secret,
            address=self._address(first, [self._ready[slot.host] for slot in spec.slots]),
            port=first.port,
            interface=spec.interface,
            variables=spec.variables,
            unset=spec.unset,
        )
        if spec.is_verbose:
            self._supervisor.screen.say(f"rank 0 serves at {facts.address}, port {facts.port}")
        return facts

    def _address(self, first: Ready, hosts: Sequence[Ready]) -> str:
        """Return an address of rank 0's host that the other hosts reach."""
        if all(host.host == first.host for host in hosts):
            return "127.0.0.1"
        if first.interface_address:
            return first.interface_address
        if not self._supervisor.connections[first.host].is_local:
            # ssh may know the host by a name that nobody else resolves.
            is_usable = first.server and not is_loopback(first.server)
            return first.server if is_usable else first.host.rpartition("@")[2]
        if not is_loopback_name(first.host) and first.host.replace(".", "").isdecimal():
            return first.host  # an address, which the user has chosen
        other = next(host for host in hosts if host.host != first.host)
        return own_address("", other.server or other.host)
