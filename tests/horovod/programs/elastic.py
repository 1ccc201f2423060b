# SPDX-License-Identifier: Apache-2.0
"""A small net, as users of Horovod's elastic training train it: with commits and a scaled rate."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import torch_ring as hvd

RATE, BATCHES_PER_COMMIT, BATCHES_PER_HOST_CHECK = 0.01, 5, 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    epochs = parser.parse_args().epochs

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    print(f"rank {hvd.rank()} is process {os.getpid()}", flush=True)

    inputs = torch.randn(384, 8)
    labels = (inputs.sum(1) > 0).long()
    data = TensorDataset(inputs, labels)
    sampler = hvd.elastic.ElasticSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2))
    optimizer = optim.SGD(model.parameters(), lr=RATE * hvd.size(), momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def full_train(state):
        while state.epoch < epochs:
            offset = state.batch
            for index, (rows, target) in enumerate(loader):
                state.batch = offset + index
                if state.batch % BATCHES_PER_COMMIT == 0:
                    state.commit()
                elif state.batch % BATCHES_PER_HOST_CHECK == 0:
                    state.check_host_updates()
                optimizer.zero_grad()
                F.cross_entropy(model(rows), target).backward()
                optimizer.step()
                state.sampler.record_batch(index, len(rows))
            if hvd.rank() == 0:
                rate = optimizer.param_groups[0]["lr"]
                print(f"epoch {state.epoch} on {hvd.size()} ranks, rate {rate:g}", flush=True)
            state.epoch += 1
            state.batch = 0
            state.sampler.set_epoch(state.epoch)
            state.commit()

    def on_state_reset():
        for group in optimizer.param_groups:
            group["lr"] = RATE * hvd.size()

    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0
    )
    state.register_reset_callbacks([on_state_reset])
    full_train(state)

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert all(torch.equal(weights, other) for other in hvd.allgather_object(weights))
    if hvd.rank() == 0:
        found = (model.eval()(inputs).argmax(1) == labels).float().mean()
        print(f"accuracy {found:.3f} on {hvd.size()} ranks", flush=True)


if __name__ == "__main__":
    main()
