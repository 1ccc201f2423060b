# SPDX-License-Identifier: Apache-2.0
"""Trains on handwritten digits while ranks may die; the learning rate follows the ranks.

Each rank keeps its batch, so fewer ranks take fewer samples in a step; the rate follows.
train.py beside it keeps the batch of all ranks together, and the rate.

python -m torch_ring.run -np 4 --min-np 1 --max-np 4 python examples/elastic/scaled_rate.py
"""

import argparse
import os
import signal
import time

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import torch_ring as hvd

BATCH = 16  # samples of a rank, for any number of ranks
RATE_OF_ONE = 0.025  # the learning rate of one rank


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, dataset: TensorDataset, options) -> None:
    for state.epoch in range(state.epoch, options.epochs):
        for batch, (images, labels) in enumerate(DataLoader(dataset, BATCH, sampler=state.sampler)):
            state.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(state.model(images), labels).backward()
            state.optimizer.step()
            state.sampler.record_batch(batch, len(images))
            state.check_host_updates()
            time.sleep(options.pause)
        if hvd.rank() == 0:
            rate = state.optimizer.param_groups[0]["lr"]
            print(f"epoch {state.epoch} on {hvd.size()} ranks: rate {rate:g}", flush=True)
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
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE_OF_ONE * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(dataset)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    def scale_rate() -> None:  # on all ranks, newcomers too, after each change of their number
        for group in optimizer.param_groups:
            group["lr"] = RATE_OF_ONE * hvd.size()

    state.register_reset_callbacks([scale_rate])
    train(state, dataset, options)
    if hvd.rank() == 0:
        with torch.no_grad():
            found = model(images[1500:]).argmax(1)
        accuracy = (found == labels[1500:]).float().mean().item()
        print(f"{hvd.size()} ranks have ended; accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
