# SPDX-License-Identifier: Apache-2.0
"""Config: the settings, read from the environment here and nowhere else."""

from __future__ import annotations

import contextlib
import difflib
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch_ring.config.words import WORLD, Words
from torch_ring.errors import InvalidArgumentError

__all__ = [
    "GROUPS",
    "SETTINGS",
    "Config",
    "Setting",
    "count",
    "failpoints",
    "file_path",
    "let_ddp_ask_for_memory",
    "let_programs_find_horovod",
    "misspelt",
    "nccl_host",
    "nccl_is_blocking",
    "number",
    "switch",
    "threads_are_chosen",
    "variables_set",
]

_MOST_CONNECTIONS = 64  # DataConnections::kChannels
LEVELS = ("debug", "info", "warning", "error")
MOST = 1e8  # seconds: the longest time that the engine can count


def number(minimum: float, factor: float = 1.0, most: float = MOST) -> Callable[[str], float]:
    """Return a reader of numbers from `minimum` to `most`, which it multiplies by `factor`."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = float(text)
            if minimum <= value <= most:
                return value * factor
        raise ValueError(f"must be a number from {minimum:g} to {most:g}")

    return parse


def byte_count(minimum: int) -> Callable[[str], int]:
    """Return a reader of whole numbers of bytes from `minimum` on."""

    def parse(text: str) -> int:
        if text.isdecimal() and minimum <= int(text) < 1 << 62:
            return int(text)
        raise ValueError(f"must be a whole number of bytes, {minimum} or more")

    return parse


def count(least: int, most: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        if text.isdecimal() and least <= int(text) <= most:
            return int(text)
        raise ValueError(f"must be a whole number from {least} to {most}")

    return parse


def one_of(*allowed: str) -> Callable[[str], str]:
    """Return a reader of words, in any case."""

    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text.lower()

    return parse


def switch(text: str) -> bool:
    """Read 0, 1, false or true."""
    return one_of("0", "1", "false", "true")(text) in ("1", "true")


def interfaces(text: str) -> str:
    """Read names or addresses of network interfaces, with commas between them."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError("must be names of network interfaces, with one comma between two")
    for name in names:
        if (times := names.count(name)) > 1:
            raise ValueError(f"must name each interface once, and names {name} {times} times")
    return ",".join(names)


def file_path(text: str) -> str:
    """Read the path of a file, which need not exist."""
    if text.endswith("/"):
        raise ValueError("must be the path of a file, not of a folder")
    return text


def horovod_level(text: str) -> str:
    """Read a level of Horovod's log."""
    level = {"trace": "debug", "fatal": "error"}.get(text.lower(), text.lower())
    return level if level in LEVELS else "warning"  # as Horovod


def disables_stall_check(text: str) -> float | None:
    """Read a switch; None leaves the setting as it is."""
    return 0.0 if switch(text) else None


def timeline_path(text: str) -> str | None:
    """Read the path of a timeline. Horovod's value DYNAMIC means that it starts later."""
    return None if text.upper() == "DYNAMIC" else text


_OF_BUILDS = "TORCH_RING_NATIVE_MODULES"  # setup.py reads it
_OF_TESTS = "TORCH_RING_FAIL"
_OF_LAUNCHER = {"TORCH_RING_RUN_ID", "TORCH_RING_PROCESS"}  # for setup/launchers.py


