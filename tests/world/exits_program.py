# SPDX-License-Identifier: Apache-2.0
"""One of two ranks, which end as the argument says, mostly rank 1 alone. For test_exits.py.

With several ways to end, with commas between them, a process for each is forked, so that torch is
imported once. Each comes to the end of this program as if it were the only one.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import unittest

import torch

import torch_ring as hvd


def miss_the_other() -> None:
    """Print the error of a collective that the other rank does not call."""
    try:
        hvd.allreduce(torch.ones(3), name="doomed")
    except hvd.RingError as error:
        print(f"{type(error).__name__}: {error}")


def read_a_file(name: str) -> None:
    with open(name):
        pass


def raise_in_a_library() -> None:
    unittest.TestCase().fail("no more\ndata")  # marked


def exit_with_a_code() -> None:
    try:
        read_a_file("/nowhere")
    except OSError:
        sys.exit(3)


def exit_with_success() -> None:
    """Neither an error handled long ago nor a failing thread is the reason of an exit."""
    with contextlib.suppress(OSError):
        read_a_file("/nowhere")
    thread = threading.Thread(target=read_a_file, args=["/nowhere"])
    thread.start()
    thread.join()
    sys.exit(0)


def leave_a_thread() -> None:
    """It waits for a call that the other rank makes a second later.

    It needs longer to return from that than the interpreter needs to exit.
    """
    threading.Thread(target=miss_the_other, daemon=True).start()
    time.sleep(0.5)
    sys.exit(0)


def train_in_a_thread() -> None:
    def train() -> None:
        while True:
            hvd.allreduce(torch.ones(100_000))

    threading.Thread(target=train, daemon=True).start()
    time.sleep(0.1)
    sys.exit(0)


def kill_the_launcher() -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def in_a_process() -> None:
    process = multiprocessing.get_context("fork").Process(target=play, args=["raise_in_a_library"])
    process.start()
    process.join()


def play(how: str) -> None:
    if how == "leave_a_thread":
        os.environ["TORCH_RING_FAIL"] = "waited:1:2:sleep=1500"
    hvd.init()
    hvd.allreduce(torch.ones(3))
    if hvd.rank() == 1 or how == "train_in_a_thread":
        globals()[how]()
    if how == "leave_a_thread":
        time.sleep(1)
    if how == "kill_the_launcher":
        time.sleep(float(sys.argv[2]))
        print(f"goes on: {hvd.allreduce(torch.ones(3)).tolist()}\n", end="")  # in one write
    else:
        miss_the_other()


if __name__ == "__main__":
    for each in sys.argv[1].split(","):
        if each == "kill_the_launcher" or os.fork() == 0:
            in_a_process() if each == "in_a_process" else play(each)
            break
        _, status = os.wait()
        print(f"--- {each} has ended: {os.waitstatus_to_exitcode(status)}", flush=True)
