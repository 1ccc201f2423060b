# SPDX-License-Identifier: Apache-2.0
"""torchdata's StatefulDataLoader: training stops in an epoch, and goes on with other ranks.

    torchrun --standalone --nproc-per-node 2 stateful_loader.py --checkpoint run.pt --stop-after 48
    torchrun --standalone --nproc-per-node 3 stateful_loader.py --checkpoint run.pt

Without options it trains to the end.
"""

import argparse
import hashlib
import signal
from itertools import islice

import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import torch_ring as hvd
from torch_ring import checkpoint

EPOCHS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--checkpoint", help="a file to begin from, if it is there, and to stop with"
    )
    parser.add_argument("--stop-after", type=int, help="steps; then the checkpoint is written")
    options = parser.parse_args()

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all ranks at once, and quietly
    hvd.init()
    torch.manual_seed(0)
    inputs = torch.randn(2304, 16)
    dataset = TensorDataset(torch.arange(len(inputs)), inputs, inputs.sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters()
    )
    sampler = hvd.data.ShardedSampler(dataset)
    loader = StatefulDataLoader(dataset, batch_size=32, sampler=sampler, num_workers=2)
    times = torch.zeros(len(dataset), dtype=torch.int64)  # of each sample, on this rank
    losses, begin = [], 0

    saved = checkpoint.load(options.checkpoint, default=None) if options.checkpoint else None
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # rank 0's, on any number of ranks
        losses, begin = saved["losses"], saved["epoch"]
        if hvd.rank() == 0:
            times = saved["times"]

    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        steps = options.stop_after and options.stop_after - len(losses)
        for index, x, y in islice(loader, steps):  # the rest of the epoch, after a resume
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            times[index] += 1
        if len(losses) == options.stop_after:
            break

    times = hvd.allreduce(times, op=hvd.Sum)
    if options.checkpoint:
        state = {"epoch": epoch, "losses": losses, "times": times, "loader": loader.state_dict()}
        state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint.save(options.checkpoint, state)  # rank 0 writes

    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    print(
        f"rank {hvd.rank()} of {hvd.size()} on ring: "
        f"loss {losses[0]:.4f} to {losses[-1]:.4f}, weights {digest}, "
        f"each sample {times.min()} to {times.max()} times",
        flush=True,
    )
    hvd.shutdown()


if __name__ == "__main__":
    main()
