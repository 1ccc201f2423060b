# SPDX-License-Identifier: Apache-2.0
"""Times how soon an elastic training goes on when ranks die.

    python benchmarks/recovery.py --json recovery.json
    python benchmarks/recovery.py --cases killed --rounds 40       # ranks without a launcher
    python benchmarks/recovery.py --cases torch_ring torchrun      # a rank is killed under each

In each round four ranks train a small network. Then a rank is killed; or one of two hosts (network
namespaces, as root) is cut off. Each rank notes in a file of its own when a step has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import machine
import namespaces
import torch
from hosts import variables
from namespaces import HERE, Host, free_port

import torch_ring as hvd

RANKS = 4
DEADLINE_S = 120.0  # of each wait
CALM_S = 2.0  # of training before the loss, and after it
HEARTBEAT_S = 1.0  # after which ranks of a silent host are lost
LOOK_S = 0.02
BIN_S = 0.25  # of steps that are counted together
STANDBY = "standby of torch_ring.run"  # on the command line of such a process
RUN = ["-m", "torch_ring.run", "-np", f"{RANKS}", "--min-np", "1", "--max-np", f"{RANKS}"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{RANKS}"]


@dataclass(frozen=True)
class Case:
    """One way in which ranks start and are lost.

    Attributes:
        launcher: the arguments between `python` and the program; empty: there is no launcher, so
            nothing comes in place of a lost rank.
        hosts: the number of hosts; of two, the second is cut off.
    """

    launcher: Sequence[str] = ()
    hosts: int = 1


CASES = {
    "killed": Case(),
    "cut off": Case(hosts=2),
    "torch_ring, standby": Case([*RUN, "--standby", "1", sys.executable]),
    "torch_ring": Case([*RUN, sys.executable]),
    "torchrun": Case([*TORCHRUN, "--max-restarts", "1"]),
}


class Step(NamedTuple):
    """The end of a step on one rank."""

    ended: float  # on the clock that all processes share
    size: int
    rank: int


@dataclass(frozen=True)
class Loss:
    """One round.

    Attributes:
        ms: from the loss to the end of the first step of the slowest survivor, or of the ranks that
            a launcher starts in place of all; without a step's time, and the heartbeat timeout.
        step_ms: the median of all steps.
        whole_s: from the loss to the first step of four ranks, under a launcher.
        steps_per_s: those of rank 0 in each BIN_S, from CALM_S before the loss.
    """

    ms: float
    step_ms: float
    whole_s: float | None
    steps_per_s: list[float]


@dataclass(frozen=True)
class Row:
    """One case, over its rounds: see `Loss`; the steps are those of the first round."""

    what: str
    ranks: int
    hosts: int
    rounds: int
    median_ms: float
    least_ms: float
    most_ms: float
    step_ms: float
    whole_s: float | None
    steps_per_s: list[float]


class WorldError(Exception):
    """Ranks have ended, or have not trained in time; the text is the reason."""


# --- a rank


def train(folder: Path, every: int = 10) -> None:
    """Run as a rank that trains until there is a file `stop`.

    A launcher that ends all ranks and starts them again finds a checkpoint, of every 10th step.
    """
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    layers = (torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
    model = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    images, labels = torch.randn(32, 784), torch.arange(32) % 10
    checkpoint, start = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]

    def save(step: int) -> None:
        new = checkpoint.with_suffix(".new")
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(states, new)
        new.rename(checkpoint)

    @hvd.elastic.run
    def steps(state: Any, file: Any) -> None:
        is_over = torch.zeros(1)
        while not is_over.item():
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            state.step += 1
            print(time.monotonic(), hvd.size(), hvd.rank(), file=file)
            if hvd.rank() == 0 and state.step % every == 0:
                save(state.step)
            wants_end = torch.tensor([float((folder / "stop").exists())])
            is_over = hvd.allreduce(wants_end, op=hvd.Max, name="is_over")
            state.check_host_updates()

    with open(folder / f"steps-{os.getpid()}", "w", buffering=1) as file:
        steps(hvd.elastic.TorchState(model, optimizer, step=start), file)
    hvd.shutdown()


# --- a round


def lost(case: Case, hosts: Sequence[Host], victim: int) -> Loss:
    """Start ranks, lose the victim or the second host, and return the measurement.

    Raises:
        WorldError: the others did not go on in time.
    """
    with tempfile.TemporaryDirectory() as text, started(case, hosts, Path(text)) as processes:
        folder = Path(text)

        def wait(is_so: Callable[[], bool], what: str) -> None:
            deadline = time.monotonic() + DEADLINE_S
            while not is_so():
                have_ended = all(process.poll() is not None for process in processes)
                if have_ended or time.monotonic() > deadline:
                    raise WorldError(f"no {what}: {tail(folder / 'output')}")
                time.sleep(LOOK_S)

        wait(lambda: ranks_in(folder, RANKS, 0.0) == RANKS, f"training of {RANKS} ranks")
        if "--standby" in case.launcher:
            wait(lambda: is_ready(folder), "standby process that is ready")
        time.sleep(CALM_S + random.uniform(0.0, 0.05))
        if len(hosts) > 1:
            hosts[1].cut_off()
            left = RANKS // 2
        else:
            (pid,) = (pid for pid, steps in read(folder).items() if steps[-1].rank == victim)
            os.kill(pid, signal.SIGKILL)
            left = RANKS if case.launcher else RANKS - 1
        lost_at = time.monotonic()
        wait(lambda: ranks_in(folder, left, lost_at + 0.01) == left, f"training of {left} ranks")
        time.sleep(CALM_S)
        (folder / "stop").touch()
        return loss_of(read(folder), lost_at, HEARTBEAT_S if len(hosts) > 1 else 0.0)


@contextmanager
def started(
    case: Case, hosts: Sequence[Host], folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a launcher or ranks, each in a session of its own; end them and their ranks at last."""
    program = [str(Path(__file__).resolve()), "--folder", str(folder)]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_RING_LOG_LEVEL": "error"}
    starts = [(HERE.command(sys.executable, *case.launcher, *program), common)]
    if not case.launcher:
        common |= {"TORCH_RING_HEARTBEAT_TIMEOUT": str(HEARTBEAT_S)} if len(hosts) > 1 else {}
        port, each = str(free_port()), RANKS // len(hosts)
        starts = [
            (
                hosts[rank // each].command(sys.executable, *program),
                common | variables(hosts, each, rank) | {"MASTER_PORT": port},
            )
            for rank in range(RANKS)
        ]
    processes: list[subprocess.Popen[bytes]] = []
    with open(folder / "output", "wb") as output:
        try:
            for command, environment in starts:
                streams = {"stdout": output, "stderr": output}
                processes.append(
                    subprocess.Popen(command, env=environment, start_new_session=True, **streams)
                )
            yield processes
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(CALM_S)
        finally:
            for process in processes:
                end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process; a launcher ends its ranks then. Kill all that is left of its session."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5 * CALM_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read(folder: Path) -> dict[int, list[Step]]:
    """Return the steps of each process, by pid."""
    found = {}
    for path in folder.glob("steps-*"):
        *whole, _ = path.read_text().split("\n")
        lines = [line.split() for line in whole]
        steps = [Step(float(ended), int(size), int(rank)) for ended, size, rank in lines]
        if steps:
            found[int(path.name.partition("-")[2])] = steps
    return found


def ranks_in(folder: Path, size: int, since: float) -> int:
    """Return the number of ranks that have ended a step among `size` ranks after a moment."""
    steps = itertools.chain(*read(folder).values())
    return len({step.rank for step in steps if step.size == size and step.ended > since})


def loss_of(steps: dict[int, list[Step]], lost_at: float, heartbeat_s: float = 0.0) -> Loss:
    """Return the times of a round: of the survivors, or else of their successors.

    Under torchrun the survivors go on, too, until it ends them: these steps do not count.
    """
    come_at = [of[0].ended for of in steps.values() if of[0].ended > lost_at]
    whole = max(come_at, default=lost_at)
    survivors = [of for of in steps.values() if of[0].ended <= lost_at and of[-1].ended > whole]
    without = [[s.ended for s in of if s.ended > lost_at and s.size < RANKS] for of in survivors]
    first = max((ends[0] for ends in without if ends), default=whole)
    pairs = itertools.chain(*(itertools.pairwise(of) for of in steps.values()))
    step_s = statistics.median(second.ended - step.ended for step, second in pairs)
    ends = sorted(s.ended - lost_at for s in itertools.chain(*steps.values()) if s.rank == 0)
    bins = range(round(-CALM_S / BIN_S), int(ends[-1] // BIN_S))
    return Loss(
        1e3 * (first - lost_at - step_s - heartbeat_s),
        1e3 * step_s,
        whole - lost_at if come_at else None,
        [sum(index == end // BIN_S for end in ends) / BIN_S for index in bins],
    )


def is_ready(folder: Path) -> bool:
    """Return whether the standby process of the job has imported torch, and is idle."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_text(errors="replace")
            if STANDBY not in command or str(folder) not in command:
                continue
            if "libtorch_python" not in (process / "maps").read_text():
                continue
            before = cpu_ticks(process)
            time.sleep(CALM_S)
            return cpu_ticks(process) == before
    return False


def cpu_ticks(process: Path) -> int:
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])  # utime and stime: man 5 proc


def tail(output: Path) -> str:
    """Return the last line that the processes have printed."""
    lines = output.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing is printed"


# --- all rounds


def measure(name: str, rounds: int) -> Row:
    """Print each round of a case; return their medians."""
    case, found = CASES[name], []
    for index in range(rounds):
        victim = index % RANKS
        if case.hosts > 1:
            with namespaces.hosts(case.hosts) as hosts:
                loss = lost(case, hosts, victim)
        else:
            loss = lost(case, [HERE], victim)
        what = "a host" if case.hosts > 1 else f"rank {victim}"
        whole = "" if loss.whole_s is None else f", four ranks after {loss.whole_s:.2f} s"
        print(f"# {name}: {what} lost: goes on after {loss.ms:.0f} ms{whole}", flush=True)
        found.append(loss)
    ms = [loss.ms for loss in found]
    wholes = [loss.whole_s for loss in found if loss.whole_s is not None]
    return Row(
        name,
        RANKS,
        case.hosts,
        rounds,
        statistics.median(ms),
        min(ms),
        max(ms),
        statistics.median(loss.step_ms for loss in found),
        statistics.median(wholes) if wholes else None,
        found[0].steps_per_s,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=4, help="of each case; the ranks take turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a rank
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if args.folder is not None:
        train(args.folder)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("recovery.py: ended"))  # clean up first
    facts = machine.computer()
    print(machine.title("training goes on", facts), flush=True)
    rows, failed = [], False
    for name in args.cases:
        missing = namespaces.why_none() if CASES[name].hosts > 1 else None
        if missing:
            print(f"# {name}: not run: {missing}", flush=True)
            continue
        try:
            rows.append(measure(name, args.rounds))
        except (WorldError, OSError) as error:
            failed = True
            print(f"# {name}: {error}", flush=True)
    print(f"{'# what':<20}{'rounds':>7}{'median ms':>10}{'least':>10}{'most':>10}{'step':>10}")
    for row in rows:
        times = (row.median_ms, row.least_ms, row.most_ms, row.step_ms)
        print(f"{row.what:<20}{row.rounds:>7}" + "".join(f"{ms:>10.1f}" for ms in times))
    machine.save(args.json, "python", facts, rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
