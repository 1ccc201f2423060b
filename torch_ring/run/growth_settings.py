"""GrowthSettings: the options of jobs whose ranks and hosts change."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from torch_ring.errors import InvalidArgumentError
from torch_ring.run.option_values import count, count_or_zero, seconds

__all__ = ["GrowthSettings", "add_growth_options", "growth_settings"]


@dataclass(frozen=True)
class GrowthSettings:
    """What becomes of a job when ranks fail, and when hosts come and go.

    Attributes:
        least: the fewest ranks that go on when others have failed; None: none may fail.
        most: the most ranks to which the job grows; None: no limit with a script, and without one
            ranks that fail are not replaced.
        script: a command that prints the hosts there are; None: they stay the same.
        slots_per_host: of hosts for which the script gives no number.
        reset_limit: how often the ranks may change; None: no limit.
        cooldown_s: the shortest and the longest time for which a host is left out whose ranks keep
            failing; None: for good, and only with a script.
        standbys: processes that wait with torch imported, to take the place of a rank.
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
        """Return the variables that tell the ranks."""
        counts = {"TORCH_RING_MIN_RANKS": self.least, "TORCH_RING_MAX_RANKS": self.most}
        return {name: str(number) for name, number in counts.items() if number is not None}

    def check(self, size: int) -> None:
        """Raise InvalidArgumentError if a job cannot begin with so many ranks."""
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
