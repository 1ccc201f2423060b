# SPDX-License-Identifier: Apache-2.0
"""run: runs a function on ranks, and returns its results."""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch_ring.errors import InvalidArgumentError
from torch_ring.native import NEEDS_LINUX, is_for_one_rank
from torch_ring.run import function_rank
from torch_ring.run.hosts import cluster_hosts
from torch_ring.run.launch import environment_alone, launch
from torch_ring.run.options import Options, changes_nothing, growth_settings, start_timeout_of
from torch_ring.run.screen import StreamSink
from torch_ring.setup.launchers import environment_for_now, without_launchers

__all__ = ["run"]


ResultT = TypeVar("ResultT")


def run(
    func: Callable[..., ResultT],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    network_interfaces: str | Sequence[str] | None = None,
    host_discovery_script: str | None = None,
    prefix_output_with_timestamp: bool = False,
    env: Mapping[str, str] | None = None,
) -> list[ResultT]:
    """Run a function on new ranks, and return its results: Horovod's ``horovod.run``.

    Each rank calls ``func(*args, **kwargs)`` in a process of its own; ``init()`` is the function's
    business. On macOS and Windows the only rank is this process. The ranks' lines come with their
    numbers in front. The arguments are the options of ``python -m torch_ring.run``.

    Args:
        func: any function that cloudpickle takes; if that is not installed, a function of a module
            that the ranks can import.
        args: its arguments.
        kwargs: its arguments by name.
        num_proc: the number of ranks; None: one for each slot of the hosts, or one if there are
            none.
        min_num_proc: the fewest ranks that go on when others have failed, for a function that uses
            torch_ring.elastic; None: a rank that fails ends the job.
        max_num_proc: failed ranks are started again, up to this number of ranks; None: they are
            not.
        slots: the slots of a host for which `host_discovery_script` gives no number; None: 1.
        reset_limit: the most changes of the ranks; None: no limit.
        cooldown_range: the shortest and the longest time in seconds for which a host is left out if
            its ranks keep failing; None: for good, and only with a script.
        hosts: as in ``"host1:4,host2:4"``. None: the hosts of the job of Slurm, Kubernetes, PBS or
            LSF in which this process runs, or this one.
        hostfile: a file with lines such as ``host1 slots=4``, in place of `hosts`.
        start_timeout: seconds in which all hosts must be reached; None: HOROVOD_START_TIMEOUT, or
            30.
        ssh_port: of other hosts; None: ssh's own choice.
        ssh_identity_file: the file of the private key for them; None: ssh's own choice.
        disable_cache: has no effect, and a line says so; likewise `use_gloo`, `use_mpi`,
            `mpi_args`.
        output_filename: a folder for each rank's output, as in ``rank.3/stdout``.
        verbose: whether to print more about the start of the ranks.
        use_gloo: changes nothing: the ranks find one another in one way only.
        use_mpi: changes nothing: the ranks are started without MPI.
        mpi_args: changes nothing.
        network_interface: names of network interfaces that the ranks use, as a list or with
            commas; None: they choose.
        executable: the Python of the ranks; None: this one.
        np: the same as `num_proc`.
        min_np: the same as `min_num_proc`.
        max_np: the same as `max_num_proc`.
        network_interfaces: the same as `network_interface`.
        host_discovery_script: a command that prints a line ``host`` or ``host:slots`` for each
            available host, and is run every second; in place of `hosts`.
        prefix_output_with_timestamp: whether to put the time in front of each line.
        env: variables for all ranks, in addition to those of this process.

    Returns:
        A list with the result of each rank, in the order of ranks. In an elastic job, the list has
        the results of the ranks that have finished.

    Raises:
        RuntimeError: a rank has raised an error; its text has the rank's traceback, and its cause
            is that error if it can be pickled. Or a rank has ended without a result, or with one
            that cannot be pickled, or a host was not reached.
        InvalidArgumentError: an argument is wrong, or the function cannot be pickled.
    """
    environment = without_launchers()
    size = _one_of(num_proc=num_proc, np=np)
    growth = growth_settings(
        Namespace(
            num_proc=size,
            min_np=_one_of(min_num_proc=min_num_proc, min_np=min_np),
            max_np=_one_of(max_num_proc=max_num_proc, max_np=max_np),
            host_discovery_script=host_discovery_script,
            hosts=hosts,
            hostfile=hostfile,
            slots_per_host=slots,
            reset_limit=reset_limit,
            blacklist_cooldown_range=cooldown_range,
            standby=None,
        )
    )
    if not (size or hosts or hostfile or host_discovery_script or cluster_hosts(environment)):
        size = 1
    interface = _one_of(network_interface=network_interface, network_interfaces=network_interfaces)
    given = {
        "disable_cache": disable_cache,
        "use_gloo": use_gloo,
        "use_mpi": use_mpi,
        "mpi_args": mpi_args,
    }
    options = Options(
        command=[executable or sys.executable, "-c", function_rank.READ_PROGRAM],
        size=size,
        growth=growth,
        hosts=hosts,
        hostfile=hostfile,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        start_timeout_s=start_timeout or start_timeout_of(environment),
        output_folder=output_filename,
        interface=interface if isinstance(interface, str) else ",".join(interface or ()),
        variables={**growth.variables(), **(env or {})},
        with_time=prefix_output_with_timestamp,
        is_verbose=bool(verbose),
        notes=tuple(changes_nothing(name) for name, value in given.items() if value),
    )
    if is_for_one_rank():
        if options.command[0] != sys.executable:
            raise InvalidArgumentError(f"executable={executable!r}: {NEEDS_LINUX}")
        with environment_for_now(environment_alone(options, environment, "run()")):
            return [_outcome(functools.partial(func, *args, **kwargs or {}))]
    code, job = launch(
        options,
        environment,
        (StreamSink("stdout"), StreamSink("stderr")),
        given=_given(func, args, kwargs or {}),
        has_result=True,
    )
    if job.failure is not None:
        _raise(str(job.failure), bytes(job.results[job.failure.rank]))
    if code:
        raise RuntimeError(f"the job has ended with exit code {code}: see the output of its ranks")
    finished = sorted(job.finished, key=lambda slot: slot.rank)
    return [
        _result(f"rank {slot.rank} on {slot.host}", bytes(job.results[slot.rank]))
        for slot in finished
    ]


