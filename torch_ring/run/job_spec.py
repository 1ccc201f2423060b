"""JobSpec: what a job runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_ring.run.assignment import Slot
from torch_ring.run.growth_settings import GrowthSettings

__all__ = ["JobSpec"]


@dataclass(frozen=True)
class JobSpec:
    """What a job runs.

    Attributes:
        slots: of the ranks with which it begins, by rank.
        command: of each rank.
        environment: of the launcher, without the variables of launchers.
        folder: in which the ranks start.
        secret: by which the ranks know one another.
        interface, variables, unset: as in `JobFacts`.
        start_timeout_s: for all hosts to be reached.
        growth: what becomes of it when ranks fail, and when hosts come and go.
        given: what each rank reads from standard input.
        has_result: whether a rank gets the number of a descriptor, as its last argument, to which
            it writes its result.
        is_verbose: whether more is said.
    """

    slots: Sequence[Slot]
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    secret: str = field(repr=False)
    interface: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()
    start_timeout_s: float = 30.0
    growth: GrowthSettings = field(default_factory=GrowthSettings)
    given: bytes = field(default=b"", repr=False)
    has_result: bool = False
    is_verbose: bool = False
