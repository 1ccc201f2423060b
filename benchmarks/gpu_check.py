# SPDX-License-Identifier: Apache-2.0
"""Checks torch_ring on a GPU in ten minutes at most: the parts that tell most come first.

    python benchmarks/gpu_check.py --output gpu          # in a checkout, which it builds
    python benchmarks/gpu_check.py --parts deaths queue  # the build comes first; --list has all
    python benchmarks/gpu_check.py --device stand-in     # tries the script, after `make doubles`

A part is a program with a deadline, at which it is killed with all processes that it has started.
Its result is printed, and appended to results.jsonl in the folder of --output, as soon as it is
known: a run that is cut has told what it has seen. log.txt there has the output of all parts.

It needs a GPU, g++, and in Python torch, numpy, pytest, hypothesis, setuptools and ninja.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 590.0  # in which the whole run ends
INTERRUPT = 0.9  # of a part's time: the rest is pytest's, to show failures
LEAST = 0.1  # of a part's time: with less left, it does not begin
KILL_S = 10.0  # in which killed processes end, unless a driver hangs
TAIL_LINES = 40  # of the log, printed after a failure
PR_SET_CHILD_SUBREAPER = 36
MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE=1"  # NCCL 2.30 and newer: ranks of a host may share a GPU

MACHINE = """
import platform, torch, torch_ring
on_gpu = {on_gpu}
print("# torch", torch.__version__, "torch_ring", torch_ring.__version__, "Python",
      platform.python_version())
