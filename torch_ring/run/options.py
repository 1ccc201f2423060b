# SPDX-License-Identifier: Apache-2.0
"""Options: the options of a job, of ``python -m torch_ring.run`` (as horovodrun's) and of `run`."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from torch_ring.config.settings import count, number
from torch_ring.errors import InvalidArgumentError
from torch_ring.run.numa import MODES

__all__ = ["Options", "changes_nothing", "meanings", "parse_options", "seconds"]


def _reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a reader whose errors argparse shows."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse


_count, _count_or_zero = _reader(count(1, 10**9)), _reader(count(0, 10**9))
seconds = _reader(number(0.001, most=1e6))


def _names(texts: list[str]) -> str:
    return ",".join(dict.fromkeys(name for text in texts for name in text.split(",")))


def _variables(texts: list[str]) -> dict[str, str | None]:
    """Return variables by name; None: the launcher's value."""
    found: dict[str, str | None] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or "\0" in text:
            raise InvalidArgumentError(f"--env {text!r}: must be NAME or NAME=VALUE")
        found[name] = value if equals else None
    return found


def _option(
    names: str,
    kind: Callable[[str], Any] | None = str,
    default: Any = None,
    *,
    elastic: bool = False,
    joined: Callable[[list[Any]], Any] | None = None,
    **more: Any,
) -> Any:
    """Return a field of `Options` that is an option of the command line.

    Args:
        names: its names.
        kind: reads its value; None: it is a switch.
        default: its value when it is not given.
        elastic: whether it is for elastic training.
        joined: returns its value from the values of each time that it is given, or from several
            words; None: the last one counts.
        more: more for argparse.
    """
    if kind is None:
        default, more = False, {"action": "store_true"}
    else:
        more |= {"type": kind} | ({} if joined is None or "nargs" in more else {"action": "append"})
    metadata = {"names": names.split(), "elastic": elastic, "joined": joined, "more": more}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """The options of a job: their meanings are those that --help shows, and the docs of `run`.

    Attributes:
        num_proc: the number of ranks; default: one for each slot of the hosts.
        hosts: hosts and their slots, as in host1:4,host2:4; default: those of the job of Slurm,
            Kubernetes, PBS or LSF in which the launcher runs, or this one.
        hostfile: a file with lines such as `host1 slots=4`, in place of hosts.
        ssh_port: the port of ssh on all other hosts.
        ssh_identity_file: the file of a private key for ssh.
        ssh_args: more for ssh, as in --ssh-args="-o User=me"
        start_timeout: seconds in which all hosts must be reached; default: HOROVOD_START_TIMEOUT,
            or 30.
        grace_period: seconds after SIGINT, SIGTERM or SIGHUP until the ranks are ended; default:
            30.
        requeue: after SIGUSR1 or SIGUSR2, when the ranks have stopped, Slurm runs the job again.
        output_filename: a folder for each rank's output, as in rank.3/stdout.
        env: variables for all ranks; without a value: the launcher's.
        network_interface: names of network interfaces that the ranks use, with commas; default:
            they choose.
        prefix_output_with_timestamp: put the time in front of each line.
        numa_binding: bind each rank to CPUs of a NUMA node, as torchrun does.
        verbose: say which ranks start where, and how.
        min_num_proc: the fewest ranks that go on when others have failed; default: none may fail,
            or with a script -np.
        max_num_proc: failed ranks are started again, and ranks on new hosts, up to this number of
            ranks.
        host_discovery_script: a command that prints a line `host` or `host:slots` for each
            available host, and is run every second; in place of hosts.
        slots: the slots of a host for which the script gives no number; default: 1.
        reset_limit: the job ends when its ranks change more often.
        cooldown_range: the shortest and the longest time in seconds for which a host is left out
            if its ranks keep failing; default: for good, and only with a script.
        standby: the number of processes that wait with torch imported to take the place of a rank.
        command: the command of each rank, and its arguments.
        variables: variables by which other options reach the ranks.
        notes: lines about options without effect.
        shows: "build" or "version" to print only that; empty: run a job.
    """

    num_proc: int | None = _option("-np --num-proc", _count)
    hosts: str | None = _option("-H --hosts")
    hostfile: str | None = _option("-hostfile --hostfile", metavar="FILE")
    ssh_port: int | None = _option("-p --ssh-port", _count)
    ssh_identity_file: str | None = _option("-i --ssh-identity-file", metavar="FILE")
    ssh_args: str = _option("--ssh-args", default="", metavar="WORDS")
    start_timeout: float | None = _option("--start-timeout", seconds, metavar="S")
    grace_period: float | None = _option("--grace-period", seconds, metavar="S")
    requeue: bool = _option("--requeue", None)
    output_filename: str | None = _option("--output-filename", metavar="DIR")
    env: Mapping[str, str | None] | None = _option(
        "--env", joined=_variables, metavar="NAME[=VALUE]"
    )
    network_interface: str = _option(
        "--network-interface --network-interfaces", default="", joined=_names, metavar="NAMES"
    )
    prefix_output_with_timestamp: bool = _option(
        "-prefix-timestamp --prefix-output-with-timestamp", None
    )
    numa_binding: str = _option("--numa-binding", default="", choices=MODES)
    verbose: bool = _option("--verbose", None)
    min_num_proc: int | None = _option("--min-np --min-num-proc", _count, elastic=True)
    max_num_proc: int | None = _option("--max-np --max-num-proc", _count, elastic=True)
    host_discovery_script: str | None = _option(
        "--host-discovery-script", elastic=True, metavar="COMMAND"
    )
    slots: int | None = _option("--slots-per-host --slots", _count, elastic=True, metavar="N")
    reset_limit: int | None = _option("--reset-limit", _count_or_zero, elastic=True, metavar="N")
    cooldown_range: tuple[float, float] | None = _option(
        "--blacklist-cooldown-range",
        seconds,
        elastic=True,
        nargs=2,
        joined=tuple,
        metavar=("MIN", "MAX"),
    )
    standby: int = _option("--standby", _count, 0, elastic=True, metavar="N")
    command: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    shows: str = ""

    @property
    def least(self) -> int | None:
        """The fewest ranks that go on when others have failed; None: none may fail."""
        if self.host_discovery_script is None:
            return self.min_num_proc
        return self.min_num_proc or self.num_proc or 1

    @property
    def grows(self) -> bool:
        """Whether processes are started while the job runs."""
        return self.max_num_proc is not None or self.host_discovery_script is not None

    def __post_init__(self) -> None:
        """Raise InvalidArgumentError if an option lacks another one, or contradicts it."""
        least, most, script = self.least, self.max_num_proc, self.host_discovery_script
        shortest, longest = self.cooldown_range or (0.0, 0.0)
        names_hosts = self.hosts is not None or self.hostfile is not None
        alone = "needs --max-np, or --host-discovery-script"
        for is_wrong, text in (
            (
                self.hosts is not None and self.hostfile is not None,
                "give hosts or a host file, and not both",
            ),
            (
                script is not None and names_hosts,
                "--host-discovery-script says which hosts there are: leave out -H and --hostfile",
            ),
            (
                script is None and self.slots is not None,
                "--slots-per-host needs --host-discovery-script; -H has slots itself",
            ),
            (most is not None and least is None, f"--max-np {most} needs --min-np"),
            (
                least is not None and most is not None and least > most,
                f"--min-np {least} is more than --max-np {most}: lower it",
            ),
            (least is None and self.reset_limit is not None, "--reset-limit needs --min-np"),
            (self.standby and not self.grows, f"--standby {alone}"),
            (self.cooldown_range and not self.grows, f"--blacklist-cooldown-range {alone}"),
            (
                shortest > longest,
                f"--blacklist-cooldown-range {shortest:g} {longest:g}: the first must not be more",
            ),
        ):
            if is_wrong:
                raise InvalidArgumentError(text)

    def check_size(self, size: int) -> None:
        """Raise InvalidArgumentError if a job cannot begin with `size` ranks."""
        least, most = self.least, self.max_num_proc
        if least is not None and least > size:
            raise InvalidArgumentError(
                f"--min-np {least}: there are {size} ranks: begin with more (-np), or let fewer "
                "go on"
            )
        if most is not None and most < size:
            raise InvalidArgumentError(
                f"--max-np {most}: there are {size} ranks: begin with fewer (-np), or allow more"
            )


