"""Trains a little on elastic ranks; the ranks in its arguments, as `rank:place`, die in init()."""

from __future__ import annotations

import os
import sys

import torch
from deaths_in_init import let_die

import torch_ring as hvd
from torch_ring.world import current


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    is_grown = int(os.environ.get("GROWS_TO", "0"))
    while state.step < 5 or hvd.size() < is_grown:
        state.optimizer.zero_grad()
        state.model(torch.ones(1, 1)).sum().backward()
        state.optimizer.step()
        state.step += 1
        state.check_host_updates()
    print(f"process {os.environ['TORCH_RING_PROCESS']} is rank {hvd.rank()} of {hvd.size()}")


if __name__ == "__main__":
    deaths = dict(each.split(":") for each in sys.argv[1:])
    rank, _, nth = os.environ["TORCH_RING_PROCESS"].partition(".")
    if rank in deaths and nth == "1":
        let_die(deaths[rank])
    current.init()
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))
