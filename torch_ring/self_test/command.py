"""main: the command ``python -m torch_ring``, and its report in words."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import Any

from torch_ring.config import Config
from torch_ring.errors import InvalidArgumentError, first_line
from torch_ring.self_test import machine
from torch_ring.self_test.rank import run_ranks
from torch_ring.setup.launchers import discover

__all__ = ["main", "run_in_words"]

Facts = dict[str, Any]


def facts_in_words(report: Facts) -> str:
    """Return all parts but the runs."""
    lines = [
        f"torch_ring {report['torch_ring']['version']}: self-test (put all of it in a bug report)",
        *_software(report),
        *_machine(report["machine"], report["limits"]),
        *_launchers(report["launchers"]),
        *_settings(report["settings"], report["network"]),
        *_gpus(report["nccl"], report["gpus"]),
    ]
    return "\n".join(lines)


def run_in_words(run: Facts) -> str:
    """Return the part of one run."""
    head = f"{run['ranks']} ranks, {run['asked_transport']}"
    # Of a run that went well only why it did not use shared memory.
    shown = [line for line in run["log"] if run["failure"] or "no shared memory" in line]
    lines = [_row("", line) for line in shown]
    if run["failure"]:
        return "\n".join([_row(head, f"FAILED: {run['failure']}"), *lines])
    lines.insert(0, _row(head, f"allreduce is right, by {run['transport']}"))
    for row in run["allreduce"]:
        text = f"torch_ring {_time(row['torch_ring_us'])}, {row['torch_ring_gb_s']:.3g} GB/s"
        if "gloo_us" in row:
            text += f"; gloo {_time(row['gloo_us'])}, {row['gloo_gb_s']:.3g} GB/s"
            text += f"; torch_ring is {row['gloo_over_torch_ring']:.3g} times as fast"
        lines.append(_row(f"  {_size(row['bytes'])}", text))
    if run["gloo_problem"]:
        lines.append(_row("  gloo", f"not compared: {run['gloo_problem']}"))
    return "\n".join(lines)


def _software(report: Facts) -> list[str]:
    build, python = report["torch_ring"], report["python"]
    cuda = f"CUDA {python['torch_cuda']}" if python["torch_cuda"] else "no CUDA"
    gloo = "gloo" if python["torch_has_gloo"] else "no gloo"
    return [
        _row("native module", f"{build['native_module']}"),
        _row("", f"built for torch {build['built_for_torch']}; {', '.join(build['transports'])}"),
        _row("torch", f"{python['torch']}, {cuda}, {gloo}; {python['torch_path']}"),
        _row("Python", f"{python['python']}; {python['executable']}"),
    ]


def _machine(machine: Facts, limits: Facts) -> list[str]:
    quota, of_container = machine["cpus_of_container"], machine["memory_of_container_bytes"]
    cpus = f"{machine['cpus']} CPUs, {len(machine['cpus_allowed'])} allowed here"
    memory = _space(machine["memory_bytes"], machine["memory_available_bytes"])
    shm = _space(machine["dev_shm_bytes"], machine["dev_shm_free_bytes"])
    load = machine["load"]
    busy = load is not None and load > len(machine["cpus_allowed"])
    return [
        _row("system", f"{machine['system']}, glibc {machine['glibc'] or 'not known'}"),
        _row("processor", f"{machine['cpu']}, reduces with {machine['vector_instructions']}"),
        _row("", cpus + (f", the container may use {quota:g}" if quota else "")),
        _row("", f"load {_number(load)}" + ": busy, the times below say little" * busy),
        _row("memory", memory + (f", the container's {_bytes(of_container)}" * bool(of_container))),
        _row("/dev/shm", f"{shm} (DataLoader's workers use it, torch_ring does not)"),
        _row("huge pages", machine["huge_pages"] or "not known"),
        _row(
            "limits",
            f"{_limit(limits['open_files'])} open files: {_limit(limits['ranks_on_one_host'])} "
            f"ranks on one host, {_limit(limits['hosts_of_an_alltoall'])} hosts in an alltoall",
        ),
        _row(
            "",
            f"locked memory {_bytes(limits['locked_memory_bytes'])}, address space "
            f"{_bytes(limits['address_space_bytes'])}, processes {limits['processes'] or 'any'}",
        ),
    ]


def _launchers(launchers: Facts) -> list[str]:
    lines = [
        _row(name, f"{found['version']}; {found['path']}" if found else "not found")
        for name, found in launchers["found"].items()
    ]
    lines.append(_row("started by", launchers["started_by"]))
    return lines + [_row("", f"{n}={value}") for n, value in launchers["variables"].items()]


def _settings(settings: Facts, network: Facts) -> list[str]:
    made = "none: each world makes its own; on several hosts, set TORCH_RING_SECRET"
    address = network["problem"] or f"{network['interface']}, {network['address']}"
    return [
        _row("settings", "" if settings["variables"] else "none set"),
        *(_row("", f"{name}={value}") for name, value in settings["variables"].items()),
        _row("secret", "set" if settings["secret"] == "set" else made),
        _row("interface", f"{address} (of {', '.join(network['all'])})"),
    ]


def _gpus(nccl: Facts, gpus: Facts) -> list[str]:
    count = len(gpus["names"])
    lines = [
        _row("NCCL", nccl["problem"] or f"{nccl['version']}; {nccl['path']}"),
        _row("GPUs", gpus["problem"] or ", ".join(gpus["names"])),
    ]
    if count < 2:
        lines.append(_row("", f"not tested here: an allreduce by NCCL takes 2 GPUs, not {count}"))
    return lines


def _row(name: str, text: str) -> str:
    return f"{name:<15} {text}".rstrip()


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.1f}"


def _limit(limit: int | None) -> str:
    return "any number of" if limit is None else str(limit)


def _space(size: int | None, free: int | None) -> str:
    if size is None or free is None:
        return "not known"
    return f"{_bytes(size)}, {_bytes(free)} free"


def _bytes(count: int | None) -> str:
    if count is None:
        return "no limit"
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.4g} GiB"


def _size(count: int) -> str:
    return f"{count >> 20} MB" if count >= 1 << 20 else f"{count >> 10} KB"


def _time(microseconds: float) -> str:
    return f"{microseconds:.3g} us" if microseconds < 1000 else f"{microseconds / 1000:.3g} ms"


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
        "torch_ring": machine.build(),
        "python": machine.python(),
        "machine": machine.machine(),
        "limits": machine.limits(config.connections),
        "launchers": machine.launchers(),
        "settings": machine.settings(config),
        "network": machine.network(config),
        "nccl": machine.nccl(config),
        "gpus": machine.gpus(),
    }
