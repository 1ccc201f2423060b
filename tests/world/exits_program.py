# SPDX-License-Identifier: Apache-2.0
"""Ranks that end as interpreters do, with exit functions and daemon threads; for test_exits.py.

Prints a JSON object: by scenario, the exit status and the output of each rank.
"""

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable
from pathlib import Path

import torch

import torch_ring as hvd

DEADLINE_S = 40
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36


def meet(rank: int) -> None:
    hvd.init(rank=rank, size=2)
    hvd.allreduce(torch.ones(3))


def miss_the_other() -> None:
    """Print the error of a collective that the other rank does not call."""
    try:
        hvd.allreduce(torch.ones(3), name="doomed")
    except hvd.RingError as error:
        print(f"{type(error).__name__}: {error}")


def variables_of(launcher: str, rank: int) -> dict[str, str]:
    """Return a launcher's variables for one of two ranks on a host."""
    job = f"exits-{os.getpgid(0)}"
    if launcher == "slurmstepd":
        return {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_JOB_ID": job,
            "SLURM_STEP_ID": "0",
        }
    if launcher == "hydra_pmi_proxy":
        return {
            "PMI_RANK": str(rank),
            "PMI_SIZE": "2",
            "MPI_LOCALRANKID": str(rank),
            "MPI_LOCALNRANKS": "2",
        }
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": job,
    }


def read_a_file(name: str) -> None:
    with open(name):
        pass


def raise_in_a_library(rank: int) -> None:
    meet(rank)
    if rank == 1:
        unittest.TestCase().fail("no more\ndata")  # marked
    miss_the_other()


def exit_with_a_code(rank: int) -> None:
    meet(rank)
    if rank == 1:
        try:
            read_a_file("/nowhere")
        except OSError:
            sys.exit(3)
    miss_the_other()


def exit_with_success(rank: int) -> None:
    """Neither an error handled long ago nor a failing thread is the reason of an exit."""
    meet(rank)
    if rank == 1:
        with contextlib.suppress(OSError):
            read_a_file("/nowhere")
        thread = threading.Thread(target=read_a_file, args=["/nowhere"])
        thread.start()
        thread.join()
        sys.exit(0)
    miss_the_other()


def fail_in_a_process(rank: int) -> None:
    def work() -> None:
        os.environ.update(variables_of("mpirun", rank))
        hvd.init()
        hvd.allreduce(torch.ones(3))
        if rank == 1:
            raise KeyError("weights")
        miss_the_other()

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()


def leave_a_thread_waiting(rank: int) -> None:
    """The thread needs longer to return from its call than the interpreter needs to exit."""
    os.environ["TORCH_RING_FAIL"] = "waited:0:3:sleep=1500"  # after two of meet()
    meet(rank)
    if rank == 0:
        threading.Thread(target=miss_the_other, daemon=True).start()
        time.sleep(0.1)
    else:
        time.sleep(1)


def leave_a_thread_training(rank: int) -> None:
    meet(rank)

    def train() -> None:
        while True:
            hvd.allreduce(torch.ones(100_000))

    threading.Thread(target=train, daemon=True).start()
    time.sleep(0.1)


SCENARIOS: list[Callable[[int], None]] = [
    raise_in_a_library,
    exit_with_a_code,
    exit_with_success,
    fail_in_a_process,
    leave_a_thread_waiting,
    leave_a_thread_training,
]


# --- ranks of a launcher


def obey(rank: int, launcher: str, watched: str) -> None:
    """Run as a rank of a launcher, or of mpirun below a shell; rank 0 kills its parent."""
    os.environ.update(variables_of(launcher, rank))
    os.environ["TORCH_RING_EXIT_WITH_LAUNCHER"] = watched
    hvd.init()
    hvd.allreduce(torch.ones(3))
    if rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(DEADLINE_S if watched == "1" and launcher != "bash" else 1)
    print("goes on:", hvd.allreduce(torch.ones(3)).tolist())


WATCHED = ["mpirun", "hydra_pmi_proxy", "slurmstepd"]
LAUNCHERS = [*((name, "1") for name in WATCHED), ("mpirun", "0"), ("bash", "1")]


def main() -> None:
    """Run all scenarios; in a rank, return when the interpreter must end."""
    results: dict[str, list[tuple[int, str]]] = {}
    for scenario in SCENARIOS:
        ranks = start(scenario)
        if ranks is None:
            return
        results[scenario.__name__] = [
            (os.waitpid(pid, 0)[1], text_of(output)) for pid, output in ranks
        ]
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    for name, watched in LAUNCHERS:
        folder = tempfile.mkdtemp()
        launcher = os.fork()
        if launcher == 0:
            libc.prctl(PR_SET_NAME, name.encode())
            if start(obey, folder, name, watched) is None:
                return
            time.sleep(DEADLINE_S)
            os._exit(1)
        assert os.waitpid(launcher, 0)[1] == signal.SIGKILL
        statuses = sorted(os.wait() for _ in range(2))  # in the order of their start
        outputs = [Path(folder, str(rank)).read_text() for rank in range(2)]
        results[f"{name} {watched}"] = [
            (status, output) for (_, status), output in zip(statuses, outputs, strict=True)
        ]
        shutil.rmtree(folder)
    json.dump(results, sys.stdout)


def start(run: Callable[..., None], folder: str = "", *arguments: str):
    """Fork two ranks. Return their processes and outputs; None in a rank, when it must end."""
    ranks = []
    for rank in range(2):
        output = open(Path(folder, str(rank)), "w+") if folder else tempfile.TemporaryFile("w+")  # noqa: SIM115  the parent reads it
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            signal.alarm(DEADLINE_S)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            run(rank, *arguments)
            return None
        ranks.append((pid, output))
    return ranks


def text_of(output) -> str:
    output.seek(0)
    return output.read()


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # or each rank frees torch's objects, and so copies their pages
    main()
