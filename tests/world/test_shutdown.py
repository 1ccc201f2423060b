# SPDX-License-Identifier: Apache-2.0
"""Ends of worlds: shutdown() leaves no thread, no descriptor and no shared memory behind."""

import os

import torch
from pool import are_gone, eventually, run, shared_files
from slow import on_shm_and_slowly_on_tcp

import torch_ring as hvd


def start_over(rounds: int) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    for i in range(rounds):
        hvd.init(process_sets=[[0]] if i % 2 else None)
        assert hvd.allreduce(torch.full((3,), float(i))).tolist() == [float(i)] * 3
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        # The kernel may list a joined thread a little longer.
        assert eventually(lambda: len(os.listdir("/proc/self/task")) <= threads_at_rest())
    assert len(os.listdir("/proc/self/fd")) <= fds + 4  # the store's client
    left = {path for path in shared_files() if "torch_ring" in path.name}
    assert are_gone(left), left


def threads_at_rest() -> int:
    """Return the number of threads allowed without a world: torch's store has some."""
    return 1 + sum("tcpstore" in name.lower() or name != "python" for name in thread_names())


def thread_names() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read().strip())
    return names


@on_shm_and_slowly_on_tcp
def test_init_and_shutdown_many_times(transport, full):
    """With --full fifty jobs of 400 rounds: hours."""
    for _ in range(50 if full else 1):
        rounds = 400 if full else 20
        deadline_s = 60 + 2 * rounds
        args = (rounds,)
        run(
            start_over,
            3,
            args=args,
            transport=transport,
            initialized=False,
            deadline_s=deadline_s,
        )