if on_gpu:
    print("#", torch.cuda.get_device_name(), "CUDA", torch.version.cuda,
          "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
"""


@dataclass(frozen=True)
class Part:
    """A program of the check.

    Attributes:
        seconds: its deadline, which counts from its start.
        command: the program on a GPU.
        on_stand_in: the program on stand-ins, or the reason for which there is none.
    """

    name: str
    seconds: float
    shows: str
    command: Sequence[str]
    on_stand_in: Sequence[str] | str


@dataclass(frozen=True)
class Result:
    """The end of a part; `said` has its lines that begin with #, and its last line."""

    part: str
    verdict: str
    seconds: float
    said: list[str]

    @property
    def is_good(self) -> bool:
        return self.verdict in ("passed", "skipped")


# --- the parts


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def suite(names: str, *environment: str, place: str = "tests/gpu") -> list[str]:
    """Return the command that runs the tests of those names, and shows what they print."""
    options = ["-v", "-rP", "--tb=short", "--durations=5", "-k", names]
    return ["env", *environment, *python("-m", "pytest", place, *options)]


def doubles(names: str) -> list[str]:
    return suite(names, place="tests/device/test_hardships.py")


def ranks(size: int, *arguments: str) -> list[str]:
    """Return the command that times training steps on `size` ranks."""
    program = ["benchmarks/gpu_ranks.py", *arguments]
    return python("-m", "torch.distributed.run", "--nproc-per-node", str(size), *program)


QUICK = ("--steps", "1", "--rounds", "1")

PARTS = [
    Part(
        "build",
        180,
        "torch_ring is built by g++ and imported; the machine",
        [
            *("sh", "-c", '"$0" setup.py build_ext --inplace && exec "$0" -c "$1"'),
            *(sys.executable, MACHINE.format(on_gpu=True)),
        ],
        python("-c", MACHINE.format(on_gpu=False)),
    ),
    Part(
        "one-rank",
        75,
        "one rank: dtypes, operators, 2^31 + 5 elements, a device-side assertion",
        suite("[1 and (check_ or many_elements or assertion)"),
        doubles("[1 and (many_elements or assertion)"),
    ),
    Part(
        "two-ranks",
        60,
        "2 ranks: 200 allreduces, 64 buckets; calls of ncclCommGetAsyncError counted",
        suite("polls or ([2 and (many_elements or assertion or compare_with_ddp))"),
        doubles("polls"),
    ),
    Part(
        "buckets",
        60,
        "2 ranks: a step with 64 buckets beside DDP: weights, the host's time",
        ranks(2, "--model", "buckets"),
        ranks(2, "--model", "buckets", "--device", "stand-in", *QUICK),
    ),
    Part(
        "four-ranks",
        180,
        "4 ranks: all device programs",
        suite("[4"),
        suite("init_again", place="tests/device/test_device_programs.py"),
    ),
    Part(
        "deaths",
        120,
        "a rank stopped for 20 s, killed in an allreduce that spins; the others go on; three times",
        suite("stopped or killed or survivors"),
        doubles("stopped"),
    ),
    Part(
        "ahead",
        75,
        "2 ranks that run ahead: the bits of agreed passes, also with 300 sizes of buckets",
        suite("bucket_sizes or planned"),
        doubles("bucket_sizes"),
    ),
    Part(
        "queue",
        45,
        "3,000 small kernels before each bucket, and a rank that is 2 s late",
        suite("launch_queue"),
        doubles("launch_queue"),
    ),
    Part(
        "graphs",
        120,
        "a capture in another thread, make_graphed_callables, torch.compile with reduce-overhead",
        suite("graph or capture or compiled"),
        "a stand-in has neither graphs nor a compiler",
    ),
    Part(
        "local-peers",
        90,
        "2 ranks without NCCL_HOSTID (NCCL 2.30): local peers, P2P, a destroy of several ranks",
        suite("[2", MULTI_RANK),
        "NCCL's stand-in has one way between ranks",
    ),
    Part(
        "resnet50",
        90,
        "one rank: a step of ResNet-50 beside torch and DDP",
        ranks(1, "--model", "resnet50", "--rounds", "5"),
        ranks(1, "--model", "resnet50", "--device", "cpu", *QUICK),
    ),
]


# --- their runs


def check(
    parts: Sequence[Part], device: str, seconds: float, folder: Path, patience: float = 1.0
) -> int:
    """Run the parts, of which the first is needed by the others; return the exit status."""
    # Orphans of a part become children of this process, which ends them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` lets parts ignore it
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    results: list[Result] = []
    for part in parts:
        command = part.command if device == "cuda" else part.on_stand_in
        left = end - time.monotonic()
        if isinstance(command, str):
            result = Result(part.name, "skipped", 0.0, [command])
        elif results and not results[0].is_good:
            result = Result(part.name, "not run", 0.0, [f"{parts[0].name} has not passed"])
        elif left < LEAST * part.seconds:
            result = Result(part.name, "not run", 0.0, [f"the {seconds:g} s are over"])
        else:
            deadline_s = min(patience * part.seconds, left)
            result = run(part.name, command, deadline_s, folder / "log.txt")
        report(result, folder / "results.jsonl")
        results.append(result)
    return int(not all(result.is_good for result in results))


def run(name: str, command: Sequence[str], seconds: float, log: Path) -> Result:
    """Run a program until its deadline, and end all processes that it leaves."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    begun = time.monotonic()
    with log.open("ab") as output:
        before = output.tell()
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, **streams)
        try:
            verdict = verdict_of(process.wait(INTERRUPT * seconds))
        except subprocess.TimeoutExpired:
            verdict = f"late: ended after {seconds:.0f} s"
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait((1 - INTERRUPT) * seconds)
        finally:
            left = end_children(process)
    lines = log.read_bytes()[before:].decode(errors="replace").splitlines()
    lines = [line.rstrip() for line in lines if line.strip()]
    said = [line for line in lines[:-1] if line.startswith("#")] + [
        s.strip("= ") for s in lines[-1:]
    ]
    if left:
        said.append(f"processes that cannot be killed: {left}")
    counts = re.findall(r"\d+ (passed|skipped)", said[-1]) if said else []
    if verdict == "passed" and counts == ["skipped"]:
        verdict = "skipped"  # by pytest, which says why
    elif verdict != "passed":
        print(*lines[-TAIL_LINES:], sep="\n", flush=True)
    return Result(name, verdict, round(time.monotonic() - begun, 1), said)


def verdict_of(status: int) -> str:
    if status < 0:
        return f"died: {signal.Signals(-status).name}"
    return f"failed: exit status {status}" if status else "passed"


def end_children(process: subprocess.Popen[bytes]) -> list[int]:
    """Kill all children of this process, and theirs; return those that do not die."""
    end = time.monotonic() + KILL_S
    while (left := children()) and time.monotonic() < end:
        for child in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.poll()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    return left


def children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def report(result: Result, file: Path) -> None:
    print(f"{result.verdict:<28} {result.part:<12} {result.seconds:>6.1f} s", flush=True)
    print(*(f"    {line}" for line in result.said), sep="\n", flush=True)
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(result)) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "stand-in"], default="cuda")
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART")
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies the deadlines")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: a new one in /tmp")
    args = parser.parse_args()
    if args.list:
        print(*(f"{p.name:<12} {p.seconds:>4.0f} s  {p.shows}" for p in PARTS), sep="\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the part, too
    folder = args.output or Path(tempfile.mkdtemp(prefix="gpu_check-"))
    print(f"results in {folder.resolve()}", flush=True)
    parts = [part for part in PARTS if part is PARTS[0] or part.name in args.parts]
    return check(parts, args.device, args.seconds, folder, args.patience)


if __name__ == "__main__":
    sys.exit(main())
