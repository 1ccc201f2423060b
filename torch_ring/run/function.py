# SPDX-License-Identifier: Apache-2.0
"""run: runs a function on ranks, and returns its results."""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from torch_ring.errors import InvalidArgumentError
from torch_ring.native import NEEDS_LINUX, is_for_one_rank
from torch_ring.run import function_rank
from torch_ring.run.hosts import cluster_hosts
from torch_ring.run.launch import environment_alone, launch
from torch_ring.run.options import Options, changes_nothing, meanings
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
    numbers in front. The other arguments are the options of ``python -m torch_ring.run``.

    Returns:
        A list with the result of each rank, in the order of ranks. In an elastic job, the list has
        the results of the ranks that have finished.

    Raises:
        RuntimeError: a rank has raised an error; its text has the rank's traceback, and its cause
            is that error if it can be pickled. Or a rank has ended without a result, or with one
            that cannot be pickled, or a host was not reached.
        InvalidArgumentError: an argument is wrong, or the function cannot be pickled.
    """
    given = {name: each for name, each in locals().items() if each is not None}
    for name, other in _SAME.items():
        if name in given and given.setdefault(other, given[name]) != given[name]:
            raise InvalidArgumentError(
                f"{other}={given[other]!r} and {name}={given[name]!r}: give one of them"
            )
    interface = given.get("network_interface", "")
    environment = without_launchers()
    options = Options(**{name: given[name] for name in _OF_OPTIONS & given.keys()})
    options = replace(
        options,
        command=[executable or sys.executable, "-c", function_rank.READ_PROGRAM],
        network_interface=interface if isinstance(interface, str) else ",".join(interface),
        notes=tuple(changes_nothing(name) for name in _NOTHING if given.get(name)),
    )
    names_hosts = options.hosts or options.hostfile or options.host_discovery_script
    if not (options.num_proc or names_hosts or cluster_hosts(environment)):
        options = replace(options, num_proc=1)
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


_SAME = {
    "np": "num_proc",
    "min_np": "min_num_proc",
    "max_np": "max_num_proc",
    "network_interfaces": "network_interface",
}
_NOTHING = ("disable_cache", "use_gloo", "use_mpi", "mpi_args")
_OF_OPTIONS = frozenset(each.name for each in fields(Options)) & frozenset(
    signature(run).parameters
)


def _with_arguments(text: str) -> str:
    """Return the docstring of `run` with the meaning of each argument."""
    told = meanings() | {name: f"the same as `{other}`." for name, other in _SAME.items()}
    told |= dict.fromkeys(_NOTHING, "changes nothing, and a line says so.") | {
        "func": "any function that cloudpickle takes; if that is not installed, a function of a "
        "module that the ranks can import.",
        "args": "its arguments.",
        "kwargs": "its arguments by name.",
        "executable": "the Python of the ranks; default: this one.",
    }
    lines = [f"        {name}: {told.get(name, '')}" for name in signature(run).parameters]
    return text.replace("    Returns:", "\n".join(["    Args:", *lines, "", "    Returns:"]))


run.__doc__ = _with_arguments(run.__doc__ or "")


def _outcome(call: Callable[[], ResultT]) -> Any:
    """Return the result of a call, or raise its error, as if a rank had made it."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            return None
        failure = "rank 0 on localhost failed with exit code 1"
        raise RuntimeError(f"{failure}\n{traceback.format_exc()}".rstrip()) from error


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
