# SPDX-License-Identifier: Apache-2.0
"""parse_options: parses the command line of ``python -m torch_ring.run``, as horovodrun's."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_ring.config import SETTINGS
from torch_ring.errors import InvalidArgumentError
from torch_ring.run.numa import MODES

__all__ = [
    "DEFAULT_GRACE_S",
    "GrowthSettings",
    "Options",
    "changes_nothing",
    "count",
    "growth_settings",
    "parse_options",
    "seconds",
    "start_timeout_of",
]


def count(text: str) -> int:
    """Return a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, 1 or more")
    return int(text)


def count_or_zero(text: str) -> int:
    """Return a whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, 0 or more")
    return int(text)


def seconds(text: str) -> float:
    """Return a number of seconds above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of seconds above 0")
    return number


@dataclass(frozen=True)
class GrowthSettings:
    """Settings of a job whose ranks may fail, and whose hosts may come and go.

    Attributes:
        least: the fewest ranks that go on when others have failed; None: none may fail.
        most: the most ranks to which the job grows; None: no limit with a script; without one,
            failed ranks are not replaced.
        script: a command that prints the available hosts; None: the hosts stay the same.
        slots_per_host: the slots of hosts for which the script gives no number.
        reset_limit: the most changes of the ranks; None: no limit.
        cooldown_s: the shortest and the longest time for which a host is left out if its ranks keep
            failing; None: for good, and only with a script.
        standbys: the number of processes that wait with torch imported, to replace a rank.
    """

    least: int | None = None
    most: int | None = None
    script: str | None = None
    slots_per_host: int = 1
    reset_limit: int | None = None
    cooldown_s: tuple[float, float] | None = None
    standbys: int = 0

    @property
    def grows(self) -> bool:
        """Whether processes are started while the job runs."""
        return self.most is not None or self.script is not None

    def variables(self) -> Mapping[str, str]:
        """Return the variables by which the ranks get these settings."""
        counts = {"TORCH_RING_MIN_RANKS": self.least, "TORCH_RING_MAX_RANKS": self.most}
        return {name: str(number) for name, number in counts.items() if number is not None}

    def check(self, size: int) -> None:
        """Raise InvalidArgumentError if a job cannot begin with `size` ranks."""
        if self.least is not None and self.least > size:
            raise InvalidArgumentError(
                f"--min-np {self.least}: there are {size} ranks: begin with more (-np), "
                "or let fewer go on"
            )
        if self.most is not None and self.most < size:
            raise InvalidArgumentError(
                f"--max-np {self.most}: there are {size} ranks: begin with fewer (-np), or "
                "allow more"
            )


def add_growth_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    add = parser.add_argument_group(
        "elastic training", "For programs that use torch_ring.elastic."
    ).add_argument
    add(
        *("--min-np", "--min-num-proc"),
        type=count,
        help="ranks that go on when others have failed; default: none, or with "
        "--host-discovery-script -np",
    )
    add(
        *("--max-np", "--max-num-proc"),
        type=count,
        help="ranks that have failed are started again, and ranks on new hosts, up to this number",
    )
    add(
        "--host-discovery-script",
        metavar="COMMAND",
        help="prints a line `host` or `host:slots` for each host; is run every second",
    )
    add(
        *("--slots-per-host", "--slots"),
        type=count,
        metavar="N",
        help="of hosts for which the script gives no number; default: 1",
    )
    add(
        "--reset-limit",
        type=count_or_zero,
        metavar="N",
        help="end the job when its ranks change more often",
    )
    add(
        "--blacklist-cooldown-range",
        nargs=2,
        type=seconds,
        metavar=("MIN", "MAX"),
        help="seconds for which a host is left out whose ranks keep failing: MIN, and twice as "
        "long each time, up to MAX; default: for good",
    )
    add(
        "--standby",
        type=count,
        metavar="N",
        help="processes that wait with torch imported to take the place of a rank",
    )


