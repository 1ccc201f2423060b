"""variables_set, misspelt, ...: what else is to be known of the environment than the settings."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

from torch_ring.config.settings import SETTINGS

__all__ = [
    "failpoints",
    "let_ddp_ask_for_memory",
    "misspelt",
    "nccl_is_blocking",
    "threads_are_chosen",
    "variables_set",
]

_OF_BUILDS = "TORCH_RING_NATIVE_MODULES"  # setup.py reads it
_OF_TESTS = "TORCH_RING_FAIL"
_OF_LAUNCHER = {"TORCH_RING_RUN_ID", "TORCH_RING_PROCESS"}  # for rendezvous/launchers.py


def variables_set(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of torch_ring and of Horovod that are set, to be shown to anybody.

    A secret is not among them: only settings have their values, since TORCH_RING_SERCET has one.
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
    """Return which variables look like settings and are none, in one line; None: none of them.

    Their values are not shown: TORCH_RING_SERCET has a secret.
    """
    known = {setting.variable for setting in SETTINGS}
    found = []
    for variable in sorted(environment.keys() - known - {_OF_BUILDS, _OF_TESTS} - _OF_LAUNCHER):
        if variable.startswith("TORCH_RING_"):
            meant = difflib.get_close_matches(variable, known, n=1, cutoff=0.8)
            found.append(variable + (f" (do you mean {meant[0]}?)" if meant else ""))
    return f"no setting of torch_ring, ignored: {', '.join(found)}" if found else None


def failpoints(environment: Mapping[str, str] = os.environ) -> str:
    """Return where a test wants this process to fail (CONTRIBUTING.md); "" for nowhere."""
    return environment.get(_OF_TESTS, "")


def let_ddp_ask_for_memory() -> None:
    """Let torch's DDP ask a backend for the memory of its buckets, unless a user has decided it."""
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")  # torch's default is 1


def nccl_is_blocking(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether NCCL's own variable makes its communicators blocking: without a deadline."""
    return environment.get("NCCL_COMM_BLOCKING", "0") != "0"


def threads_are_chosen(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a user, or a launcher, has said with how many threads a rank computes."""
    return any(environment.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
