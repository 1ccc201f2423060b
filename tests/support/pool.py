# SPDX-License-Identifier: Apache-2.0
"""Runs test functions on ranks: processes forked from a server that has torch loaded.

Two spawned ranks cost 3 s and more for their imports, two forked ones 0.2 s. Tests of its kind
reuse a process that has passed its test and has left its world, in hundredths of a second. Kinds
are kept apart because some load libraries that cannot be unloaded.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import itertools
import logging
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

DEADLINE_S = 60.0  # a hang, not a slow machine: the longest test takes a few seconds
EXIT_DEADLINE_S = 30.0  # for a process whose function has returned
FORKS = "forks"
"""The kind of tests whose ranks fork children that call backward(): torch refuses that in processes
that have had autograd threads of other tests."""

_context = multiprocessing.get_context("forkserver")
# Modules that take seconds to import. The first optimizer of a process imports torch._dynamo.
_context.set_forkserver_preload(["torch", "torch._dynamo", "torch_ring.api", "numpy", "pytest"])
_runs = itertools.count()


class RanksFailed(AssertionError):
    """Some ranks failed; the message has the report of each of them."""


@dataclass(frozen=True)
class Outcome:
    """The end of a rank.

    Attributes:
        value: the function's result.
        failure: a traceback, or the death of the process in words; None if it returned.
    """

    value: Any = None
    failure: str | None = None


def eventually(holds: Callable[[], bool], deadline_s: float = DEADLINE_S / 2) -> bool:
    """Return whether a condition holds before the deadline: other threads may need time."""
    end = time.monotonic() + deadline_s
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(0.001)
    return held


def shared_files() -> set[Path]:
    """Return the files in /dev/shm of torch_ring, PyTorch and multiprocessing, not of others."""
    ours = re.compile(r".*torch|sem\.mp-|psm_")
    return {path for path in Path("/dev/shm").iterdir() if ours.match(path.name)}


def are_gone(files: set[Path]) -> bool:
    """Return whether files disappear in a while: other tests may keep theirs for some time."""
    return eventually(lambda: not any(path.exists() for path in files))


def all_have_passed(directory: Path, size: int) -> None:
    """Report that this rank is here, and wait until all ranks of a run have done so.

    For ranks that die on purpose. A barrier is not enough: the dying rank may be the one that
    passes on its last message.

    Args:
        directory: a folder for this call alone; it is made, or empty.
    """
    directory.mkdir(exist_ok=True)
    (directory / f"{os.getpid()}").touch()
    assert eventually(lambda: len(list(directory.iterdir())) == size)


def has_asked() -> bool:
    """Return whether this rank has an unfinished operation of the world in flight.

    Call it in a thread other than the waiting one.
    """
    from torch_ring.world import current

    return any(not record.finished_ns for record in current.engine().records())


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """Return the type's name and the text of the exception of `call`."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def expect_error(kind: str, words: str, call: Callable[[], object]) -> str:
    """Expect an exception of `call` by its type's name and words of its text, which is returned."""
    found, text = error_of(call)
    assert (found, words in text) == (kind, True), f"{found}: {text}"
    return text


