"""run: runs a function on ranks, and returns its results."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_ring.errors import InvalidArgumentError
from torch_ring.rendezvous.launchers import without_launchers
from torch_ring.run import function_rank
from torch_ring.run.host_connection import Ssh
from torch_ring.run.job import Job
from torch_ring.run.job_settings import job_variables, secret_of, slots_of
from torch_ring.run.job_spec import JobSpec
from torch_ring.run.screen import Screen, StreamSink
from torch_ring.run.supervisor import Supervisor

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    *,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    output_filename: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    executable: str | None = None,
    verbose: bool = False,
) -> list[Any]:
    """Run a function on new ranks, and return its results: Horovod's ``horovod.run``.

    Each rank calls ``func(*args, **kwargs)`` in a process of its own; ``init()`` is the function's
    business. What the ranks print comes with their numbers in front.

    Args:
        func: any function that cloudpickle takes; if that is not installed, a function of a module
            that the ranks can import.
        args: its arguments.
        kwargs: its arguments by name.
        np: the number of ranks; None: one for each slot of the hosts, or one if there are none.
        hosts: as in ``"host1:4,host2:4"``. None: the hosts of the job of Slurm, Kubernetes, PBS or
            LSF in which this process runs, or this one.
        hostfile: a file with lines such as ``host1 slots=4``, in place of `hosts`.
        start_timeout: seconds in which all hosts must be reached; None: 30.
        ssh_port: of other hosts; None: ssh's own choice.
        ssh_identity_file: of the private key for them; None: ssh's own choice.
        output_filename: a folder for what each rank prints, as in ``rank.3/stdout``.
        network_interfaces: names of network interfaces that the ranks use, as a list or with
            commas; None: they choose.
        env: variables for all ranks, in addition to those of this process.
        executable: the Python of the ranks; None: this one.
        verbose: whether more is said of how the ranks are started.

    Returns:
        A list with the result of each rank, in the order of ranks.

    Raises:
        RuntimeError: a rank has raised an error; has its traceback, and the error as its cause if
            that can be pickled. Or a rank has ended without a result, or with one that cannot be
            pickled, or a host was not reached.
        InvalidArgumentError: an argument is wrong, or the function cannot be pickled.
    """
    environment = without_launchers()
    if np is None and hosts is None and hostfile is None:
        np = 1
    slots = slots_of(np, hosts, hostfile, environment)
    variables, unset = job_variables(dict(env or {}), environment)
    names = network_interfaces or ""
    spec = JobSpec(
        slots=slots,
        command=[executable or sys.executable, "-c", function_rank.READ_PROGRAM],
        environment=environment,
        folder=os.getcwd(),
        secret=secret_of(environment, variables),
        interface=names if isinstance(names, str) else ",".join(names),
        variables=variables,
        unset=unset,
        start_timeout_s=30.0 if start_timeout is None else start_timeout,
        given=_given(func, args, kwargs or {}),
        has_result=True,
        is_verbose=verbose,
    )
    screen = Screen(StreamSink("stdout"), StreamSink("stderr"), len(slots), output_filename)
    supervisor = Supervisor(screen, show_errors=verbose)
    try:
        job = Job(spec, supervisor, Ssh(ssh_port, ssh_identity_file))
        job.run()
    finally:
        supervisor.close()
    if job.failure is not None:
        _raise(str(job.failure), bytes(job.results[job.failure.rank]))
    return [
        _result(f"rank {slot.rank} on {slot.host}", bytes(job.results[slot.rank])) for slot in slots
    ]


def _given(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return what a rank reads: its program, where modules are, and the pickled call."""
    call = (func, tuple(args), dict(kwargs))
    try:
        pickler = importlib.import_module("cloudpickle")
    except ImportError:
        pickler = pickle
        if getattr(func, "__module__", None) == "__main__":
            raise InvalidArgumentError(
                f"{func!r} is of the main program, which the ranks cannot import: pip install "
                "cloudpickle, or put it into a module"
            ) from None
    try:
        pickled = pickler.dumps(call)
    except Exception as error:  # whatever the objects raise
        raise InvalidArgumentError(f"{func!r} or its arguments cannot be pickled: {error}") from (
            error
        )
    program = Path(function_rank.__file__).read_bytes()
    return function_rank.packed(program, sys.path, pickled)


def _result(who: str, data: bytes) -> Any:
    if not data:
        raise RuntimeError(f"{who} has ended without a result: has the function left the process?")
    try:
        return pickle.loads(pickle.loads(data)["result"])
    except Exception as error:  # of a class that is not found here, for example
        raise RuntimeError(f"the result of {who} cannot be read: {error}") from error


def _raise(failure: str, data: bytes) -> None:
    try:
        told = pickle.loads(data)
    except Exception:  # killed while it wrote, or before
        raise RuntimeError(failure) from None
    cause = None
    if told.get("error"):
        try:
            cause = pickle.loads(told["error"])
        except Exception:  # of a class that is not found here
            cause = None
    raise RuntimeError(f"{failure}\n{told.get('traceback', '')}".rstrip()) from cause
