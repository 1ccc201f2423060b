"""main: the command ``python -m torch_ring.run``, or ``torch_ring_run``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence

from torch_ring.elastic.directory import Directory
from torch_ring.elastic.job import key_of
from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.rendezvous.launchers import without_launchers
from torch_ring.rendezvous.network import own_address
from torch_ring.run.assignment import Slot
from torch_ring.run.build_report import build_report, version
from torch_ring.run.host_connection import Ssh
from torch_ring.run.hosts import is_this_host
from torch_ring.run.job import Job, JobSpec
from torch_ring.run.job_settings import job_variables, secret_of, slots_of
from torch_ring.run.options import Options, parse_options
from torch_ring.run.screen import FdSink, Screen
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
        print(f"torch_ring.run: {error}", file=sys.stderr)
        return _REFUSED
    except (RingError, OSError) as error:
        print(f"torch_ring.run: {error}", file=sys.stderr)
        return _FAILED


def _run(options: Options, environment: Mapping[str, str]) -> int:
    if not options.command:
        raise InvalidArgumentError("there is no command to run: give one, as in `python train.py`")
    slots = slots_of(options.size, options.hosts, options.hostfile, environment)
    if options.least is not None and options.least > len(slots):
        raise InvalidArgumentError(f"--min-np {options.least}: there are {len(slots)} ranks")
    if options.most is not None and options.least is None:
        raise InvalidArgumentError(f"--max-np {options.most} needs --min-np")
    if options.most is not None and options.most < len(slots):
        raise InvalidArgumentError(f"--max-np {options.most}: there are {len(slots)} ranks")
    variables, unset = job_variables(options.variables, environment)
    secret = secret_of(environment, variables)
    directory = None
    if options.most is not None:
        directory = Directory(_address_towards(slots), key_of(secret))
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
        least=options.least,
        replaces=options.most is not None,
        is_verbose=options.is_verbose,
    )
    ssh = Ssh(options.ssh_port, options.ssh_identity_file, options.ssh_arguments)
    sinks = FdSink(1), FdSink(2)
    screen = Screen(*sinks, len(slots), options.output_folder, options.with_time)
    for note in options.notes:
        screen.say(note)
    with _signals() as signals:
        supervisor = Supervisor(screen, signals, options.is_verbose)
        try:
            return Job(spec, supervisor, ssh).run()
        finally:
            supervisor.close()
            supervisor.drain(1.0)
            if directory is not None:
                directory.close()


def _address_towards(slots: Sequence[Slot]) -> str:
    """Return an address of this host at which the hosts of all slots find it."""
    others = [slot.host for slot in slots if not is_this_host(slot.host)]
    return own_address("", others[0].rpartition("@")[2]) if others else "127.0.0.1"


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
