"""main: the command ``python -m torch_ring.run``, or ``torch_ring_run``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence

from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.rendezvous.channel import key_of
from torch_ring.rendezvous.directory import Directory
from torch_ring.rendezvous.launchers import without_launchers
from torch_ring.rendezvous.network import own_address
from torch_ring.run.assignment import Slot
from torch_ring.run.build_report import build_report, version
from torch_ring.run.growth import Growth
from torch_ring.run.host_connection import Ssh
from torch_ring.run.hosts import is_this_host
from torch_ring.run.job import Job, exit_code
from torch_ring.run.job_settings import (
    discover_hosts,
    job_variables,
    secret_of,
    slots_of,
    slots_of_hosts,
)
from torch_ring.run.job_spec import JobSpec
from torch_ring.run.options import Options, parse_options
from torch_ring.run.screen import FdSink, Screen
from torch_ring.run.standbys import standby_command
from torch_ring.run.supervisor import Supervisor

__all__ = ["main"]

_REFUSED = 2  # as argparse
_FAILED = 1
_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job; return its exit code.

    That is 0, the exit code of the first rank that has failed, 128 and the number of the signal
    that has ended it or the job, 1 if a host was not reached, or 2 if the command line is wrong.
    """
    prog = "torch_ring_run"
    if sys.argv and sys.argv[0].endswith("__main__.py"):
        prog = "python -m torch_ring.run"
    environment = without_launchers()
    try:
        options = parse_options(arguments, environment, prog)
        if options.shows:
            print(version() if options.shows == "version" else build_report())
            return 0
        return _run(options, environment)
    except InvalidArgumentError as error:
        _say(str(error))
        return _REFUSED
    except (RingError, OSError) as error:
        _say(str(error))
        return _FAILED
    except KeyboardInterrupt:  # before there are ranks, to which it would be passed on
        return exit_code(-signal.SIGINT)


def _say(line: str) -> None:
    print(f"torch_ring.run: {line}", file=sys.stderr, flush=True)


def _run(options: Options, environment: Mapping[str, str]) -> int:
    if not options.command:
        raise InvalidArgumentError("there is no command to run: give one, as in `python train.py`")
    growth = options.growth
    if growth.standbys:
        standby_command(options.command)  # which it refuses, before anything starts
    variables, unset = job_variables(options.variables, environment)
    secret = secret_of(environment, variables)
    with contextlib.ExitStack() as stack:
        discovery = None
        if growth.script is not None:
            discovery = discover_hosts(growth, options.size, environment, variables, _say)
            stack.callback(discovery.close)
            slots = slots_of_hosts(discovery.hosts, options.size, growth)
        else:
            slots = slots_of(options.size, options.hosts, options.hostfile, environment)
        growth.check(len(slots))
        directory = None
        if growth.least is not None:
            directory = Directory(_address_for(slots, options), key_of(secret))
            stack.callback(directory.close)
            variables["TORCH_RING_ELASTIC_DIRECTORY"] = directory.address
        spec = JobSpec(
            slots=slots,
            command=options.command,
            environment=environment,
            folder=os.getcwd(),
            secret=secret,
            interface=options.interface,
            variables=variables,
            unset=unset,
            start_timeout_s=options.start_timeout_s,
            growth=growth,
            is_verbose=options.is_verbose,
        )
        ssh = Ssh(options.ssh_port, options.ssh_identity_file, options.ssh_arguments)
        sinks = FdSink(1), FdSink(2)
        screen = Screen(*sinks, len(slots), options.output_folder, options.with_time)
        for note in options.notes:
            screen.say(note)
        grown = None
        if directory is not None:
            grown = Growth(growth, slots, directory, discovery, screen.say)
        signals = stack.enter_context(_signals())
        supervisor = Supervisor(screen, signals, options.is_verbose)
        try:
            return Job(spec, supervisor, ssh, grown).run()
        finally:
            supervisor.close()
            supervisor.drain(1.0)


def _address_for(slots: Sequence[Slot], options: Options) -> str:
    """Return an address of this host at which the hosts of all slots, or those to come, find it."""
    interface = options.interface.partition(",")[0]
    others = [slot.host for slot in slots if not is_this_host(slot.host)]
    if others:
        return own_address(interface, others[0].rpartition("@")[2])
    return own_address(interface, None) if options.growth.script is not None else "127.0.0.1"


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Give a descriptor from which the numbers of signals can be read, and take them meanwhile."""
    reader, writer = os.pipe()
    for fd in (reader, writer):
        os.set_blocking(fd, False)

    def note(number: int, _frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(writer, bytes([number]))

    before = {}
    for number in _PASSED_ON:
        # nohup ignores SIGHUP, and a shell SIGINT for what it runs in the background.
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, note)
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
