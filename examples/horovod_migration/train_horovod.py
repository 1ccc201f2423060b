# SPDX-License-Identifier: Apache-2.0
"""Trains a small CNN on scikit-learn's digits, as programs for Horovod do it.

The same program twice: one imports horovod.torch, the other torch_ring, as `hvd`.
"""

import argparse
import os
import signal
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd

PROGRAM = "examples/horovod_migration"  # it resumes from no other's checkpoint

parser = argparse.ArgumentParser(description="Digits, data-parallel")
parser.add_argument("--batch-size", type=int, default=16, help="images of a rank in a step")
parser.add_argument("--epochs", type=int, default=10, help="in all, also with --resume")
parser.add_argument("--lr", type=float, default=0.02, help="for one rank")
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--clip", type=float, help="norm that gradients are clipped to")
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
parser.add_argument("--use-adasum", action="store_true", help="combine by adaptive summation")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--checkpoint", default="horovod_migration.pt")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
parser.add_argument("--plot", help="a picture, such as training.png")
parser.add_argument("--tensorboard", help="a folder for TensorBoard")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--smoke", action="store_true", help="one epoch, as a test")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3)
        self.drop = nn.Dropout(0.25)
        self.fc1 = nn.Linear(128, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(self.drop(x.flatten(1))))
        return F.log_softmax(self.fc2(x), dim=1)


def datasets():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    # The same seed on all ranks: otherwise a rank would test on training samples of another.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(model, optimizer, loader, sampler, epoch, args):
    model.train()
    sampler.set_epoch(epoch)  # another order in every epoch, the same on all ranks
    total = 0.0
    for data, target in loader:
        data, target = data.to(args.device), target.to(args.device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        if args.clip:
            # Horovod averages in step(). To clip averages, a program calls synchronize() before,
            # and skip_synchronize() so that step() does not average again.
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        total += loss.item()
    return metric_average(total / len(loader), "train_loss")


@torch.no_grad()
def test(model, loader, sampler, args):
    model.eval()
    loss, correct = 0.0, 0.0
    for data, target in loader:
        data, target = data.to(args.device), target.to(args.device)
        output = model(data)
        loss += F.nll_loss(output, target, reduction="sum").item()
        correct += (output.argmax(1) == target).float().sum().item()
    loss = metric_average(loss / len(sampler), "test_loss")
    return loss, metric_average(correct / len(sampler), "test_accuracy")


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all ranks at once, and quietly
    args = parser.parse_args()
    if args.smoke:
        args.epochs = 1
    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the ranks of a host share its cores
    if args.device == "cuda":
        # One process drives one GPU; it may see one alone, or all GPUs of the host.
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

    train_set, test_set = datasets()
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_set, batch_size=100, sampler=test_sampler)

    model = Net().to(args.device)
    # A step averages `size` batches, so it may be `size` times as large; not with Adasum.
    lr = args.lr * (1 if args.use_adasum else hvd.size())
    optimizer = optim.SGD(model.parameters(), lr=lr, momentum=args.momentum)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    # Rank 0 has written the checkpoint and reads it; the other ranks get the state by broadcast.
    history, problem = [], None
    if args.resume and hvd.rank() == 0:
        try:
            checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
            if checkpoint.get("program") != PROGRAM:
                problem = f"cannot resume: {args.checkpoint} is of another program"
        except Exception as error:  # of any type: the other ranks wait for the outcome
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            problem = f"cannot resume: {args.checkpoint}: {reason}"
    # All ranks end, one says why: if only rank 0 ended, the others would wait for it.
    if problem := hvd.broadcast_object(problem, root_rank=0, name="problem"):
        sys.exit(problem if hvd.rank() == 0 else 1)
    if args.resume and hvd.rank() == 0:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        for group in optimizer.param_groups:  # the checkpoint's was for its number of ranks
            group["lr"] = lr
        history = checkpoint["history"]
    first_epoch = hvd.broadcast(torch.tensor(len(history)), root_rank=0, name="epochs").item()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    writer = None
    if args.tensorboard and hvd.rank() == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(args.tensorboard)
    for epoch in range(first_epoch, args.epochs):
        # All ranks average, rank 0 prints and saves.
        train_loss = train(model, optimizer, train_loader, train_sampler, epoch, args)
        test_loss, accuracy = test(model, test_loader, test_sampler, args)
        if hvd.rank() != 0:
            continue
        print(
            f"epoch {epoch + 1}: loss {train_loss:.4f}, "
            f"test loss {test_loss:.4f}, test accuracy {accuracy:.4f}",
            flush=True,
        )
        history.append((train_loss, test_loss, accuracy))
        if writer:
            writer.add_scalar("loss/train", train_loss, epoch + 1)
            writer.add_scalar("loss/test", test_loss, epoch + 1)
            writer.add_scalar("accuracy/test", accuracy, epoch + 1)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"program": PROGRAM, "history": history}
        torch.save(state, args.checkpoint + ".new")
        os.replace(args.checkpoint + ".new", args.checkpoint)  # a job killed here keeps the old one
    if writer:
        writer.close()
    if args.plot and hvd.rank() == 0:
        plot(args.plot, history)


def plot(path, history):
    import matplotlib

    matplotlib.use("Agg")  # a file, no window: the machine may have no display
    from matplotlib import pyplot

    epochs = range(1, len(history) + 1)
    train_losses, test_losses, accuracies = zip(*history, strict=True)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.semilogy(epochs, train_losses, label="training")
    left.semilogy(epochs, test_losses, label="test")
    left.set(xlabel="epoch", ylabel="loss")
    left.legend()
    right.plot(epochs, accuracies)
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    right.set(xlabel="epoch", ylabel="test accuracy")
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    main()
