# SPDX-License-Identifier: Apache-2.0
"""Runs all benchmarks, one after the other, and draws their plots (`make bench`).

    python benchmarks/suite.py                       # an hour on two cores; leave them alone
    python benchmarks/suite.py --only overhead       # one of them

Each writes results/NAME.json. The hosts benchmark needs root, `ip` and `tc`. Open MPI is a peer
where there is an mpirun.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from waiting_ranks import find_mpirun

ROOT = Path(__file__).parent.parent
HERE = Path("benchmarks")  # relative to ROOT, as in the commands in the results
RESULTS = HERE / "results"


def launched(ranks: int, *, mpi: bool = False) -> list[str]:
    """Return the command that starts a program on several ranks of this host."""
    if mpi and (mpirun := find_mpirun()):
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [mpirun, *root, "--bind-to", "none", "-np", str(ranks), sys.executable]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *torchrun]


@dataclass(frozen=True)
class Benchmark:
    """One program with its arguments.

    Attributes:
        ranks: the number of processes that torchrun starts; 0: the program starts its own.
        mpi: whether mpirun, if there is one, starts them; Open MPI is a peer then.
        root: whether it needs root.
    """

    program: str
    arguments: str = ""
    ranks: int = 2
    mpi: bool = False
    root: bool = False

    def command(self, name: str) -> list[str]:
        start = launched(self.ranks, mpi=self.mpi) if self.ranks else [sys.executable]
        arguments = self.arguments.split()
        if self.mpi and "-np" in start:
            arguments.insert(arguments.index("--peers") + 1, "mpi")
        output = ["--json", str(RESULTS / f"{name}.json")]
        return [*start, str(HERE / self.program), *output, *arguments]

    def missing(self) -> str | None:
        """Return the requirement that this machine lacks, if any."""
        if self.root and os.geteuid() != 0:
            return "it needs root"
        lacking = [tool for tool in ("ip", "tc") if self.root and shutil.which(tool) is None]
        return f"there is no {lacking[0]}" if lacking else None


AMONG_HOSTS = "-- --collective allreduce --peers gloo"
BENCHMARKS = {
    "allreduce": Benchmark(
        "collectives.py",
        "--shared --dtypes float32 bfloat16 float16 --peers gloo copy touch",
        mpi=True,
    ),
    "collectives": Benchmark(
        "collectives.py",
        "--collective allgather reducescatter broadcast alltoall --min-bytes 65536 "
        "--peers gloo touch",
        mpi=True,
    ),
    "oversubscribed": Benchmark(
        "collectives.py", "--max-bytes 16777216 --peers gloo touch", ranks=4
    ),
    "hosts-2": Benchmark("hosts.py", f"--hosts 2 {AMONG_HOSTS}", ranks=0, root=True),
    "hosts-3": Benchmark("hosts.py", f"--hosts 3 {AMONG_HOSTS}", ranks=0, root=True),
    "hosts-2-1gbit": Benchmark(
        "hosts.py", f"--hosts 2 --rate 1gbit {AMONG_HOSTS} --rounds 3", ranks=0, root=True
    ),
    "distributed": Benchmark(
        "collectives.py", "--collective allreduce allgather reducescatter --peers ring-c10d gloo"
    ),
    "training_step": Benchmark("training_step.py"),
    "sharded_step": Benchmark("sharded_step.py"),
    "sharded_state": Benchmark("sharded_state.py", ranks=0),
    "training_step-2-hosts": Benchmark(
        "hosts.py",
        "--hosts 2 --program training_step.py -- --models resnet18",
        ranks=0,
        root=True,
    ),
    "sharded_step-2-hosts": Benchmark(
        "hosts.py", "--hosts 2 --program sharded_step.py", ranks=0, root=True
    ),
    "slow_links": Benchmark(
        "hosts.py",
        "--hosts 2 --ranks-per-host 2 --rate 20mbit --program slow_links.py",
        ranks=0,
        root=True,
    ),
    "slow_links-losses": Benchmark(
        "hosts.py",
        "--hosts 2 --ranks-per-host 2 --program slow_links.py -- --steps 1920 --every 14 "
        "--compression int8 --outer-lr 0.8 --outer-momentum 0.6",
        ranks=0,
        root=True,
    ),
    "overhead": Benchmark("training_step.py", "--models parameters"),
    "init_scale": Benchmark("init_scale.py", ranks=0),
    "recovery": Benchmark("recovery.py", ranks=0),
    "death": Benchmark("init_scale.py", "--death", ranks=0),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=BENCHMARKS, nargs="+", default=list(BENCHMARKS))
    args = parser.parse_args()
    os.chdir(ROOT)
    failed = []
    for name in args.only:
        benchmark = BENCHMARKS[name]
        if missing := benchmark.missing():
            print(f"## {name}: not run: {missing}", flush=True)
            continue
        print(f"## {name}", flush=True)
        if subprocess.run(benchmark.command(name), check=False).returncode != 0:
            failed.append(name)
    subprocess.run([sys.executable, str(HERE / "plots.py")], check=True)
    if failed:
        print(f"## failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
