"""main: the command ``python -m torch_ring``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import Any

from torch_ring.config import Config
from torch_ring.errors import InvalidArgumentError, first_line
from torch_ring.rendezvous.launchers import discover
from torch_ring.self_test import software
from torch_ring.self_test.local_ranks import run_ranks
from torch_ring.self_test.machine import limits, machine
from torch_ring.self_test.report import facts_in_words, run_in_words

__all__ = ["main"]

# As shells count: 128 and the signal.
_INTERRUPTED = 128 + signal.SIGINT
_ENDED = 128 + signal.SIGTERM
_UNREAD = 128 + signal.SIGPIPE


def main(arguments: list[str] | None = None) -> int:
    """Run the self-test; return 0 if it has passed, 1 if not, more if it was ended by a signal."""
    args = _parse(arguments)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_ENDED))  # it ends its ranks first
    try:
        if _is_not_first():
            return 0  # under a launcher one process is enough
        return _run(args)
    except BrokenPipeError:  # `| head`; what else is written must not fail at exit, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD
    except KeyboardInterrupt:
        print("torch_ring: the self-test was interrupted", file=sys.stderr)
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m torch_ring",
        description="Says what this machine can do with torch_ring, and tries it on local ranks. "
        "Put its output in a bug report.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--ranks",
        type=_count,
        default=2,
        metavar="N",
        help="the number of ranks to start; default: 2",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="the deadline of each of the runs; default: 60",
    )
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, 2 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of seconds, 1 to 3600")
    return seconds


def _is_not_first() -> bool:
    try:
        return discover().rank != 0
    except InvalidArgumentError:  # the report says it
        return False


def _run(args: argparse.Namespace) -> int:
    problems: list[str] = []
    try:
        config = Config.from_environment()
    except InvalidArgumentError as error:
        config = Config()
        problems.append(first_line(error))
    report = _facts(config)
    if not args.json:
        print(facts_in_words(report), flush=True)

    runs: list[dict[str, Any]] = []
    gpus = len(report["gpus"]["names"])
    wanted = [("auto", args.ranks, "cpu"), ("tcp", args.ranks, "cpu")]
    if gpus >= 2:
        wanted.append(("auto", min(gpus, args.ranks), "cuda"))
    for transport, ranks, device in [] if problems else wanted:
        run = run_ranks(ranks, transport, args.timeout, device)
        runs.append(run)
        if not args.json:
            print(run_in_words(run), flush=True)
    problems += [
        f"{run['ranks']} local ranks with TORCH_RING_TRANSPORT={run['asked_transport']}: "
        f"{run['failure']}"
        for run in runs
        if run["failure"]
    ]

    report |= {"runs": runs, "problems": problems, "passed": not problems}
    if args.json:
        print(json.dumps(report, indent=1), flush=True)
    else:
        print(f"self-test FAILED: {problems[0]}" if problems else "self-test passed", flush=True)
    return 1 if problems else 0


def _facts(config: Config) -> dict[str, Any]:
    return {
        "torch_ring": software.build(),
        "python": software.python(),
        "machine": machine(),
        "limits": limits(config.connections),
        "launchers": software.launchers(),
        "settings": software.settings(config),
        "network": software.network(config),
        "nccl": software.nccl(config),
        "gpus": software.gpus(),
    }
