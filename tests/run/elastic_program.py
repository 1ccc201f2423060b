# SPDX-License-Identifier: Apache-2.0
"""Trains a little on elastic ranks, until the file named by its argument exists."""

from __future__ import annotations

import os
import sys
import time

HAD_TORCH = "torch" in sys.modules

import torch  # noqa: E402

import torch_ring as hvd  # noqa: E402


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    name, local_rank = os.environ["TORCH_RING_PROCESS"], os.environ["LOCAL_RANK"]
    print(
        f"process {name} is rank {hvd.rank()} of {hvd.size()}, slot {local_rank} of "
        f"{os.environ['HOROVOD_HOSTNAME']}, pid {os.getpid()}, had torch: {HAD_TORCH}"
    )
    is_over = torch.zeros(1)
    while not is_over.item():
        state.step += 1
        is_over = hvd.allreduce(torch.tensor([float(os.path.exists(sys.argv[1]))]), op=hvd.Max)
        time.sleep(0.02)
        state.check_host_updates()


if __name__ == "__main__":
    hvd.init()
    # No optimizer: making one imports torch._dynamo, which costs as much as torch itself.
    train(hvd.elastic.TorchState(torch.nn.Linear(2, 2), step=0))
    print(f"process {os.environ['TORCH_RING_PROCESS']} has ended on {hvd.size()} ranks")
