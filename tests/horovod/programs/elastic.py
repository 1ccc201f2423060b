# SPDX-License-Identifier: Apache-2.0
"""Digits, as users of Horovod's elastic training train them: with commits and a scaled rate."""

import argparse
import os

import torch
import torch.nn.functional as F
from mnist import Net, images, metric_average
from torch import optim
from torch.utils.data import DataLoader

import torch_ring as hvd


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batches-per-commit", type=int, default=5)
    parser.add_argument("--batches-per-host-check", type=int, default=2)
    args = parser.parse_args(argv)

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    print(f"rank {hvd.rank()} is process {os.getpid()}", flush=True)

    train_set, test_set = images(384, 1), images(128, 2)
    train_sampler = hvd.elastic.ElasticSampler(train_set)
    test_sampler = hvd.elastic.ElasticSampler(test_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=64, sampler=test_sampler)

    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def accuracy():
        model.eval()
        correct = 0.0
        with torch.no_grad():
            for data, target in test_loader:
                correct += (model(data).argmax(1) == target).float().sum().item()
        return metric_average(correct / len(test_sampler), "avg_accuracy")

    @hvd.elastic.run
    def full_train(state):
        while state.epoch < args.epochs:
            offset = state.batch
            model.train()
            for index, (data, target) in enumerate(train_loader):
                state.batch = offset + index
                if state.batch % args.batches_per_commit == 0:
                    state.commit()
                elif state.batch % args.batches_per_host_check == 0:
                    state.check_host_updates()
                optimizer.zero_grad()
                F.nll_loss(model(data), target).backward()
                optimizer.step()
                state.train_sampler.record_batch(index, len(data))
            if hvd.rank() == 0:
                rate = optimizer.param_groups[0]["lr"]
                print(f"epoch {state.epoch} on {hvd.size()} ranks, rate {rate:g}", flush=True)
            state.epoch += 1
            state.batch = 0
            state.train_sampler.set_epoch(state.epoch)
            state.commit()

    def on_state_reset():
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

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