def variables_set(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of torch_ring and of Horovod that are set, to be shown to anybody.

    Secrets are hidden, and so is the value of any variable that is no setting: a misspelt
    TORCH_RING_SERCET would hold one.
    """
    shown = {v for s in SETTINGS if s.field != "secret" for v in (s.variable, *dict(s.aliases))}
    return {
        variable: environment[variable] if variable in shown else _hidden(variable)
        for variable in sorted(environment)
        if variable.startswith(("TORCH_RING_", "HOROVOD_"))
    }


def _hidden(variable: str) -> str:
    known = {setting.variable for setting in SETTINGS}
    return "(set, not shown)" if variable in known else "(not a setting of torch_ring)"


def misspelt(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a line that names variables which look like settings but are none; None: no such.

    It does not show their values: a misspelt TORCH_RING_SERCET would hold a secret.
    """
    known = {setting.variable for setting in SETTINGS}
    found = []
    for variable in sorted(environment.keys() - known - {_OF_BUILDS, _OF_TESTS} - _OF_LAUNCHER):
        if variable.startswith("TORCH_RING_"):
            meant = difflib.get_close_matches(variable, known, n=1, cutoff=0.8)
            found.append(variable + (f" (do you mean {meant[0]}?)" if meant else ""))
    return f"no setting of torch_ring, ignored: {', '.join(found)}" if found else None


def failpoints(environment: Mapping[str, str] = os.environ) -> str:
    """Return the places where a test wants this process to fail (CONTRIBUTING.md); "": none."""
    return environment.get(_OF_TESTS, "")


def let_ddp_ask_for_memory() -> None:
    """Make torch's DDP ask a backend for the memory of its buckets, unless the user has decided."""
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")  # torch's default is 1


def let_programs_find_horovod(
    folder: str, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Make Python processes with this environment find the module ``horovod`` in a folder."""
    path = environment.get("PYTHONPATH")
    others = [each for each in path.split(os.pathsep) if each != folder] if path else []
    environment["PYTHONPATH"] = os.pathsep.join([folder, *others])
    environment.setdefault("TORCH_RING_AS_HOROVOD", "1")


def nccl_is_blocking(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether NCCL's own variable makes its communicators blocking, without deadlines."""
    return environment.get("NCCL_COMM_BLOCKING", "0") != "0"


def nccl_host(environment: Mapping[str, str] = os.environ) -> str:
    """Return the host of this process for NCCL, which takes one rank for each GPU of a host.

    Ranks that share a GPU on purpose have a NCCL_HOSTID each. Empty: NCCL lets ranks share GPUs.
    """
    if environment.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0":
        return ""
    return environment.get("NCCL_HOSTID") or socket.gethostname()


def threads_are_chosen(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user or a launcher has set the number of a rank's compute threads."""
    return any(environment.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))


# Milliseconds. A longer window would delay operations that a program polls, also those of init().
_LONGEST_WINDOW = 1000.0


def setting(
    variable: str,
    default: Any,
    parse: Callable[[str], Any],
    meaning: str,
    aliases: tuple[tuple[str, Callable[[str], Any]], ...] = (),
    common: bool = False,
    group: str = "",
    is_secret: bool = False,
) -> Any:
    """Return a field of `Config` that is a `Setting`; `repr` leaves out a secret."""
    of = (variable, parse, meaning, aliases, common, group)
    return field(default=default, repr=not is_secret, metadata={"of": of})


@dataclass(frozen=True)
class Config:
    """The settings of a world, each with its variable, its default and its meaning."""

    transport: str = setting(
        "TORCH_RING_TRANSPORT",
        "auto",
        one_of("auto", "shm", "tcp"),
        "auto: shared memory inside hosts, TCP between them; shm: shared memory, an error on "
        "several hosts; tcp: TCP between all ranks",
        common=True,
        group="Transports",
    )
    network: str = setting(
        "TORCH_RING_NETWORK",
        "tcp",
        one_of("tcp", "ucx", "auto"),
        "transport of collectives' data between hosts, on CPUs: tcp, ucx, or auto, which is ucx "
        "where all ranks have RDMA and the same UCX (docs/rdma.md)",
        common=True,
    )
    interface: str = setting(
        "TORCH_RING_INTERFACE",
        "",
        interfaces,
        "name or address of the network interface that the job uses; several, as in eth0,eth1, "
        "share the data between hosts: equally many on each (docs/launching.md)",
    )
    connections: int = setting(
        "TORCH_RING_CONNECTIONS",
        1,
        count(1, _MOST_CONNECTIONS),
        "TCP connections between two ranks that exchange data, over each network interface; more "
        "than 1 if a single one does not fill it",
        common=True,
    )
    checksum: int = setting(
        "TORCH_RING_CHECKSUM",
        0,
        count(0, 1),
        "1: data between hosts carry a CRC-32C, and damaged ones are an error on all ranks",
        common=True,
    )
    tls: str = setting(
        "TORCH_RING_TLS",
        "0",
        one_of("0", "1", "cpu"),
        "1: all connections between ranks of several hosts are encrypted, by TLS 1.3 with the "
        "job's secret, and NCCL between hosts is refused; cpu: it is not (docs/security.md)",
        common=True,
    )
    ucx_library: str = setting(
        "TORCH_RING_UCX_LIBRARY",
        "",
        str,
        "path of libucp.so.0; if unset, that of the package libucx, or the system's",
    )
    nccl_library: str = setting(
        "TORCH_RING_NCCL_LIBRARY",
        "",
        str,
        "path of libnccl.so.2, or of librccl.so.1; if unset, the one that torch has loaded, or the "
        "system's",
    )
    timeout_s: float = setting(
        "TORCH_RING_TIMEOUT",
        0.0,
        number(0.0),
        "seconds after the last sign of progress of a late rank after which a collective fails; 0: "
        "never, as long as that rank lives (a transfer that has begun still fails after 300 s "
        "without a byte)",
        (("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", number(0.0)),),
        group="Deadlines",
    )
    init_timeout_s: float = setting(
        "TORCH_RING_INIT_TIMEOUT",
        120.0,
        number(0.1),
        "seconds that init() may take",
    )
    heartbeat_timeout_s: float = setting(
        "TORCH_RING_HEARTBEAT_TIMEOUT",
        60.0,
        number(0.1),
        "seconds of silence after which a rank counts as lost (its process is stopped, or its host "
        "cut off)",
        common=True,
    )
    stall_warning_s: float = setting(
        "TORCH_RING_STALL_WARNING",
        60.0,
        number(0.0),
        "seconds after which, again and again, a late rank is named in the log; 0: never",
        (
            ("HOROVOD_STALL_CHECK_DISABLE", disables_stall_check),
            ("HOROVOD_STALL_CHECK_TIME_SECONDS", number(0.0)),
        ),
    )
    exit_with_launcher: int = setting(
        "TORCH_RING_EXIT_WITH_LAUNCHER",
        1,
        count(0, 1),
        "1: a rank ends when its launcher (torchrun, mpirun, srun) has been killed; 0: it goes on",
    )
    secret: str = setting(
        "TORCH_RING_SECRET",
        "",
        str,
        "the same random text on all ranks, by which the hosts of a job know one another; without "
        "it (and without TORCH_RING_SECRET_FILE) any process that reaches the store of a job on "
        "several hosts can join it",
        is_secret=True,
        group="Secrets",
    )
    secret_file: str = setting(
        "TORCH_RING_SECRET_FILE",
        "",
        str,
        "path of a file that has the secret, if TORCH_RING_SECRET is unset; only its owner may "
        "read it (mode 0600), or it is mounted read-only",
    )
    trust_network: bool = setting(
        "TORCH_RING_TRUST_NETWORK",
        False,
        switch,
        "1: without a secret, objects of any class are taken from other hosts, whose pickles can "
        "run code; 0: only plain data",
        common=True,
    )
    bucket_bytes: int = setting(
        "TORCH_RING_BUCKET_BYTES",
        25 << 20,
        byte_count(1),
        "most bytes of gradients in a bucket, which DistributedOptimizer reduces together",
        common=True,
        group="Training",
    )
    direct_gradient_bytes: int = setting(
        "TORCH_RING_DIRECT_GRADIENT_BYTES",
        256 << 10,
        byte_count(0),
        "bytes from which on backward writes a gradient straight into the shared memory in which "
        "it is reduced, if all ranks are on one host; 0: all gradients are copied there",
        common=True,
    )
    nan_check: bool = setting(
        "TORCH_RING_NAN_CHECK",
        False,
        switch,
        "1: a DistributedOptimizer looks at each rank's gradients, and step() is an error on all "
        "ranks that names the first NaN or infinity (docs/errors.md); nan_check=... of an "
        "optimizer comes first",
        common=True,
    )
    check_every: int = setting(
        "TORCH_RING_CHECK_EVERY",
        0,
        count(0, 10**9),
        "number of steps after each of which a DistributedOptimizer checks that its parameters and "
        "its state are the same on all ranks; 0: never",
        common=True,
    )
    run_ahead: bool = setting(
        "TORCH_RING_RUN_AHEAD",
        True,
        switch,
        "1: backward passes on GPUs end without waiting for other hosts while they repeat "
        "themselves; 0: the ranks agree on each pass, and on each layer of SyncBatchNorm; "
        "run_ahead=... of an optimizer comes first",
        common=True,
    )
    autotune: bool = setting(
        "TORCH_RING_AUTOTUNE",
        False,
        switch,
        "1: DistributedOptimizer tries other sizes of buckets in its first steps, and keeps them "
        "if they are faster (docs/tuning.md)",
        (("HOROVOD_AUTOTUNE", switch),),
        common=True,
    )
    autotune_log: str = setting(
        "TORCH_RING_AUTOTUNE_LOG",
        "",
        str,
        "path of a CSV file to which rank 0 adds the sizes that it has considered",
        (("HOROVOD_AUTOTUNE_LOG", str),),
    )
    fusion_threshold_bytes: int = setting(
        "TORCH_RING_FUSION_THRESHOLD",
        64 << 20,
        byte_count(0),
        "most bytes of asynchronous allreduces that are fused into one; 0: none are fused",
        (("HOROVOD_FUSION_THRESHOLD", byte_count(0)),),
        common=True,
        group="Collectives",
    )
    fusion_window_s: float = setting(
        "TORCH_RING_FUSION_WINDOW",
        0.001,
        number(0.0, 1e-3, _LONGEST_WINDOW),
        "milliseconds for which asynchronous operations are collected, unless a thread waits for "
        "one",
        (("HOROVOD_CYCLE_TIME", number(0.0, 1e-3, _LONGEST_WINDOW)),),
    )
    elastic_timeout_s: float = setting(
        "TORCH_RING_ELASTIC_TIMEOUT",
        600.0,
        number(0.1),
        "seconds after a failure in which the surviving ranks of torch_ring.elastic must find one "
        "another",
        (("HOROVOD_ELASTIC_TIMEOUT", number(0.1)),),
        common=True,
        group="Elastic jobs",
    )
    min_ranks: int = setting(
        "TORCH_RING_MIN_RANKS",
        1,
        count(1, 10**6),
        "the fewest ranks with which torch_ring.elastic goes on",
        common=True,
    )
    as_gloo: bool = setting(
        "TORCH_RING_AS_GLOO",
        False,
        switch,
        "1: where a program asks torch.distributed for gloo, it gets ring "
        "(docs/torch-distributed.md)",
        group="Programs for other libraries",
    )
    as_horovod: str = setting(
        "TORCH_RING_AS_HOROVOD",
        "0",
        one_of("0", "1", "force"),
        "1: programs that torch_ring.run starts, and others once they have imported torch, find "
        "torch_ring where they import horovod, unless Horovod is installed; force: also then "
        "(docs/migrating-from-horovod.md)",
    )
    log_level: str = setting(
        "TORCH_RING_LOG_LEVEL",
        "info",
        one_of(*LEVELS),
        "debug, info, warning or error",
        (("HOROVOD_LOG_LEVEL", horovod_level),),
        group="Observing",
    )
    timeline: str = setting(
        "TORCH_RING_TIMELINE",
        "",
        timeline_path,
        "path of the file, on rank 0's host, into which a timeline of all ranks is written "
        "(docs/timeline.md); if unset, or DYNAMIC, there is none before start_timeline()",
        (("HOROVOD_TIMELINE", timeline_path),),
    )
    timeline_mark_cycles: bool = setting(
        "HOROVOD_TIMELINE_MARK_CYCLES",
        False,
        switch,
        "1: that timeline marks each round of agreement",
    )
    flight_dir: str = setting(
        "TORCH_RING_FLIGHT_DIR",
        "",
        str,
        "folder into which a rank writes its last operations with each RingError, and on "
        "SIGUSR2 (docs/tracing.md); if unset, none",
    )
    metrics_file: str = setting(
        "TORCH_RING_METRICS_FILE",
        "",
        file_path,
        "path of a file for the textfile collector of Prometheus' node exporter, into which each "
        "rank writes its counters every 15 s; {rank} in it is the rank, without which "
        "metrics.prom becomes metrics.rank0.prom (docs/tracing.md); if unset, none",
    )
    metrics_port: int = setting(
        "TORCH_RING_METRICS_PORT",
        0,
        count(0, 65535),
        "port on 127.0.0.1 at which local rank 0 serves its counters to Prometheus, local rank 1 "
        "at the next one, and so on (docs/tracing.md); 0: none",
    )
    directory: str = setting(
        "TORCH_RING_ELASTIC_DIRECTORY",
        "",
        str,
        "host:port at which torch_ring.run tells newcomers of an elastic job the addresses of its "
        "ranks; it sets this itself",
        group="Set by the launcher",
    )
    is_newcomer: bool = setting(
        "TORCH_RING_ELASTIC_NEWCOMER",
        False,
        switch,
        "1: this process was started for an elastic job that runs already; torch_ring.run sets it",
    )
    timeout_name: str = "TORCH_RING_TIMEOUT"  # its name in errors
    init_timeout_name: str = "TORCH_RING_INIT_TIMEOUT"  # likewise
    words: Words = WORLD  # of errors

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Config:
        """Read the settings.

        Raises:
            InvalidArgumentError: a variable's value is not allowed; names the variable, its value
                and the allowed values.
        """
        values: dict[str, Any] = {}
        for setting in SETTINGS:
            for variable, parse in ((setting.variable, setting.parse), *setting.aliases):
                text = environment.get(variable, "").strip()
                value = _parsed(variable, text, parse) if text else None
                if value is not None:
                    values[setting.field] = value
                    break
        config = cls(**values)
        if config.width > _MOST_CONNECTIONS:
            raise InvalidArgumentError(
                f"TORCH_RING_CONNECTIONS={config.connections} for each interface of "
                f"TORCH_RING_INTERFACE={config.interface!r}: there are at most "
                f"{_MOST_CONNECTIONS} connections between two ranks"
            )
        if config.network == "ucx" and config.tls != "0":
            raise InvalidArgumentError(
                f"TORCH_RING_NETWORK=ucx and TORCH_RING_TLS={config.tls}: UCX encrypts nothing; "
                "use tcp"
            )
        return config

    @property
    def width(self) -> int:
        """The number of TCP connections between two ranks, over all network interfaces."""
        return self.connections * (self.interface.count(",") + 1)

    def common(self) -> dict[str, Any]:
        """Return the settings that must be the same on all ranks, by variable."""
        return {s.variable: getattr(self, s.field) for s in SETTINGS if s.common}


@dataclass(frozen=True)
class Setting:
    """One field of `Config`, its variable, and the aliases to read when that is unset.

    `parse` returns None for a value that leaves the setting to the next alias.
    """

    field: str
    variable: str
    parse: Callable[[str], Any]
    meaning: str
    aliases: tuple[tuple[str, Callable[[str], Any]], ...] = ()
    common: bool = False  # must be the same on all ranks
    group: str = ""  # not empty: a heading of docs/settings.md, which it begins

    @property
    def default(self) -> str:
        """The default, as one would write it into the variable."""
        value = getattr(Config(), self.field)
        if isinstance(value, bool):
            return str(int(value))
        return f"{value / self.parse('1'):g}" if isinstance(value, float) else str(value)


def _parsed(variable: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{variable}={text!r}: {error}") from None


SETTINGS = tuple(
    Setting(each.name, *each.metadata["of"]) for each in fields(Config) if each.metadata
)

GROUPS: dict[str, list[Setting]] = {}  # by the headings of docs/settings.md
for _setting in SETTINGS:
    if _setting.group:
        GROUPS[_setting.group] = []
    GROUPS[list(GROUPS)[-1]].append(_setting)
