# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark among several hosts: network namespaces, joined by veth. Needs root.

    python benchmarks/hosts.py --hosts 2 --json benchmarks/results/hosts-2.json
    python benchmarks/hosts.py --hosts 3 --rate 1gbit -- --collective allreduce --max-bytes 1048576
    python benchmarks/hosts.py --program training_step.py -- --models resnet18
    python benchmarks/hosts.py --interfaces 2 --rate 100mbit -- --collective allreduce
    python benchmarks/hosts.py --network ucx -- --collective allreduce
    python benchmarks/hosts.py --network tls -- --collective allreduce

Arguments after -- go to the program. With --network ucx it runs over TCP, then over UCX, and the
rows of collectives.py have both; with --network tls over TCP in the clear, then with
TORCH_RING_TLS. Before and after
it, the bare traffic is measured without any library: all hosts send to the next at once, over each
of their interfaces, with iperf3, or else plain_sockets.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import namespaces
from namespaces import Host

HERE = Path(__file__).parent
PORT = 29533
DEADLINE_S = 3600  # of the program; a hanging collective fails long before
PROGRAMS = ("collectives.py", "training_step.py", "sharded_step.py", "slow_links.py")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", choices=PROGRAMS, default=PROGRAMS[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--interfaces", type=int, default=1, help="of each host, for its data")
    parser.add_argument(
        "--rate", help="that an interface may send, as tc has it: 1gbit; else unlimited"
    )
    parser.add_argument("--network", choices=("tcp", "ucx", "tls"), default="tcp")
    parser.add_argument("--window", type=int, help="bytes of a socket's buffers; else the kernel's")
    parser.add_argument("--seconds", type=int, default=3, help="of traffic without a library")
    parser.add_argument("--plain-sockets", action="store_true", help="even if there is iperf3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("arguments", nargs="*", help="-- and arguments for the program")
    return parser.parse_args()


@contextmanager
def started(commands: Sequence[list[str]], **options: Any) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes; end all of them afterwards."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            processes.append(subprocess.Popen(command, text=True, **options))
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


# --- without a library


def traffic(hosts: Sequence[Host], tool: str, seconds: int) -> float:
    """Return GB/s of the slowest host when every host sends to the next, all at once."""
    plain = (sys.executable, str(HERE / "plain_sockets.py"))
    receivers, senders = [], []
    for host, next_host in zip(hosts, [*hosts[1:], hosts[0]], strict=True):
        for k, address in enumerate(next_host.addresses):
            port = str(PORT + k)
            receive = (*plain, "receive", port)
            send = (*plain, "send", address, port, str(seconds))
            if tool == "iperf3":
                iperf3 = ("iperf3", "--port", port)
                receive = (*iperf3, "--server", "--one-off", "--forceflush")
                send = (*iperf3, "--client", address, "--json", "--time", str(seconds))
            receivers.append(host.command(*receive))
            senders.append(host.command(*send))
    with started(receivers, stdout=subprocess.PIPE) as receiving:
        for process in receiving:
            assert process.stdout is not None
            while "listening" not in (line := process.stdout.readline()):
                if not line:
                    raise OSError(f"{shlex.join(process.args)} has ended")
        with started(senders, stdout=subprocess.PIPE) as sending:
            outputs = [process.communicate(timeout=seconds + 60)[0] for process in sending]
    rates = list(map(gigabytes_per_s, outputs))
    each = len(hosts[0].addresses)
    return min(sum(rates[begin : begin + each]) for begin in range(0, len(rates), each))


def gigabytes_per_s(output: str) -> float:
    """Return the rate that iperf3 or plain_sockets.py reports."""
    result = json.loads(output)
    if isinstance(result, float):
        return result
    if "error" in result:
        raise OSError(f"iperf3: {result['error']}")
    return result["end"]["sum_received"]["bits_per_second"] / 8e9


# --- with


def variables(
    hosts: Sequence[Host], ranks_per_host: int, rank: int, network: str = "tcp"
) -> dict[str, str]:
    """Return the variables that torchrun would set, and the interfaces."""
    interfaces = ",".join(hosts[0].interfaces)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts) * ranks_per_host),
        "LOCAL_RANK": str(rank % ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "GROUP_RANK": str(rank // ranks_per_host),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(PORT),
        "TORCHELASTIC_RUN_ID": f"hosts-{os.getpid()}",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "GLOO_SOCKET_IFNAME": interfaces,
        "TORCH_RING_INTERFACE": interfaces,
        "TORCH_RING_NETWORK": "ucx" if network == "ucx" else "tcp",
        "TORCH_RING_TLS": str(int(network == "tls")),
        "TORCH_RING_SECRET": "of the benchmark",
        "OMP_NUM_THREADS": "1",
    }


def run_program(
    program: str,
    hosts: Sequence[Host],
    ranks_per_host: int,
    network: str,
    arguments: Sequence[str],
) -> None:
    """Run a benchmark on all ranks; rank 0 prints. If one rank fails, end all."""
    command = (sys.executable, str(HERE / program), *arguments)
    ranks = range(len(hosts) * ranks_per_host)
    commands = []
    for rank in ranks:
        pairs = [f"{k}={v}" for k, v in variables(hosts, ranks_per_host, rank, network).items()]
        commands.append(hosts[rank // ranks_per_host].command("env", *pairs, *command))
    with started(commands) as processes:
        deadline = time.monotonic() + DEADLINE_S
        while (codes := [process.poll() for process in processes]).count(0) < len(codes):
            failed = [rank for rank, code in zip(ranks, codes, strict=True) if code]
            if failed:
                raise OSError(f"{program} failed on ranks {failed}")
            if time.monotonic() > deadline:
                raise OSError(f"{program} still runs after {DEADLINE_S} s")
            time.sleep(0.1)


def merged(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the report over TCP, with the results over another network added."""
    report = reports.pop("tcp")
    for network, other in reports.items():
        if "results" not in report["rows"][0]:
            report[f"network={network}"] = other["rows"]
            continue
        for row, added in zip(report["rows"], other["rows"], strict=True):
            for library, result in added["results"].items():
                row["results"][f"{library}, network={network}"] = result
    return report


def conclusions(rows: Sequence[dict[str, Any]], without: float) -> Iterator[str]:
    """Yield the share of the bare traffic that each library's largest allreduce reaches."""
    rows = [row for row in rows if row.get("collective") == "allreduce"]
    largest = max((row["bytes"] for row in rows), default=0)
    for row in (row for row in rows if row["bytes"] == largest):
        for library, result in row["results"].items():
            share = result["busbw"] / without
            yield f"# {library}: allreduce of {largest} B {row['type']}: {share:.0%} of it"


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("hosts.py: ended"))  # clean up first
    tool = "iperf3" if shutil.which("iperf3") and not args.plain_sockets else "plain sockets"
    with (
        tempfile.TemporaryDirectory() as folder,
        namespaces.hosts(args.hosts, args.rate, args.window, args.interfaces) as hosts,
    ):
        before = traffic(hosts, tool, args.seconds)
        reports = {}
        for network in dict.fromkeys(("tcp", args.network)):
            results = Path(folder) / f"{network}.json"
            arguments = [*args.arguments, "--json", str(results)]
            run_program(args.program, hosts, args.ranks_per_host, network, arguments)
            reports[network] = json.loads(results.read_text())
        report = merged(reports)
        after = traffic(hosts, tool, args.seconds)
    without = statistics.mean([before, after])
    print(
        f"# {tool}, each of {args.hosts} hosts to the next at once: {before:.3f} GB/s before, "
        f"{after:.3f} GB/s after",
        *conclusions(report["rows"], without),
        sep="\n",
    )
    if args.json:
        report["command"] = f"python {shlex.join(sys.argv)}"
        report["machine"] |= {"rate": args.rate or "unlimited", "window": args.window}
        report["machine"]["interfaces"] = args.interfaces
        report["traffic"] = {"tool": tool, "before_gb_per_s": before, "after_gb_per_s": after}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as error:
        sys.exit(f"hosts.py: {error}")