def meanings() -> dict[str, str]:
    """Return the meaning of each field of `Options`, from its docstring."""
    _, _, attributes = (Options.__doc__ or "").partition("Attributes:")
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


# Section -> prefix of its keys in the names of the options.
_SECTIONS = {
    "params": "",
    "autotune": "autotune_",
    "timeline": "timeline_",
    "stall_check": "stall_check_",
    "library_options": "",
    "logging": "log_",
}


def _read_config(path: str) -> dict[str, Any]:
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
                name = _SECTIONS[section] + str(key).replace("-", "_")
                if key == "enabled":
                    name = section
                    if section == "stall_check":
                        name, value = "no_stall_check", not value
                values[name] = value
        elif section != "controller":  # torch_ring has only one
            raise InvalidArgumentError(
                f"--config-file {path!r}: {section!r} is not a section (they are "
                f"{', '.join(_SECTIONS)})"
            )
    return {name: value for name, value in values.items() if value is not None}


class _Tunable(NamedTuple):
    """An option that becomes a variable of the ranks."""

    option: str
    variable: str
    kind: Callable[[str], Any] | None  # reads its value; None: a switch
    of_value: Callable[[Any], str] = str  # returns the text of the variable


def _of_switch(value: Any) -> str:
    return "1" if value else "0"


