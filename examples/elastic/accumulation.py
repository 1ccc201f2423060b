# SPDX-License-Identifier: Apache-2.0
"""Trains on handwritten digits while ranks may die, a few samples at a time.

A rank takes 16 samples at once, as if more had no room in its memory. Fewer ranks take more of such
passes in a step, so that all ranks together keep their batch, and the learning rate stays.

python -m torch_ring.run -np 4 --min-np 1 --max-np 4 python examples/elastic/accumulation.py
"""

import argparse
import os
import signal
import time

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import torch_ring as hvd

GLOBAL_BATCH = 64  # samples of all ranks together in a step
AT_ONCE = 16  # samples of a rank in a pass, at most


def samples() -> int:
    """Return the number of samples of a rank in a step."""
    return GLOBAL_BATCH // hvd.size()


def passes() -> int:
    """Return the number of passes in which a rank takes them."""
    return -(-samples() // AT_ONCE)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, dataset: TensorDataset, options) -> None:
    for state.epoch in range(state.epoch, options.epochs):
        loader = DataLoader(dataset, samples(), sampler=state.sampler)
        for batch, (images, labels) in enumerate(loader):
            state.optimizer.zero_grad()
            parts = zip(images.tensor_split(passes()), labels.tensor_split(passes()), strict=True)
            for part, wanted in parts:  # gradients are added up here, and averaged in the last pass
                found = state.model(part)
                loss = torch.nn.functional.cross_entropy(found, wanted, reduction="sum")
                (loss / len(images)).backward()
            state.optimizer.step()
            state.sampler.record_batch(batch, len(images))  # after the step, which may fail
            state.check_host_updates()
            time.sleep(options.pause)
        if hvd.rank() == 0:
            print(f"epoch {state.epoch} on {hvd.size()} ranks: {passes()} passes", flush=True)
        state.sampler.set_epoch(state.epoch + 1)
    state.epoch = options.epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep in each step")
    options = parser.parse_args()

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all ranks at once, and quietly
    hvd.init()
    print(f"rank {hvd.rank()} is process {os.getpid()}", flush=True)
    torch.manual_seed(0)
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = images.float() / 16
    dataset = TensorDataset(images[:1500], labels[:1500])

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=passes()
    )
    sampler = hvd.elastic.ElasticSampler(dataset)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    def change_passes() -> None:  # on all ranks, newcomers too, after each change of their number
        optimizer.set_backward_passes_per_step(passes())

    state.register_reset_callbacks([change_passes])
    train(state, dataset, options)
    if hvd.rank() == 0:
        with torch.no_grad():
            found = model(images[1500:])
            loss = torch.nn.functional.cross_entropy(found, labels[1500:]).item()
        print(f"{hvd.size()} ranks have ended; loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