def run(
    fn: Callable[..., Any],
    size: int,
    *,
    args: Sequence[Any] = (),
    transport: str = "shm",
    env: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
    initialized: bool = True,
    kind: str | None = None,
    may_die: Collection[int] = (),
    namespaces: Sequence[str] = (),
    before: Callable[[list[int]], object] = lambda _: None,
) -> list[Any]:
    """Call ``fn(*args)`` on `size` ranks and return the results, by rank.

    Args:
        fn: a module-level function.
        transport: "shm" (one host) or "tcp" (every rank is its own host); "" leaves it open.
        env: environment variables of all ranks.
        initialized: whether to call ``torch_ring.init()`` before and ``shutdown()`` after.
        kind: the kind of processes to reuse; `fn` then leaves its world itself. None: processes
            without a kind if `initialized`, and otherwise new ones.
        may_die: ranks that may die without a failure; they then return None.
        namespaces: the network namespace of each rank.
        before: called with the process ids of the ranks, before they begin.

    Raises:
        RanksFailed: with the traceback of every rank that raised, and the stacks of those that
            were still running at the deadline. They are killed.
    """
    base = _environment(size, namespaces)
    if transport:
        base["TORCH_RING_TRANSPORT"] = transport
    base.update(env or {})
    idle: list[_Process] | None = None  # gets the processes that can be used again
    if (initialized or kind) and not may_die and not namespaces:
        idle = _idle.setdefault(kind, [])
    processes = [idle.pop() if idle else _Process() for _ in range(size)]
    passed = False
    try:
        before([process.process.pid or 0 for process in processes])
        for rank, process in enumerate(processes):
            namespace = namespaces[rank] if namespaces else None
            environment = base | _rank_environment(rank, namespaces)
            again = idle is not None
            process.start(_Task(fn, tuple(args), environment, initialized, namespace, again))
        blocking = set(range(size)).difference(may_die)
        outcomes = _collect(processes, blocking, time.monotonic() + deadline_s)
        failures = [
            f"--- rank {i} ---\n{outcome.failure}"
            for i, outcome in enumerate(outcomes)
            if outcome.failure and i not in may_die
        ]
        if failures:
            raise RanksFailed("\n".join(failures))
        passed = True
    finally:
        if passed and idle is not None:
            idle.extend(processes)
        else:
            for process in processes:
                process.end()
    return [outcome.value for outcome in outcomes]


