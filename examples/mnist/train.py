# SPDX-License-Identifier: Apache-2.0
"""Trains a small CNN on handwritten digits, on one process or on many.

    python train.py                          # alone
    torchrun --nproc-per-node 2 train.py     # on two processes
    mpirun -np 2 python train.py             # the same

Every rank runs this whole file. The lines with `hvd` make it parallel.
"""

import os
import signal
import sys

import torch
from digits import load_data
from model import make_model
from options import parse_args
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torch_ring as hvd


@torch.no_grad()
def test(model: nn.Module, test_set: TensorDataset, device: str) -> float:
    """Return the accuracy on the whole test set; each rank tests its share."""
    model.eval()
    mean = hvd.metrics.Mean()
    sampler = hvd.data.ShardedSampler(test_set, shuffle=False)
    for images, labels in DataLoader(test_set, 500, sampler=sampler):
        right = model(images.to(device)).argmax(1) == labels.to(device)
        mean.update(right.double().mean(), len(labels))
    # Not in the loop: shares differ in size, and a rank with one batch more would wait in it.
    return mean.compute()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all ranks at once, and quietly
    args = parse_args()
    hvd.init()
    hvd.preemption.watch()  # SIGTERM or SIGUSR1 to a rank: all stop after the same epoch
    is_first = hvd.rank() == 0
    log = print if is_first else lambda *_, **__: None
    # The ranks of a host share its cores; more threads than cores would be slower.
    on_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // hvd.local_size()))
    torch.manual_seed(hvd.rank())  # another dropout on every rank
    if args.device == "cuda":
        # One process drives one GPU; it may see one alone, or all GPUs of the host.
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

    data = load_data(args.dataset, args.data_dir)
    epochs, batch_size = args.epochs or data.epochs, args.batch_size or data.batch_size
    # Each rank trains on its share of the images, so an epoch has `size` times fewer steps.
    # drop_last, twice: all ranks have equally many batches, and all batches are full. A rank with
    # one batch more would wait in it for gradients that no other rank sends.
    sampler = hvd.data.ShardedSampler(data.train, drop_last=True)
    loader = DataLoader(data.train, batch_size, sampler=sampler, drop_last=True)
    steps = len(loader)

    model = make_model(data.pixels).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    # A step averages `size` batches, so it may be larger, but not while the weights are random: the
    # learning rate rises from `lr` to `size` x `lr`.
    schedule = hvd.lr_schedules.WarmupLR(optimizer, args.warmup_epochs, steps_per_epoch=steps)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    program = f"examples/mnist on {data.name}"  # it resumes only from its own checkpoints
    history = []  # a row for each epoch
    if args.resume:
        try:
            state = hvd.checkpoint.load(args.checkpoint)  # rank 0 reads it and sends it to all
            if (other := state.get("program", "another program")) != program:
                raise ValueError(f"it is of {other}, not of {program}")
            for name, part in parts.items():
                part.load_state_dict(state[name])
            history = state["history"]
        except (RuntimeError, ValueError, KeyError) as error:  # all ranks have the same error
            sys.exit(f"cannot resume from {args.checkpoint}: {error}" if is_first else 1)
    # All ranks start from rank 0's weights: averaged gradients only keep equal weights equal.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    log(f"{data.name}: size {hvd.size()}, {steps} steps an epoch, {batch_size} images a step")
    for epoch in range(len(history), epochs):
        model.train()
        mean_loss = hvd.metrics.Mean()
        sampler.set_epoch(epoch)  # another order in every epoch, the same on all ranks
        for images, labels in tqdm(loader, f"epoch {epoch + 1}", disable=not is_first):
            optimizer.zero_grad()
            loss = cross_entropy(model(images.to(args.device)), labels.to(args.device))
            loss.backward()  # when it returns, the gradients are averages over all ranks
            optimizer.step()
            schedule.step()
            mean_loss.update(loss, len(labels))
        # All ranks average, test and save; rank 0 prints. Under `if is_first`, rank 0 would wait
        # for the others in each of these calls.
        loss, accuracy = mean_loss.compute(), test(model, data.test, args.device)
        history.append({"loss": loss, "accuracy": accuracy})
        states = {name: part.state_dict() for name, part in parts.items()}
        states |= {"program": program, "history": history}
        hvd.checkpoint.save(args.checkpoint, states)  # rank 0 writes it
        log(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
        if hvd.preemption.requested() and epoch + 1 < epochs:
            hvd.barrier()  # a rank that exits earlier may have the launcher end the others
            sys.exit(128 + signal.SIGTERM)
    log(f"test accuracy {history[-1]['accuracy']:.4f}")


if __name__ == "__main__":
    main()
