"""The settings: the only place that reads TORCH_RING_* from the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_ring.errors import InvalidArgumentError

__all__ = ["Config"]

_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Config:
    """The settings of a world; see `SETTINGS` for the variables behind them."""

    transport: str = "auto"
    timeout_s: float = 300.0
    init_timeout_s: float = 120.0
    heartbeat_timeout_s: float = 60.0
    stall_warning_s: float = 60.0
    fusion_threshold_bytes: int = 64 << 20
    fusion_window_s: float = 0.001
    bucket_bytes: int = 25 << 20
    interface: str = ""
    secret: str = ""
    log_level: str = "info"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Config:
        """Read the settings.

        Raises:
            InvalidArgumentError: a variable has a value that it cannot have; names all three.
        """
        values: dict[str, Any] = {}
        for setting in SETTINGS:
            for variable, parse in ((setting.variable, setting.parse), *setting.aliases):
                text = environment.get(variable, "").strip()
                if text:
                    values[setting.field] = _parsed(variable, text, parse)
                    break
        return cls(**values)


@dataclass(frozen=True)
class Setting:
    """One field of `Config`, its variable, and what else sets it when that is unset."""

    field: str
    variable: str
    parse: Callable[[str], Any]
    meaning: str
    aliases: tuple[tuple[str, Callable[[str], Any]], ...] = ()


def _parsed(variable: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{variable}={text!r}: {error}") from None


def _number(minimum: float, factor: float = 1.0) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"must be a number of at least {minimum:g}") from None
        if not minimum <= value < float("inf"):
            raise ValueError(f"must be a number of at least {minimum:g}")
        return value * factor

    return parse


def _bytes(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("must be a whole number of bytes, 0 or more")
    return int(text)


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text.lower()

    return parse


def _horovod_level(text: str) -> str:
    level = _one_of(*_LEVELS, "trace", "fatal")(text)
    return {"trace": "debug", "fatal": "error"}.get(level, level)


def _disables_stall_check(text: str) -> float:
    return Config.stall_warning_s if text.lower() in ("0", "false") else 0.0


SETTINGS = (
    Setting(
        "transport",
        "TORCH_RING_TRANSPORT",
        _one_of("auto", "shm", "tcp"),
        "auto: shared memory inside hosts, TCP between them; shm: one host or an error; "
        "tcp: between all ranks",
    ),
    Setting(
        "timeout_s",
        "TORCH_RING_TIMEOUT",
        _number(0.1),
        "seconds without progress after which a collective fails",
    ),
    Setting(
        "init_timeout_s", "TORCH_RING_INIT_TIMEOUT", _number(0.1), "seconds that init() may take"
    ),
    Setting(
        "heartbeat_timeout_s",
        "TORCH_RING_HEARTBEAT_TIMEOUT",
        _number(0.1),
        "seconds of silence after which a process is given up (stopped, or cut off)",
    ),
    Setting(
        "stall_warning_s",
        "TORCH_RING_STALL_WARNING",
        _number(0.0),
        "seconds after which a late rank is named in the log; 0: never",
        (
            ("HOROVOD_STALL_CHECK_TIME_SECONDS", _number(0.0)),
            ("HOROVOD_STALL_CHECK_DISABLE", _disables_stall_check),
        ),
    ),
    Setting(
        "fusion_threshold_bytes",
        "TORCH_RING_FUSION_THRESHOLD",
        _bytes,
        "bytes of asynchronous allreduces that travel as one",
        (("HOROVOD_FUSION_THRESHOLD", _bytes),),
    ),
    Setting(
        "fusion_window_s",
        "TORCH_RING_FUSION_WINDOW",
        _number(0.0, 1e-3),
        "milliseconds for which asynchronous operations are collected, unless somebody waits",
        (("HOROVOD_CYCLE_TIME", _number(0.0, 1e-3)),),
    ),
    Setting(
        "bucket_bytes",
        "TORCH_RING_BUCKET_BYTES",
        _bytes,
        "bytes of gradients that DistributedOptimizer reduces together",
    ),
    Setting(
        "interface",
        "TORCH_RING_INTERFACE",
        str,
        "network interface, by name or address, for connections between hosts",
    ),
    Setting(
        "secret",
        "TORCH_RING_SECRET",
        str,
        "what ranks prove to one another to know; made by rank 0 if unset",
    ),
    Setting(
        "log_level",
        "TORCH_RING_LOG_LEVEL",
        _one_of(*_LEVELS),
        "debug, info, warning or error",
        (("HOROVOD_LOG_LEVEL", _horovod_level),),
    ),
)
