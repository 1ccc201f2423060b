# SPDX-License-Identifier: Apache-2.0
"""main: the command ``python -m torch_ring``, which prints facts and tries local ranks."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import Any

from torch_ring.config import Config
from torch_ring.errors import InvalidArgumentError, first_line
from torch_ring.self_test.machine import facts
from torch_ring.self_test.rank import run_launched, run_ranks
from torch_ring.setup.launchers import discover

__all__ = ["main"]

Facts = dict[str, Any]

# Exit codes as in a shell: 128 plus the signal.
_INTERRUPTED = 128 + signal.SIGINT
_ENDED = 128 + signal.SIGTERM
_UNREAD = 128 + signal.SIGPIPE


def main(arguments: list[str] | None = None) -> int:
    """Run the self-test; return 0 if it has passed, 1 if not, more if it was ended by a signal."""
    args = _parse(arguments)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_ENDED))  # to end the ranks first
    try:
        is_first = not _is_not_first()
        if args.launched:
            return _run_launched(args, is_first)
        return _run(args) if is_first else 0  # under a launcher one process is enough
    except BrokenPipeError:  # `| head`: the flush at exit must not fail, too
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
        description="Shows the capabilities of torch_ring on this machine, and tries it on local "
        "ranks. Put its output in a bug report.",
    )
    version = sys.modules["torch_ring"].__version__
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    ranks_help = "the number of ranks to start; default: 2"
    parser.add_argument("--ranks", type=_count, default=2, metavar="N", help=ranks_help)
    launched_help = "try the ranks that a launcher has started, on all hosts, in place of own ones"
    parser.add_argument("--launched", action="store_true", help=launched_help)
    timeout_help = "the deadline of each of the runs; default: 60"
    parser.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="SECONDS", help=timeout_help
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
    except InvalidArgumentError:  # the report has the error
        return False


def _run(args: argparse.Namespace) -> int:
    problems: list[str] = []
    try:
        config = Config.from_environment()
    except InvalidArgumentError as error:
        config = Config()
        problems.append(first_line(error))
    report = facts(config)

    def say(line: str) -> None:
        if not args.json:
            print(line, flush=True)

    say(f"torch_ring {report['torch_ring']['version']}: self-test (put all of it in a bug report)")
    say("\n".join(_in_words(report)))
    runs = []
    wanted = [("auto", args.ranks, "cpu"), ("tcp", args.ranks, "cpu")]
    if config.network != "tcp":
        wanted.append(("ucx", args.ranks, "cpu"))
    gpus = len(report["gpus"]["names"])
    if gpus >= 2:
        wanted.append(("auto", min(gpus, args.ranks), "cuda"))
    else:
        say(f"not tested here: an allreduce by NCCL takes 2 GPUs, not {gpus}")
    for transport, ranks, device in [] if problems else wanted:
        run = run_ranks(ranks, transport, args.timeout, device)
        runs.append(run)
        say(run_in_words(run))
        if run["failure"]:
            setting = "NETWORK" if transport == "ucx" else "TRANSPORT"
            with_setting = f"{ranks} local ranks with TORCH_RING_{setting}={transport}"
            problems.append(f"{with_setting}: {run['failure']}")

    report |= {"runs": runs, "problems": problems, "passed": not problems}
    if args.json:
        print(json.dumps(report, indent=1), flush=True)
    say(f"self-test FAILED: {problems[0]}" if problems else "self-test passed")
    return 1 if problems else 0


def _run_launched(args: argparse.Namespace, is_first: bool) -> int:
    """Run as one of the launched ranks; the first prints."""
    run: Facts = {}
    problem = None
    try:
        run = run_launched()
    except RuntimeError as error:  # includes RingError
        problem = first_line(error)
    if is_first and args.json:
        runs = [run] if run else []
        found = {"runs": runs, "problems": [problem] if problem else [], "passed": not problem}
        print(json.dumps(found, indent=1), flush=True)
    elif is_first:
        if run:
            print(run_in_words(run))
        print(f"self-test FAILED: {problem}" if problem else "self-test passed", flush=True)
    return 1 if problem else 0


def _in_words(facts: Facts, indent: str = "") -> list[str]:
    """Return the facts as lines ``name  value``, with nested facts below their name."""
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{name}", *_in_words(value, indent + "  ")]
            continue
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        lines.append(_row(indent + name, value or "none"))
    return lines


def run_in_words(run: Facts) -> str:
    """Return the lines of one run."""
    head = f"{run['ranks']} ranks, {run['asked_transport']}"
    if run["failure"]:
        lines = [_row(head, f"FAILED: {run['failure']}")]
        return "\n".join(lines + [_row("", line) for line in run["log"]])
    lines = [_row(head, f"allreduce is right, by {run['transport']}")]
    lines += [_row("", line) for line in run["log"] if "no shared memory" in line]
    for row in run["allreduce"]:
        ours, text = row["torch_ring_us"], f"torch_ring {row['torch_ring_us']:.4g} us"
        if row["bytes"] >= 1 << 20:  # the bus bandwidth of nccl-tests
            rate = row["bytes"] * 2 * (1 - 1 / run["ranks"]) / ours / 1e3
            text += f" ({rate:.3g} GB/s)"
        if gloo := row.get("gloo_us"):
            text += f"; gloo {gloo:.4g} us; torch_ring is {gloo / ours:.3g} times as fast"
        lines.append(_row(f"  {row['bytes'] >> 10} KB", text))
    if run["gloo_problem"]:
        lines.append(_row("  gloo", f"not compared: {run['gloo_problem']}"))
    return "\n".join(lines)


def _row(name: str, value: object) -> str:
    return f"{name:<26} {value}"
