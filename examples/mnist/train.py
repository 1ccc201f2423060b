"""Trains a small CNN on handwritten digits, on one process or on many.

    python train.py                          # alone
    torchrun --nproc-per-node 2 train.py     # on two processes
    mpirun -np 2 python train.py             # the same

Every rank runs this whole file. The lines with `hvd` are what makes it parallel.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from digits import load_digits, load_mnist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from tqdm import tqdm

import torch_ring as hvd

EPOCHS = {"mnist": 1, "digits": 10}
BATCH_SIZE = {"mnist": 64, "digits": 16}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small CNN on handwritten digits.")
    parser.add_argument("--dataset", choices=EPOCHS, default="mnist")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="where MNIST is put")
    parser.add_argument("--epochs", type=int, help=f"in all, also with --resume; {EPOCHS}")
    parser.add_argument("--batch-size", type=int, help=f"of a rank; {BATCH_SIZE}")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--amp", action="store_true", help="compute in 16 bits where that is safe")
    return parser.parse_args()


def make_model(pixels: int) -> nn.Module:
    """Return the classic CNN for images of `pixels` x `pixels`."""
    pooled = (pixels - 4) // 2  # a convolution takes off one pixel at every edge
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(64 * pooled**2, 128), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(128, 10),
    )
    return model.to(memory_format=torch.channels_last)  # faster on a CPU


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load it on rank 0, which wrote it; return how many epochs have been trained, on all ranks."""
    problem, epochs = None, 0
    if hvd.rank() == 0:
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            epochs = checkpoint["epochs"]
        except Exception as error:  # whatever it is, the others wait for rank 0's word below
            problem = f"cannot resume from {path}: {error}"
    problem, epochs = hvd.broadcast_object((problem, epochs), root_rank=0)
    if problem:
        sys.exit(problem if hvd.rank() == 0 else 1)  # all leave, one says why
    return epochs


@torch.no_grad()
def test(model: nn.Module, test_set: TensorDataset, device: torch.device) -> float:
    """Return the accuracy, over all ranks; each tests its share."""
    model.eval()
    share = Subset(test_set, range(hvd.rank(), len(test_set), hvd.size()))
    loader = DataLoader(share, 500)
    right = sum((model(x.to(device)).argmax(1).cpu() == y).sum() for x, y in loader)
    # Not inside the loop: shares differ in size, and a rank that had a batch more than the others
    # would wait for them in its last allreduce.
    return hvd.allreduce(torch.as_tensor(right), op=hvd.Sum).item() / len(test_set)


def main() -> None:
    args = parse_args()
    hvd.init()
    log = print if hvd.rank() == 0 else lambda *_, **__: None
    # The ranks of a host share its cores; more threads than cores would be slower.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    torch.manual_seed(hvd.rank())  # another dropout on every rank

    data = load_mnist(args.data_dir) if args.dataset == "mnist" else None
    dataset = "mnist" if data else "digits"
    train_set, test_set = data or load_digits()
    epochs = EPOCHS[dataset] if args.epochs is None else args.epochs
    batch_size = args.batch_size or BATCH_SIZE[dataset]

    device = torch.device(args.device)
    if args.device == "cuda":
        torch.cuda.set_device(hvd.local_rank())  # one process drives one GPU
    model = make_model(pixels=train_set.tensors[0].shape[-1]).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    trained = load_checkpoint(args.checkpoint, model, optimizer) if args.resume else 0
    for group in optimizer.param_groups:  # also after a checkpoint, of any number of ranks
        group["lr"] = 0.001 * hvd.size()  # a step learns from `size` batches
    # All start from rank 0's state. Averaged gradients keep equal weights equal; they do not make
    # different ones so.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    # Each rank trains on its share of the images, so that an epoch has `size` times fewer steps.
    # With drop_last all ranks have the same number of them: a rank with one more would wait there
    # for gradients that nobody sends.
    sampler = DistributedSampler(train_set, hvd.size(), hvd.rank(), drop_last=True)
    loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True)
    log(f"{dataset}: size {hvd.size()}, {len(loader)} steps an epoch, {batch_size} images a step")
    scaler = torch.amp.GradScaler(args.device, enabled=args.amp)
    autocast_dtype = torch.float16 if args.device == "cuda" else torch.bfloat16
    for epoch in range(trained, epochs):
        started, total = time.monotonic(), torch.zeros((), device=device)
        sampler.set_epoch(epoch)  # another order than in the last epoch, the same on all ranks
        model.train()
        for images, labels in tqdm(loader, f"epoch {epoch + 1}", disable=hvd.rank() != 0):
            optimizer.zero_grad()
            with torch.autocast(args.device, autocast_dtype, enabled=args.amp):
                loss = cross_entropy(model(images.to(device)), labels.to(device))
            # When it returns, the gradients are averages over the ranks.
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach()
        # All ranks call allreduce, and one prints: under `if rank == 0`, rank 0 would wait in it
        # for the others.
        loss = hvd.allreduce(total / len(loader))
        log(f"epoch {epoch + 1}: loss {loss:.4f}, {time.monotonic() - started:.1f} s", flush=True)
        if hvd.rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epochs": epoch + 1}, f"{args.checkpoint}.new")
            os.replace(f"{args.checkpoint}.new", args.checkpoint)  # killed here, the old one stays

    accuracy = test(model, test_set, device)
    log(f"test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
