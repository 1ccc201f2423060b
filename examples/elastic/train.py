# SPDX-License-Identifier: Apache-2.0
"""Trains on handwritten digits while ranks may die: kill any of them, and the others go on.

python -m torch_ring.run -np 4 --min-np 1 --max-np 4 python examples/elastic/train.py
"""

import argparse
import os
import signal
import time

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import torch_ring as hvd

GLOBAL_BATCH = 64  # samples of all ranks together, for any number of ranks


@hvd.elastic.run  # 1: makes a new world when a rank has died, and calls train() again
def train(state: hvd.elastic.TorchState, dataset: TensorDataset, options) -> None:
    for state.epoch in range(state.epoch, options.epochs):  # 2: continues from the state
        loader = DataLoader(dataset, GLOBAL_BATCH // hvd.size(), sampler=state.sampler)
        loss = None  # stays None if a rank died after the epoch's last batch
        for batch, (images, labels) in enumerate(loader):
            state.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(state.model(images), labels)
            loss.backward()  # 3: the death of a rank is an error here, on all others
            state.optimizer.step()
            state.sampler.record_batch(batch, len(images))  # 4: counts the samples of all ranks
            state.check_host_updates()  # 5: lets new processes of the launcher join
            time.sleep(options.pause)
        if hvd.rank() == 0 and loss is not None:
            print(f"epoch {state.epoch} on {hvd.size()} ranks: loss {loss.item():.4f}", flush=True)
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
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(dataset)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)  # 6

    train(state, dataset, options)
    if hvd.rank() == 0:
        with torch.no_grad():
            found = model(images[1500:]).argmax(1)
        accuracy = (found == labels[1500:]).float().mean().item()
        print(f"{hvd.size()} ranks have ended; accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
