"""Trains a small CNN on handwritten digits, on one process or on many.

    python train.py                                     # alone
    torchrun --nproc-per-node 2 train.py                # on two processes
    mpirun -np 2 python train.py                        # the same
    torchrun --nproc-per-node 4 train.py --ensemble     # four models, which then vote

Every rank runs this whole file. The lines with `hvd` are what makes it parallel.
"""

import argparse
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from digits import load_digits, load_mnist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torch_ring as hvd
from torch_ring import checkpoint
from torch_ring.data import InputPipeline, ShardedSampler
from torch_ring.lr_schedules import WarmupLR
from torch_ring.metrics import Means
from torch_ring.state import broadcast_nested

EPOCHS = {"mnist": 1, "digits": 10}
BATCH_SIZE = {"mnist": 64, "digits": 16}
SMOKE = {"dataset": "digits", "epochs": 1, "report_steps": 1}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small CNN on handwritten digits.")
    add = parser.add_argument
    add("--dataset", choices=EPOCHS, default="mnist")
    add("--data-dir", type=Path, default=Path("data"), help="where MNIST is put")
    add("--data", choices=["real", "cached", "synthetic"], default="real", help="see README.md")
    add("--epochs", type=int, help=f"in all, also with --resume; {EPOCHS}")
    add("--batch-size", type=int, help=f"of a rank; {BATCH_SIZE}")
    add("--lr", type=float, default=0.001, help="right for one rank")
    add("--warmup-epochs", type=float, default=0.5, help="in which the rate rises to size x lr")
    add("--ensemble", action="store_true", help="a model of its own on every rank, on all data")
    add("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    add("--resume", action="store_true", help="go on from the checkpoint")
    add("--tensorboard", type=Path, metavar="DIR")
    add("--plot", type=Path, metavar="FILE", help="draw loss and accuracy")
    add("--report-steps", type=int, default=100, metavar="N", help="of each kind of data; 0: none")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cpu", "cuda"], default=default)
    add("--amp", action="store_true", help="compute in 16 bits where that is safe")
    add("--smoke", action="store_true", help="other defaults, for a try in seconds")
    if "--smoke" in sys.argv:
        parser.set_defaults(**SMOKE)
    args = parser.parse_args()
    if any(value is not None and value < 1 for value in (args.epochs, args.batch_size)):
        parser.error("--epochs and --batch-size must be 1 or more")
    for option, package in {"tensorboard": "tensorboard", "plot": "matplotlib"}.items():
        if getattr(args, option) and not find_spec(package):  # known now, on all ranks
            parser.error(f"--{option} needs {package}: pip install {package}")
    return args


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


@torch.no_grad()
def test(model: nn.Module, test_set: TensorDataset, args: argparse.Namespace) -> dict[str, float]:
    """Return the accuracy over the whole test set, and that of an ensemble's members."""
    model.eval()
    means = Means("accuracy", *(["members"] if args.ensemble else []))
    # Of one model each rank tests its share. Members of an ensemble all test all images.
    sampler = None if args.ensemble else ShardedSampler(test_set, shuffle=False)
    for images, labels in DataLoader(test_set, 500, sampler=sampler):
        votes = model(images.to(args.device)).softmax(1).cpu()
        if args.ensemble:
            means.update(len(labels), members=(votes.argmax(1) == labels).double().mean())
            votes = hvd.allreduce(votes)  # the mean over the members, which have equal batches
        means.update(len(labels), accuracy=(votes.argmax(1) == labels).double().mean())
    # Shares differ in size: in the loop, a rank with a batch more than the others would wait here.
    return means.compute()


def draw(history: list[dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.8), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    epochs = range(1, len(history) + 1)
    for key in history[0]:
        axes = loss if key == "loss" else accuracy
        axes.plot(epochs, [row[key] for row in history], ".-", label=key)
    loss.set(xlabel="epoch", ylabel="training loss")
    accuracy.set(xlabel="epoch", ylabel="test accuracy")
    accuracy.legend()
    figure.savefig(path, dpi=80)


def main() -> None:
    args = parse_args()
    hvd.init()
    is_first = hvd.rank() == 0
    log = print if is_first else lambda *_, **__: None
    # The ranks of a host share its cores; more threads than cores would be slower.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    torch.manual_seed(hvd.rank())  # another dropout on every rank, and another member

    data = load_mnist(args.data_dir) if args.dataset == "mnist" else None
    dataset = "mnist" if data else "digits"
    train_set, test_set = data or load_digits()
    epochs = args.epochs or EPOCHS[dataset]
    batch_size = args.batch_size or BATCH_SIZE[dataset]
    # Each rank trains on its share of the images, so that an epoch has `size` times fewer steps.
    # With drop_last all ranks have the same number of them: a rank with one more would wait there
    # for gradients that nobody sends. A member of an ensemble takes all, in an order of its own.
    sampler = None if args.ensemble else ShardedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, batch_size, args.ensemble, sampler, drop_last=True)
    pipeline = InputPipeline(loader, args.device, args.data)
    steps = len(loader)

    if args.device == "cuda":
        torch.cuda.set_device(hvd.local_rank())  # one process drives one GPU
    model = make_model(pixels=train_set.tensors[0].shape[-1]).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    # A step that learns from `size` batches may be longer, but not while the weights are random.
    scale = 1 if args.ensemble else hvd.size()
    schedule = WarmupLR(optimizer, args.warmup_epochs, steps_per_epoch=steps, scale=scale)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if sampler:
        parts["sampler"] = sampler
    history: list[dict[str, float]] = []
    if args.resume:
        try:
            state = checkpoint.load(args.checkpoint)  # rank 0 reads it, and all get it
            members = state.get("members", [])
            if len(members) != (hvd.size() if args.ensemble else 0):
                raise ValueError(f"it holds an ensemble of {len(members)}")
            state = members[hvd.rank()] if args.ensemble else state
            for name, part in parts.items():
                part.load_state_dict(state[name])
            history = state["history"]
        except (RuntimeError, ValueError, KeyError) as error:  # on all ranks: they have the same
            sys.exit(f"cannot resume from {args.checkpoint}: {error}" if is_first else 1)
    if not args.ensemble:
        # All start from rank 0's weights. Averaged gradients keep equal weights equal; they do not
        # make different ones so.
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scaler = torch.amp.GradScaler(args.device, enabled=args.amp)
    autocast_dtype = torch.float16 if args.device == "cuda" else torch.bfloat16
    means = Means("loss")

    def train_step(batch: list[torch.Tensor]) -> None:
        images, labels = batch
        optimizer.zero_grad()
        with torch.autocast(args.device, autocast_dtype, enabled=args.amp):
            loss = cross_entropy(model(images), labels)
        # When it returns, the gradients are averages over the ranks.
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        means.update(len(labels), loss=loss)

    writer = None
    if args.tensorboard and is_first:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(args.tensorboard)
    log(f"{dataset}: size {hvd.size()}, {steps} steps an epoch, {batch_size} images a step")
    for epoch in range(len(history), epochs):
        started = time.monotonic()
        model.train()
        means.reset()
        for batch in tqdm(pipeline, f"epoch {epoch + 1}", disable=not is_first):
            train_step(batch)
            schedule.step()
        # All ranks compute, test and save, and one prints: under `if is_first`, rank 0 would wait
        # for the others.
        row = {**means.compute(), **test(model, test_set, args)}
        history.append(row)
        state = {name: part.state_dict() for name, part in parts.items()} | {"history": history}
        if args.ensemble:  # to rank 0 and so to all, as it writes them into one file
            state = {"members": [broadcast_nested(state, rank) for rank in range(hvd.size())]}
        checkpoint.save(args.checkpoint, state)
        log(f"epoch {epoch + 1}:", *(f"{key} {value:.4f}," for key, value in row.items()), end=" ")
        log(f"{time.monotonic() - started:.1f} s", flush=True)
        for key in row if writer else []:
            writer.add_scalar(key, row[key], epoch + 1)
    if writer:
        writer.close()
    if args.plot and is_first:
        draw(history, args.plot)
    # It trains on, to compare kinds of data; what was to be kept is on the disk.
    model.train()
    compared, rounds = train_step if args.report_steps else None, min(5, args.report_steps or 1)
    log(pipeline.report(compared, steps=max(1, args.report_steps // rounds), rounds=rounds))
    if args.ensemble:
        log(f"members' accuracy {history[-1]['members']:.4f} on average")
    log(f"test accuracy {history[-1]['accuracy']:.4f}")


if __name__ == "__main__":
    main()
