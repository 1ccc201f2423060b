# SPDX-License-Identifier: Apache-2.0
"""A ResNet as Horovod's users train it: warm-up, several batches an allreduce, resume, metrics."""

import argparse
import math
import os
import tempfile

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import torch_ring as hvd


class Block(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.conv1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + x)


def tiny_resnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        Block(8),
        Block(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


class Metric:
    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = torch.tensor(0.0)

    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    pictures = 0.5 * torch.randn(count, 3, 12, 12, generator=generator)
    for index, label in enumerate(labels.tolist()):
        pictures[index, label % 3, 6 * (label // 3) :] += 1.5
    return TensorDataset(pictures, labels)


def parse(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches-per-allreduce", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--base-lr", type=float, default=0.02)
    parser.add_argument("--warmup-epochs", type=float, default=1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=0.00005)
    parser.add_argument("--checkpoint-format", default=None)
    parser.add_argument("--fp16-allreduce", action="store_true")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    allreduce_batch_size = args.batch_size * args.batches_per_allreduce
    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, root_rank=0)
    checkpoint_format = os.path.join(folder, "checkpoint-{epoch}.pth.tar")
    verbose = hvd.rank() == 0

    train_dataset = data(256, 1)
    train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(
        train_dataset, batch_size=allreduce_batch_size, sampler=train_sampler, num_workers=0
    )

    for run in range(2):  # a job, and one that resumes it
        resume_from_epoch = 0
        for try_epoch in range(args.epochs, 0, -1):
            if os.path.exists(checkpoint_format.format(epoch=try_epoch)):
                resume_from_epoch = try_epoch
                break
        resume_from_epoch = hvd.broadcast(
            torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch"
        ).item()
        assert resume_from_epoch == (args.epochs if run else 0)

        model = tiny_resnet()
        lr_scaler = args.batches_per_allreduce * hvd.size()
        optimizer = optim.SGD(
            model.parameters(),
            lr=args.base_lr * lr_scaler,
            momentum=args.momentum,
            weight_decay=args.wd,
        )
        compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=compression,
            backward_passes_per_step=args.batches_per_allreduce,
            op=hvd.Average,
            gradient_predivide_factor=1.0,
        )
        if resume_from_epoch > 0 and hvd.rank() == 0:
            checkpoint = torch.load(checkpoint_format.format(epoch=resume_from_epoch))
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)

        for epoch in range(resume_from_epoch, args.epochs + run):
            model.train()
            train_sampler.set_epoch(epoch)
            train_loss, train_accuracy = Metric("train_loss"), Metric("train_accuracy")
            with tqdm(total=len(train_loader), desc=f"Epoch #{epoch + 1}", disable=True) as bar:
                for batch_idx, (pictures, target) in enumerate(train_loader):
                    adjust_learning_rate(optimizer, epoch, batch_idx, len(train_loader), args)
                    optimizer.zero_grad()
                    for i in range(0, len(pictures), args.batch_size):
                        part = pictures[i : i + args.batch_size]
                        part_target = target[i : i + args.batch_size]
                        output = model(part)
                        train_accuracy.update((output.argmax(1) == part_target).float().mean())
                        loss = F.cross_entropy(output, part_target)
                        train_loss.update(loss)
                        loss.div_(math.ceil(float(len(pictures)) / args.batch_size))
                        loss.backward()
                    optimizer.step()
                    bar.update(1)
            if hvd.rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, checkpoint_format.format(epoch=epoch + 1))
        if verbose:
            print(f"loss {train_loss.avg.item():.4f}, accuracy {train_accuracy.avg.item():.3f}")
    assert train_accuracy.avg > 0.85, train_accuracy.avg
    assert len(set(hvd.allgather_object(train_loss.avg.item()))) == 1


def adjust_learning_rate(optimizer, epoch, batch_idx, batches, args):
    if epoch < args.warmup_epochs:
        epoch += float(batch_idx + 1) / batches
        lr_adj = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    else:
        lr_adj = 1.0
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * lr_adj


if __name__ == "__main__":
    main()