def growth_settings(args: argparse.Namespace) -> GrowthSettings:
    """Return the settings of parsed options.

    Raises:
        InvalidArgumentError: an option lacks another one, or contradicts it.
    """
    least, most, script = args.min_np, args.max_np, args.host_discovery_script
    if script is not None:
        least = least or args.num_proc or 1
        if args.hosts is not None or args.hostfile is not None:
            raise InvalidArgumentError(
                "--host-discovery-script says which hosts there are: leave out -H and --hostfile"
            )
    elif args.slots_per_host is not None:
        raise InvalidArgumentError(
            "--slots-per-host needs --host-discovery-script; -H has slots itself"
        )
    elif most is not None and least is None:
        raise InvalidArgumentError(f"--max-np {most} needs --min-np")
    if least is not None and most is not None and least > most:
        raise InvalidArgumentError(f"--min-np {least} is more than --max-np {most}: lower it")
    if least is None and args.reset_limit is not None:
        raise InvalidArgumentError("--reset-limit needs --min-np")
    settings = GrowthSettings(
        least,
        most,
        script,
        args.slots_per_host or 1,
        args.reset_limit,
        args.blacklist_cooldown_range and tuple(args.blacklist_cooldown_range),
        args.standby or 0,
    )
    for option, value in (
        ("--standby", args.standby),
        ("--blacklist-cooldown-range", args.blacklist_cooldown_range),
    ):
        if value is not None and not settings.grows:
            raise InvalidArgumentError(f"{option} needs --max-np, or --host-discovery-script")
    shortest, longest = settings.cooldown_s or (0.0, 0.0)
    if shortest > longest:
        raise InvalidArgumentError(
            f"--blacklist-cooldown-range {shortest:g} {longest:g}: the first must not be more"
        )
    return settings


# Section -> prefix of its keys in the names of the options.
_SECTIONS = {
    "params": "",
    "autotune": "autotune_",
    "timeline": "timeline_",
    "stall_check": "stall_check_",
    "library_options": "",
    "logging": "log_",
}


def read_config(path: str) -> dict[str, Any]:
    """Return the values of options by their names, such as "cycle_time_ms".

    Raises:
        InvalidArgumentError: PyYAML or the file is missing, or the file has another format.
    """
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise InvalidArgumentError(
            "--config-file needs PyYAML: pip install pyyaml, or give the options one by one"
        ) from None
    try:
        text = Path(path).read_text()
        sections = yaml.safe_load(text) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgumentError(f"--config-file {path!r}: {error}") from None
    if not isinstance(sections, dict):
        raise InvalidArgumentError(f"--config-file {path!r}: must have sections, such as `params:`")
    values: dict[str, Any] = {}
    for section, content in sections.items():
        section = str(section).replace("-", "_")
        if section == "verbose":
            values["verbose"] = content
        elif section in _SECTIONS and isinstance(content, dict):
            for key, value in content.items():
                values |= _option(section, str(key).replace("-", "_"), value)
        elif section != "controller":  # torch_ring has only one
            raise InvalidArgumentError(
                f"--config-file {path!r}: {section!r} is not a section (they are "
                f"{', '.join(_SECTIONS)})"
            )
    return {name: value for name, value in values.items() if value is not None}


def _option(section: str, key: str, value: Any) -> dict[str, Any]:
    if key == "enabled":
        is_stall_check = section == "stall_check"
        return {"no_stall_check" if is_stall_check else section: value != is_stall_check}
    return {_SECTIONS[section] + key: value}


_DEFAULT_START_TIMEOUT_S = 30.0
DEFAULT_GRACE_S = 30.0


