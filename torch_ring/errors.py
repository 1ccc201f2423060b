"""The exceptions of torch_ring, typed by what the caller can do about them."""

from __future__ import annotations

import builtins

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "InvalidArgumentError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "RingError",
    "TimeoutError",
    "check_build",
    "first_line",
]


class RingError(RuntimeError):
    """A collective failed. Unless it is a MismatchError: shut down and init again, or exit."""


HorovodInternalError = RingError
"""Horovod's name for it."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  Horovod's name
    """The hosts of an elastic job have changed: Horovod's name, which handlers catch."""


class MismatchError(RingError):
    """The ranks asked for different things; no data was moved, and the job may go on."""


class PeerLostError(RingError):
    """A rank died, left early, or is not heard any more."""


class TimeoutError(RingError, builtins.TimeoutError):
    """A rank is alive and did not take part in time."""


class InvalidArgumentError(ValueError):
    """The program is wrong on this rank; nothing was sent."""


class NotInitializedError(ValueError, RuntimeError):
    """An operation was called before ``init()`` or after ``shutdown()``."""

    def __init__(self, what: str = "torch_ring has not been initialized: call init() first"):
        super().__init__(what)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message: that of a store or of torch may have thirty."""
    return str(error).partition("\n")[0]


_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps"


def build_problem(built_for: str, running: str) -> str | None:
    """Return why a module built for one torch version cannot run with another, in one line.

    Torch's C++ interface changes with every minor version, and only then.
    """
    if built_for.split(".")[:2] == running.split(".")[:2]:
        return None
    return (
        f"torch_ring was built for torch {built_for}, and this is torch {running}: rebuild it with "
        f"`{_REBUILD} .` in its source directory"
    )


def check_build() -> None:
    """Raise ImportError, in one line, if the native module does not fit the installed torch."""
    import torch

    try:
        from torch_ring._build import TORCH_VERSION
    except ImportError:
        raise ImportError(
            "torch_ring is not built: run `pip install --no-build-isolation .` in its source "
            "directory"
        ) from None
    problem = build_problem(TORCH_VERSION, torch.__version__)
    if problem is not None:
        raise ImportError(problem)