_TUNABLES = (
    _Tunable(
        "--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", int, lambda mb: str(int(mb) << 20)
    ),
    _Tunable("--cycle-time-ms", "HOROVOD_CYCLE_TIME", float),
    _Tunable("--autotune", "HOROVOD_AUTOTUNE", None, _of_switch),
    _Tunable("--autotune-log-file", "HOROVOD_AUTOTUNE_LOG", str),
    _Tunable("--timeline-filename", "HOROVOD_TIMELINE", str),
    _Tunable("--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", None, _of_switch),
    _Tunable("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", None, _of_switch),
    _Tunable("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", float),
    _Tunable("--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", float),
    _Tunable("--log-level", "HOROVOD_LOG_LEVEL", str),
    _Tunable("--elastic-timeout", "TORCH_RING_ELASTIC_TIMEOUT", float),
)
_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
_NO_USE = "torch_ring has no use for it"
# Options of horovodrun without effect, and the reason; first switches, then those with a value.
_SWITCHES_WITHOUT_MEANING = {
    "--gloo": "the ranks find one another in one way only",
    "--mpi": "the ranks are started without MPI; mpirun starts them as well",
    "--jsrun": "the ranks are started by ssh",
    "--disable-cache": "nothing is cached",
    "--tcp": "TORCH_RING_TRANSPORT=tcp in --env has that meaning between ranks",
    "--hierarchical-allreduce": _NO_USE,
    "--hierarchical-allgather": _NO_USE,
    "--log-with-timestamp": _NO_USE,
    "--log-without-timestamp": _NO_USE,
    "--log-hide-timestamp": _NO_USE,
    "--mpi-threads-disable": _NO_USE,
}
_WITHOUT_MEANING = _SWITCHES_WITHOUT_MEANING | {
    "--mpi-args": "the ranks are started without MPI",
    "--binding-args": "ranks are not bound to cores",
    "--cache-capacity": _NO_USE,
    "--autotune-warmup-samples": _NO_USE,
    "--autotune-steps-per-sample": _NO_USE,
    "--autotune-bayes-opt-max-samples": _NO_USE,
    "--autotune-gaussian-process-noise": _NO_USE,
    "--num-nccl-streams": _NO_USE,
    "--thread-affinity": _NO_USE,
    "--gloo-timeout-seconds": _NO_USE,
}


def parse_options(arguments: Sequence[str] | None, prog: str) -> Options:
    """Return the options of a command line, and of its configuration file.

    Raises:
        InvalidArgumentError: an option lacks another one; or the file or a value is wrong.
        SystemExit: as argparse, after it has printed the usage.
    """
    given = vars(_parser(prog).parse_args(arguments))
    config_file = given.pop("config_file", None)
    config = _read_config(config_file) if config_file else {}
    values = config | {name: given.pop(name) for name in _NAMES & given.keys()}
    given["verbose"] = given.get("verbose", False) or bool(values.pop("verbose", False))
    notes = [changes_nothing(each) for each in _WITHOUT_MEANING if values.pop(_name(each), False)]
    variables = {
        each.variable: _text_of(each, values.pop(_name(each.option)))
        for each in _TUNABLES
        if _name(each.option) in values
    }
    if values:
        raise InvalidArgumentError(
            f"{config_file!r}: no option: {', '.join(sorted(values))}: --help lists them"
        )
    for each in fields(Options):
        if each.name in given and (joined := each.metadata.get("joined")):
            given[each.name] = joined(given[each.name])
    if given["command"][:1] == ["--"]:
        del given["command"][0]
    return Options(**given, variables=variables, notes=tuple(notes))


def changes_nothing(option: str) -> str:
    """Return the line about an option, or an argument of `run`, without effect."""
    name = "--" + option.lstrip("-").removeprefix("use_").replace("_", "-")
    return f"{option} changes nothing: {_WITHOUT_MEANING[name]}"


def _parser(prog: str) -> argparse.ArgumentParser:
    """Return a parser whose results have only the options that are given."""
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
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
    elastic = parser.add_argument_group(
        "elastic training", "For programs that use torch_ring.elastic."
    )
    texts = meanings()
    for each in fields(Options):
        if each.metadata:
            to = elastic if each.metadata["elastic"] else parser
            more = {"dest": each.name, "help": texts.get(each.name), **each.metadata["more"]}
            to.add_argument(*each.metadata["names"], **more)
    show("--config-file", metavar="FILE", help="options in YAML; those given here go first")
    _add_tunables(parser)
    group = parser.add_argument_group("of horovodrun", "These are accepted, and change nothing.")
    for option in _WITHOUT_MEANING:
        if option in _SWITCHES_WITHOUT_MEANING:
            _add_switch(group, option)
        else:
            group.add_argument(option)
    show("command", nargs=argparse.REMAINDER, help=texts.get("command"))
    return parser


def _add_tunables(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "settings of the ranks", "They become variables of Horovod, which torch_ring honours."
    )
    for tunable in _TUNABLES:
        if tunable.kind is None:
            _add_switch(group, tunable.option)
        else:
            levels = _LEVELS if tunable.option == "--log-level" else None
            group.add_argument(tunable.option, type=tunable.kind, choices=levels)


def _add_switch(group: Any, option: str) -> None:
    """Add a switch, and the one that undoes it."""
    undo = f"--no-{option[2:]}".replace("--no-no-", "--")
    group.add_argument(option, dest=_name(option), action="store_true")
    group.add_argument(undo, dest=_name(option), action="store_false", help=argparse.SUPPRESS)


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


_NAMES = {_name(each) for each in (*_WITHOUT_MEANING, *(each.option for each in _TUNABLES))}