@dataclass(frozen=True)
class Options:
    """The options of a command line.

    Attributes:
        command: the command of each rank.
        size: the number of ranks; None: one for each slot.
        growth: the settings for failing ranks, and for hosts that come and go.
        hosts, hostfile: the hosts; None: those of the cluster's job in which this process runs, or
            this one.
        ssh_port, ssh_identity_file, ssh_arguments: the options of ssh for other hosts.
        start_timeout_s: the time limit for reaching all hosts.
        grace_s: the grace period for the ranks after SIGINT, SIGTERM or SIGHUP.
        requeues: whether Slurm runs the job again after SIGUSR1 or SIGUSR2.
        output_folder: a folder for the ranks' output; None: it is not kept.
        interface: the network interface for the ranks, or several with commas; empty: they choose.
        variables: the variables for the ranks; None stands for the launcher's value.
        with_time: whether to put the time before each line.
        is_verbose: whether to print more.
        shows: "build" or "version" to print only that; empty: run a job.
        notes: lines about options without effect.
        numa_binding: the mode of binding ranks to CPUs, one of numa.MODES; empty: no binding.
    """

    command: Sequence[str] = ()
    size: int | None = None
    growth: GrowthSettings = field(default_factory=GrowthSettings)
    hosts: str | None = None
    hostfile: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_arguments: tuple[str, ...] = ()
    start_timeout_s: float = _DEFAULT_START_TIMEOUT_S
    grace_s: float = DEFAULT_GRACE_S
    requeues: bool = False
    output_folder: str | None = None
    interface: str = ""
    variables: Mapping[str, str | None] = field(default_factory=dict)
    with_time: bool = False
    is_verbose: bool = False
    shows: str = ""
    notes: tuple[str, ...] = ()
    numa_binding: str = ""


@dataclass(frozen=True)
class _Tunable:
    """An option that becomes a variable of the ranks.

    `of_value` returns the text of the variable.
    """

    option: str
    variable: str
    kind: Callable[[str], Any] | None  # None: a switch
    of_value: Callable[[Any], str] = str


def _of_switch(value: Any) -> str:
    return "1" if value else "0"


