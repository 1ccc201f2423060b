# SPDX-License-Identifier: Apache-2.0
"""Digits, as users of Horovod's elastic training train them: with commits and a scaled rate."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import torch_ring as hvd


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    epochs = parser.parse_args().epochs
    rate, batches_per_commit, batches_per_host_check = 0.01, 5, 2

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    print(f"rank {hvd.rank()} is process {os.getpid()}", flush=True)

    inputs = torch.randn(512, 8)
    digits = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    train_set, test_set = torch.utils.data.random_split(digits, [384, 128])
    train_sampler = hvd.elastic.ElasticSampler(train_set)
    test_sampler = hvd.elastic.ElasticSampler(test_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=16, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=64, sampler=test_sampler)

    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2))
    optimizer = optim.SGD(model.parameters(), lr=rate * hvd.size(), momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def accuracy():
        model.eval()
        correct = 0.0
        with torch.no_grad():
            for data, target in test_loader:
                correct += (model(data).argmax(1) == target).float().sum().item()
        return hvd.allreduce(torch.tensor(correct / len(test_sampler)), name="accuracy").item()

    @hvd.elastic.run
    def full_train(state):
        while state.epoch < epochs:
            offset = state.batch
            model.train()
            for index, (data, target) in enumerate(train_loader):
                state.batch = offset + index
                if state.batch % batches_per_commit == 0:
                    state.commit()
                elif state.batch % batches_per_host_check == 0:
                    state.check_host_updates()
                optimizer.zero_grad()
                F.cross_entropy(model(data), target).backward()
                optimizer.step()
                state.train_sampler.record_batch(index, len(data))
            if hvd.rank() == 0:
                now = optimizer.param_groups[0]["lr"]
                print(f"epoch {state.epoch} on {hvd.size()} ranks, rate {now:g}", flush=True)
            state.epoch += 1
            state.batch = 0
            state.train_sampler.set_epoch(state.epoch)
            state.commit()

    def on_state_reset():
        for group in optimizer.param_groups:
            group["lr"] = rate * hvd.size()

    state = hvd.elastic.TorchState(
        model=model,
        optimizer=optimizer,
        train_sampler=train_sampler,
        test_sampler=test_sampler,
        epoch=0,
        batch=0,
    )
    state.register_reset_callbacks([on_state_reset])
    full_train(state)

    found = accuracy()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert all(torch.equal(weights, other) for other in hvd.allgather_object(weights))
    if hvd.rank() == 0:
        print(f"accuracy {found:.3f} on {hvd.size()} ranks", flush=True)


if __name__ == "__main__":
    main()
