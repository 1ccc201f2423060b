# SPDX-License-Identifier: Apache-2.0
"""Functions that tests run on ranks, in a module that does not import torch."""

from __future__ import annotations

import os
import signal
import sys


def place(factor: int = 1, *, plus: int = 0) -> tuple[int, int]:
    return int(os.environ["RANK"]) * factor + plus, int(os.environ["WORLD_SIZE"])


def say() -> None:
    print("hello")
    print("trouble", file=sys.stderr)


class OwnError(Exception):
    """Can be pickled, and not be unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def raise_on_one(kind: str) -> None:
    if os.environ["RANK"] != "1":
        signal.pause()
    if kind == "value":
        raise LookupError("nothing there")
    if kind == "own":
        raise OwnError("a", "b")
    sys.exit(3)


def fail_on_one() -> int:
    if os.environ["RANK"] == "1":
        os._exit(9)
    return int(os.environ["RANK"])


def survive() -> tuple[int, int]:
    """Train until a failed process is replaced; return the steps, and the ranks."""
    import torch

    import torch_ring as hvd

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> tuple[int, int]:
        while state.step < 5 or not state.is_replaced:
            if os.environ["TORCH_RING_PROCESS"] == "1.1" and state.step == 2:
                raise RuntimeError("it has a result, too: this error")
            newcomer = float(os.environ["TORCH_RING_PROCESS"] == "1.2")
            state.is_replaced = bool(hvd.allreduce(torch.tensor(newcomer), op=hvd.Max))
            state.step += 1
            state.commit()
        return state.step, hvd.size()

    hvd.init()
    return train(hvd.elastic.ObjectState(step=0, is_replaced=False))


def leave_quietly() -> None:
    os._exit(0)


def variables() -> tuple[str, str]:
    return os.environ["GREETING"], os.environ["TORCH_RING_SECRET"]