_TUNABLES = (
    _Tunable(
        "--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", int, lambda mb: str(int(mb) << 20)
    ),
    _Tunable("--cycle-time-ms", "HOROVOD_CYCLE_TIME", float),
    _Tunable("--cache-capacity", "HOROVOD_CACHE_CAPACITY", int),
    _Tunable("--hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", None, _of_switch),
    _Tunable("--hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", None, _of_switch),
    _Tunable("--autotune", "HOROVOD_AUTOTUNE", None, _of_switch),
    _Tunable("--autotune-log-file", "HOROVOD_AUTOTUNE_LOG", str),
    _Tunable("--autotune-warmup-samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", int),
    _Tunable("--autotune-steps-per-sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", int),
    _Tunable("--autotune-bayes-opt-max-samples", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", int),
    _Tunable("--autotune-gaussian-process-noise", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", float),
    _Tunable("--timeline-filename", "HOROVOD_TIMELINE", str),
    _Tunable("--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", None, _of_switch),
    _Tunable("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", None, _of_switch),
    _Tunable("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", float),
    _Tunable("--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", float),
    _Tunable("--log-level", "HOROVOD_LOG_LEVEL", str),
    _Tunable("--log-with-timestamp", "HOROVOD_LOG_HIDE_TIME", None, lambda on: _of_switch(not on)),
    _Tunable("--mpi-threads-disable", "HOROVOD_MPI_THREADS_DISABLE", None, _of_switch),
    _Tunable("--num-nccl-streams", "HOROVOD_NUM_NCCL_STREAMS", int),
    _Tunable("--thread-affinity", "HOROVOD_THREAD_AFFINITY", int),
    _Tunable("--elastic-timeout", "TORCH_RING_ELASTIC_TIMEOUT", float),
    _Tunable("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", int),
)
_OPPOSITES = {  # the option that switches the other one off
    "--no-stall-check": ("--stall-check",),
    "--log-with-timestamp": ("--log-without-timestamp", "--log-hide-timestamp"),
}
_SAME = {"--log-with-timestamp": ("--no-log-hide-timestamp",)}
_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
# Options that choose among alternatives of which torch_ring has only one.
_WITHOUT_MEANING = {
    "--gloo": "the ranks find one another in one way only",
    "--mpi": "the ranks are started without MPI; mpirun starts them as well",
    "--jsrun": "the ranks are started by ssh",
    "--disable-cache": "nothing is cached",
    "--tcp": "TORCH_RING_TRANSPORT=tcp in --env has that meaning between ranks",
}
_WITHOUT_MEANING_VALUED = {
    "--mpi-args": "the ranks are started without MPI",
    "--binding-args": "ranks are not bound to cores",
}


def parse_options(
    arguments: Sequence[str] | None, environment: Mapping[str, str], prog: str
) -> Options:
    """Return the options of a command line, and of its configuration file.

    Raises:
        InvalidArgumentError: an option lacks another one; or the file or a value is wrong.
        SystemExit: as argparse, after it has printed the usage.
    """
    args = _parser(prog).parse_args(arguments)
    growth = growth_settings(args)
    config = read_config(args.config_file) if args.config_file else {}
    is_verbose = args.verbose or bool(config.pop("verbose", False))
    values = config | {name: each for name, each in args.tunables.items() if each is not None}
    variables: dict[str, str | None] = {}
    notes = [changes_nothing(option) for option in args.notes or ()]
    for tunable in _TUNABLES:
        value = values.pop(_name(tunable.option), None)
        if value is None:
            continue
        variables[tunable.variable] = _text_of(tunable, value)
        if not _is_read(tunable.variable) and value is not False:
            notes.append(f"{tunable.option} changes nothing: torch_ring has no use for it")
    if values:
        raise InvalidArgumentError(
            f"{args.config_file!r}: no option: {', '.join(sorted(values))}: --help lists them"
        )
    variables |= growth.variables()
    variables |= dict(_variable(text) for text in args.env or ())
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    return Options(
        command,
        args.num_proc,
        growth,
        args.hosts,
        args.hostfile,
        args.ssh_port,
        args.ssh_identity_file,
        tuple(shlex.split(args.ssh_args or "")),
        args.start_timeout or start_timeout_of(environment),
        args.grace_period or DEFAULT_GRACE_S,
        args.requeue,
        args.output_filename,
        ",".join(dict.fromkeys(name for each in args.nics or () for name in each.split(","))),
        variables,
        args.with_time,
        is_verbose,
        args.shows or "",
        tuple(notes),
        args.numa_binding,
    )


def changes_nothing(option: str) -> str:
    """Return the line about an option, or an argument of `run`, without effect."""
    reasons = _WITHOUT_MEANING | _WITHOUT_MEANING_VALUED
    name = "--" + option.lstrip("-").removeprefix("use_").replace("_", "-")
    return f"{option} changes nothing: {reasons[name]}"


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Starts the ranks of a job on this host and, by ssh, on others. Options are "
        "those of horovodrun.",
        epilog="The output of each rank comes with its number in front. If a rank fails, the "
        "others are ended, and its exit code is that of the job.",
    )
    show = parser.add_argument
    show("-v", "--version", dest="shows", action="store_const", const="version", help="say it")
    show(
        *("-cb", "--check-build"),
        dest="shows",
        action="store_const",
        const="build",
        help="show the build of torch_ring, and the libraries that it can use here",
    )
    add = parser.add_argument
    add("-np", "--num-proc", type=count, help="ranks; default: as many as there are slots")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "-H", "--hosts", help="host1:4,host2:4: hosts and their slots; default: this one"
    )
    where.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="lines such as `host1 slots=4`"
    )
    add("-p", "--ssh-port", type=count, help="of all hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="a private key")
    add("--ssh-args", metavar="WORDS", help='more for ssh, as in --ssh-args="-o User=me"')
    add("--start-timeout", type=seconds, metavar="S", help="to reach all hosts; default: 30")
    add(
        "--grace-period",
        type=seconds,
        metavar="S",
        help="after SIGINT, SIGTERM or SIGHUP, until the ranks are ended; default: 30",
    )
    add(
        "--requeue",
        action="store_true",
        help="after SIGUSR1 or SIGUSR2, when the ranks have stopped, let Slurm run the job again",
    )
    add("--output-filename", metavar="DIR", help="also write DIR/rank.N/stdout and stderr")
    add("--env", action="append", metavar="NAME[=VALUE]", help="a variable for all ranks")
    add(
        *("--network-interface", "--network-interfaces"),
        dest="nics",
        action="append",
        metavar="NAMES",
        help="that the ranks use",
    )
    add(
        *("-prefix-timestamp", "--prefix-output-with-timestamp"),
        dest="with_time",
        action="store_true",
        help="put the time in front of each line, too",
    )
    add(
        "--numa-binding",
        choices=MODES,
        default="",
        help="bind each rank to CPUs of a NUMA node, as torchrun does",
    )
    add("--config-file", metavar="FILE", help="options in YAML; those given here go first")
    add("--verbose", action="store_true", help="say which ranks start where, and how")
    _add_tunables(parser)
    _add_others(parser)
    add("command", nargs=argparse.REMAINDER, help="the command of each rank, and its arguments")
    return parser


def _add_tunables(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(tunables={})
    group = parser.add_argument_group(
        "settings of the ranks", "They become variables of Horovod, which torch_ring honours."
    )
    for tunable in _TUNABLES:
        name = _name(tunable.option)
        if tunable.kind is not None:
            levels = _LEVELS if tunable.option == "--log-level" else None
            group.add_argument(
                tunable.option, action=_StoreTunable, dest=name, type=tunable.kind, choices=levels
            )
            continue
        on = (tunable.option, *_SAME.get(tunable.option, ()))
        off = _OPPOSITES.get(tunable.option, (f"--no-{name.replace('_', '-')}",))
        group.add_argument(*on, action=_StoreTunable, dest=name, nargs=0, const=True)
        group.add_argument(
            *off, action=_StoreTunable, dest=name, nargs=0, const=False, help=argparse.SUPPRESS
        )


def _add_others(parser: argparse.ArgumentParser) -> None:
    add_growth_options(parser)
    group = parser.add_argument_group("of horovodrun", "These are accepted, and change nothing.")
    for option in _WITHOUT_MEANING:
        group.add_argument(option, action=_Remark, dest="notes", nargs=0)
    for option in _WITHOUT_MEANING_VALUED:
        group.add_argument(option, action=_Remark, dest="notes")


class _StoreTunable(argparse.Action):
    """Puts a value into the dictionary of tunables; the last of several values counts."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        value = self.const if self.nargs == 0 else values
        namespace.tunables = {**namespace.tunables, self.dest: value}


class _Remark(argparse.Action):
    """Remembers an option without effect."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,  # noqa: ARG002
        option_string: str | None = None,
    ) -> None:
        namespace.notes = [*(namespace.notes or ()), str(option_string)]


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _text_of(tunable: _Tunable, value: Any) -> str:
    """Return the text of a variable, after torch_ring's own check of it."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
        raise InvalidArgumentError(f"{tunable.option} {value}: must be 0 or more")
    try:
        return tunable.of_value(value)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"{tunable.option} {value!r}: must be a number") from None


def _is_read(variable: str) -> bool:
    return any(
        variable in (setting.variable, *(alias for alias, _ in setting.aliases))
        for setting in SETTINGS
    )


def _variable(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not name or "\0" in text:
        raise InvalidArgumentError(f"--env {text!r}: must be NAME or NAME=VALUE")
    return name, value if equals else None


def start_timeout_of(environment: Mapping[str, str]) -> float:
    """Return the default time limit for reaching hosts, in seconds."""
    text = environment.get("HOROVOD_START_TIMEOUT", "")
    try:
        return seconds(text) if text else _DEFAULT_START_TIMEOUT_S
    except argparse.ArgumentTypeError as error:
        raise InvalidArgumentError(f"HOROVOD_START_TIMEOUT={error}") from None