def _outcome(call: Callable[[], ResultT]) -> Any:
    """Return the result of a call, or raise its error, as if a rank had made it."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            return None
        failure = "rank 0 on localhost failed with exit code 1"
        raise RuntimeError(f"{failure}\n{traceback.format_exc()}".rstrip()) from error


def _one_of(**values: Any) -> Any:
    """Return the value of an argument that has two names."""
    (first, one), (second, other) = values.items()
    if one is not None and other is not None and one != other:
        raise InvalidArgumentError(f"{first}={one!r} and {second}={other!r}: give one of them")
    return other if one is None else one


def _given(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return a rank's input: its program, the folders of modules, and the pickled call."""
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
    except Exception as error:  # any error of the objects
        raise InvalidArgumentError(
            f"{func!r} or its arguments cannot be pickled: {error}: make in the function what only "
            "a process of its own can have"
        ) from error
    program = Path(function_rank.__file__).read_bytes()
    return function_rank.packed(program, sys.path, pickled)


def _result(who: str, data: bytes) -> Any:
    if not data:
        raise RuntimeError(f"{who} has ended without a result: has the function left the process?")
    try:
        return pickle.loads(pickle.loads(data)["result"])
    except Exception as error:  # of a class that is not found here, for example
        raise RuntimeError(
            f"the result of {who} cannot be read: {error}: return what this program can import"
        ) from error


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