@dataclass(frozen=True)
class _Task:
    """The work of a process; with `again`, it waits for another task in place of exiting."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    environment: Mapping[str, str]
    initialized: bool
    namespace: str | None
    again: bool


class _Process:
    """One process, and the rank that it is in the current run."""

    def __init__(self) -> None:
        self.stacks = tempfile.NamedTemporaryFile("w+", prefix="stacks-")  # noqa: SIM115  end()
        self.results, theirs = _context.Pipe()
        self.process = _context.Process(target=_main, args=(theirs, self.stacks.name))
        self.process.start()
        theirs.close()
        self.exits = False

    def start(self, task: _Task) -> None:
        self.exits = not task.again
        with contextlib.suppress(BrokenPipeError):  # it has died: outcome() reports it
            self.results.send_bytes(pickle.dumps(task))

    def outcome(self) -> Outcome:
        """Return the outcome that the process sent, or its later failure."""
        try:
            result: Outcome = pickle.loads(self.results.recv_bytes())
        except (EOFError, ConnectionResetError):
            result = Outcome()
            self.exits = True
        if not self.exits:
            return result
        self.process.join(EXIT_DEADLINE_S)
        if result.failure:
            return result
        if self.process.is_alive():
            return self.hung("returned, but its process has not ended")
        if self.process.exitcode != 0:
            return Outcome(failure=f"died with exit code {self.process.exitcode}")
        return result

    def hung(self, how: str) -> Outcome:
        """Return the stacks of a process that has not ended."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGCONT)
            os.kill(self.process.pid, signal.SIGUSR1)
            written = -1

            def is_written() -> bool:
                nonlocal written
                before, written = written, os.stat(self.stacks.name).st_size
                time.sleep(0.1)
                return 0 < before == written

            eventually(is_written, 10.0)
        self.stacks.seek(0)
        return Outcome(failure=f"{how}:\n{self.stacks.read()}")

    def end(self) -> None:
        """Kill the process and its descendants."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not have made its group yet
        self.process.join()
        self.process.close()
        self.results.close()
        self.stacks.close()


_idle: dict[str | None, list[_Process]] = {}


@atexit.register
def _end_idle() -> None:
    for processes in _idle.values():
        while processes:
            processes.pop().end()


def _collect(ranks: Sequence[_Process], blocking: set[int], deadline: float) -> list[Outcome]:
    """Return the ranks' outcomes, after all blocking ranks have ended or at the deadline."""
    outcomes: dict[int, Outcome] = {}
    by_pipe: dict[Any, int] = {rank.results: i for i, rank in enumerate(ranks)}
    while blocking - outcomes.keys():
        missing = [pipe for pipe, i in by_pipe.items() if i not in outcomes]
        ready = wait(missing, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            outcomes[by_pipe[pipe]] = ranks[by_pipe[pipe]].outcome()
    for i, rank in enumerate(ranks):
        if i not in outcomes and i not in blocking:
            outcomes[i] = Outcome(failure="had not ended, and was not blocking")
        elif i not in outcomes:
            outcomes[i] = rank.hung("still running at the deadline")
    return [outcomes[i] for i in range(len(ranks))]


@functools.cache
def _store() -> TCPStore:
    """Return the store that serves all ranks, as torchrun's agent does."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _environment(size: int, namespaces: Sequence[str]) -> dict[str, str]:
    common = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": f"test-{os.getpid()}-{next(_runs)}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCH_RING_INIT_TIMEOUT": "20",
        "TORCH_RING_TIMEOUT": "40",
        "TORCH_RING_DIRECT_GRADIENT_BYTES": "64",  # both kinds of gradients in every model
        "OMP_NUM_THREADS": "1",
    }
    if namespaces:  # rank 0 serves, at its own address
        return common | {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": "29511"}
    return common | {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_store().port),
    }


def _rank_environment(rank: int, namespaces: Sequence[str]) -> dict[str, str]:
    if not namespaces:
        return {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    mine = [other for other, name in enumerate(namespaces) if name == namespaces[rank]]
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(mine.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(mine)),
        "GROUP_RANK": str(list(dict.fromkeys(namespaces)).index(namespaces[rank])),
    }


def _main(tasks: Connection, stacks: str) -> None:
    os.setpgid(0, 0)
    _libc().prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the tests
    multiprocessing.set_start_method("fork", force=True)  # as in a user's program: data loaders
    gc.freeze()  # garbage collection must not touch torch's objects, which would copy their pages
    with open(stacks, "w") as stacks_file:
        faulthandler.register(signal.SIGUSR1, stacks_file)
        environment = dict(os.environ)
        again = True
        while again:
            request = tasks.recv_bytes()
            try:
                task: _Task = pickle.loads(request)
                again = task.again
                os.environ.update(task.environment)
                if task.namespace is not None:
                    enter_namespace(task.namespace)
                # By value: the pipe's own way of sending tensors needs a sender that stays alive.
                message = pickle.dumps(Outcome(_call(task)))
            except BaseException:
                message = pickle.dumps(Outcome(failure=traceback.format_exc()))
            os.environ.clear()
            os.environ.update(environment)
            log = logging.getLogger("torch_ring")  # the next test's init() sets it up
            log.handlers.clear()
            log.setLevel(logging.NOTSET)
            tasks.send_bytes(message)
        tasks.close()
        # As at the end of the interpreter: tests cover torch_ring's shutdown, too.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _call(task: _Task) -> Any:
    import torch

    import torch_ring as hvd

    torch.set_num_threads(1)
    if task.initialized:
        hvd.init()
    value = task.fn(*task.args)
    if task.initialized:
        hvd.shutdown()
    if task.again:
        _forget_compiled()
        gc.collect()  # cycles that the test has left: optimizers, hooks, buckets
        _require_no_group()
    return value


def _forget_compiled() -> None:
    """Forget what torch.compile has compiled here: a function is compiled only so often anew."""
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


def _require_no_group() -> None:
    """Raise if a program has left a group of torch.distributed behind, which the next would see."""
    groups: Any = sys.modules.get("torch_ring.c10d.groups")
    if groups is None:
        return
    names = [group.name for group in groups._groups]
    assert not names, f"the program has not destroyed its groups {names}"

    def has_world() -> bool:
        shared = (each for each in gc.get_objects() if type(each) is groups._SharedWorld)
        return any(each.users for each in shared)

    # A thread that was connecting a destroyed group leaves its world then.
    assert eventually(lambda: not has_world(), DEADLINE_S / 2), "a world of groups is left"


def enter_namespace(name: str) -> None:
    """Move this thread into a network namespace made by ``ip netns add``, with its /sys.

    Its own /sys, as ``ip netns exec`` mounts it, is where UCX looks for network interfaces.
    """
    libc, new_net, new_mounts = _libc(), 0x40000000, 0x00020000
    slave, recursive, detach = 1 << 19, 1 << 14, 2
    with open(f"/var/run/netns/{name}") as file:
        results = [
            libc.setns(file.fileno(), new_net),
            libc.unshare(new_mounts),
            libc.mount(b"none", b"/", None, slave | recursive, None),
            libc.umount2(b"/sys", detach),
            libc.mount(name.encode(), b"/sys", b"sysfs", 0, None),
        ]
    if any(results):
        raise OSError(ctypes.get_errno(), f"setns({name}): {results}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
