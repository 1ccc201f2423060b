# SPDX-License-Identifier: Apache-2.0
"""Trains a small character-level GPT on a text, on one process or on many.

    python train.py                          # alone
    torchrun --nproc-per-node 2 train.py     # on two processes
    mpirun -np 2 python train.py             # the same

Every rank runs this whole file. `--batch-size` is that of all ranks together, so any number of
ranks learns the same.
"""

import argparse
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from curves import Curves
from model import GPT
from text import Text, Windows, load_text
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset

import torch_ring as hvd
from torch_ring import checkpoint
from torch_ring.data import InputPipeline, ShardedSampler
from torch_ring.lr_schedules import cosine_decay
from torch_ring.metrics import Mean

SMOKE = {
    **{"context": 32, "layers": 2, "heads": 2, "width": 32, "batch_size": 12, "steps": 20},
    **{"warmup": 5, "log_every": 5, "checkpoint_every": 10, "sample": 40},
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a character-level GPT on a text.")
    add = parser.add_argument
    add("--text", type=Path, help="a file in UTF-8; default: the manual inside Python")
    add("--context", type=int, default=64, help="characters that the model sees")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=128)
    add("--steps", type=int, default=1000, help="in all, also with --resume")
    add("--batch-size", type=int, default=48, help="sequences of all ranks together in one step")
    add("--accumulate", type=int, default=1, help="backward passes of a rank in one step")
    add("--lr", type=float, default=3e-3, help="at the end of the warm-up")
    add("--warmup", type=int, default=50, help="steps")
    text = "average gradients inside hosts, and agree between them after so many steps"
    add("--diloco", type=int, metavar="STEPS", help=text)
    add("--clip", type=float, default=1.0, help="the largest norm of all gradients together")
    add("--data", choices=["real", "cached", "synthetic"], default="real")
    add("--workers", type=int, default=0, help="processes that load data, of a rank")
    text = "report on the input pipeline, by N more steps with each kind of data; 0: by none"
    add("--report-steps", type=int, metavar="N", help=text)
    add("--log-every", type=int, default=10, metavar="STEPS")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS", help="also validates")
    add("--checkpoint", type=Path, default=Path("language_model.pt"))
    add("--resume", action="store_true", help="go on from the checkpoint")
    add("--sample", type=int, default=400, help="characters that the model writes at the end")
    add("--json", type=Path, help="write the losses into this JSON file")
    add("--plot", type=Path, help="draw them into this PNG file")
    add("--tensorboard", type=Path, help="write them into this folder, for TensorBoard")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cpu", "cuda"], default=default)
    add("--amp", choices=["bfloat16", "float16"], help="compute in 16 bits where that is safe")
    add("--smoke", action="store_true", help=f"seconds, not minutes: {SMOKE}")
    if parser.parse_args().smoke:
        parser.set_defaults(**SMOKE)
    return parser.parse_args()


def leave(problem: object) -> NoReturn:
    """End the program. All ranks have found the problem and call this; rank 0 prints it."""
    sys.exit(str(problem) if hvd.rank() == 0 else 1)


def load_data(args: argparse.Namespace) -> tuple[Text, DataLoader[Tensor], DataLoader[Tensor]]:
    """Return the text, a rank's batches for training, and its share of those for validation."""
    text = load_text(args.text)
    windows = Windows(text.characters, args.context)
    split = len(windows) - min(512, len(windows) // 10)  # the last ones are for validation
    train_set = Subset(windows, range(split))
    share = Subset(windows, range(split + hvd.rank(), len(windows), hvd.size()))
    batch_size = args.batch_size // hvd.size()
    # The sampler deals an epoch's windows round-robin: in each step, n ranks with batches of B / n
    # together have the windows that one rank with a batch of B has.
    sampler = ShardedSampler(train_set, drop_last=True)
    loader = DataLoader(
        train_set, batch_size, sampler=sampler, drop_last=True, num_workers=args.workers
    )
    return text, loader, DataLoader(share, batch_size)


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW that decays matrices, and leaves biases and the scales of norms alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, args.lr, (0.9, 0.95), weight_decay=0.1)
    # The gradients of a step's backward passes add up; the last pass averages them over the ranks.
    # (`no_sync()` is for steps with different numbers of passes.)
    host, one_of_each_host = hvd.hierarchy() if args.diloco else (hvd.global_process_set, None)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.accumulate,
        process_set=host,
    )
    if args.diloco:
        optimizer = hvd.DiLoCo(optimizer, every=args.diloco, process_set=one_of_each_host)
    return optimizer


def make_schedule(optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> LambdaLR:
    """Rise linearly, fall to a tenth; the same on any number of ranks, whose batch is the same."""
    decay = cosine_decay(args.warmup, max(args.steps, args.warmup + 1), floor=0.1)
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (args.warmup + 1)) * decay(step))


def loss_of(model: nn.Module, windows: Tensor, args: argparse.Namespace) -> Tensor:
    """Return the mean loss of each character of (batch, context + 1) given those before it."""
    dtype = torch.float16 if args.amp == "float16" else torch.bfloat16
    with torch.autocast(args.device, dtype, enabled=args.amp is not None):
        logits = model(windows[:, :-1])
        return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader[Tensor], args: argparse.Namespace) -> float:
    """Return the mean loss over all ranks; each computes its share."""
    mean = Mean()
    for windows in loader:
        mean.update(loss_of(model, windows.to(args.device), args), len(windows))
    # Not in the loop: shares differ in size, and a rank with one batch more would wait in it.
    return mean.compute()


def restore(path: Path, parts: dict[str, Any], identity: dict[str, Any]) -> int:
    """Load a checkpoint into the parts, on all ranks; return the number of steps done."""
    try:
        state = checkpoint.load(path)  # rank 0 reads it and sends it to all
    except checkpoint.CheckpointError as error:
        leave(error)
    if {name: state.get(name) for name in identity} != identity:
        leave(f"{path} is of another program, of another model, or of another text")
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return state["step"]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all ranks at once, and quietly
    args = parse_args()
    hvd.init()
    hvd.preemption.watch()  # SIGTERM or SIGUSR1 to a rank: all stop at one step, and save it
    log = partial(print, flush=True) if hvd.rank() == 0 else lambda *_, **__: None
    # The ranks of a host share its cores; more threads than cores would be slower.
    on_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // hvd.local_size()))
    if args.device == "cuda":
        # One process drives one GPU; it may see one alone, or all GPUs of the host.
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    if args.batch_size % (hvd.size() * args.accumulate):
        passes = f"{hvd.size()} ranks x {args.accumulate} passes"
        leave(f"--batch-size {args.batch_size} cannot be divided among {passes}")
    text, loader, validation = load_data(args)
    if len(loader) == 0:
        leave(f"{len(text.characters)} characters are too few for a batch of {args.batch_size}")

    torch.manual_seed(0)
    shape = [len(text.vocabulary), args.context, args.layers, args.heads, args.width]
    model = GPT(*shape).to(args.device)
    # All ranks start from rank 0's weights: averaged gradients only keep equal weights equal.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = make_optimizer(model, args)
    schedule = make_schedule(optimizer, args)
    scaler = torch.amp.GradScaler(args.device, enabled=args.amp == "float16")
    curves = Curves(hvd.size(), args.tensorboard if hvd.rank() == 0 else None)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    parts |= {"sampler": loader.sampler, "curves": curves}
    identity = {"shape": shape, "vocabulary": text.vocabulary}
    step = restore(args.checkpoint, parts, identity) if args.resume else 0
    train_loss = Mean()

    def train(windows: Tensor) -> Tensor:
        optimizer.zero_grad()
        for part in windows.chunk(args.accumulate):
            loss = loss_of(model, part, args)
            train_loss.update(loss, len(part))
            scaler.scale(loss / args.accumulate).backward()
        # The gradients are averages over the ranks now, so all ranks clip and skip steps alike.
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        return norm

    count = sum(parameter.numel() for parameter in model.parameters())
    steps = len(loader.dataset) // args.batch_size
    log(f"size {hvd.size()}: {len(text.characters)} characters, {steps} steps an epoch,", end=" ")
    log(f"{count} parameters, {loader.batch_size} x {args.context} characters of a rank in a step")
    pipeline = InputPipeline(loader, args.device, args.data)

    def save() -> None:
        state = {name: part.state_dict() for name, part in parts.items()}
        checkpoint.save(args.checkpoint, {"step": step, **identity, **state})

    started, tokens = time.monotonic(), 0
    while step < args.steps:
        for windows in pipeline:
            norm = train(windows)
            step += 1
            tokens += args.batch_size * args.context
            is_last = step == args.steps
            if is_last or step % args.log_every == 0:
                # All ranks compute the mean, rank 0 prints it: under `if rank == 0`, rank 0 would
                # wait for the others.
                curves.add("training loss", step, train_loss.compute())
                train_loss.reset()
                curves.add("gradient norm", step, norm.item())
                rate = tokens / (time.monotonic() - started)
                report = curves.last("training loss", "gradient norm")
                log(f"step {step}: {report}, {rate:.0f} tokens/s")
                started, tokens = time.monotonic(), 0
            if is_last or step % args.checkpoint_every == 0:
                if args.diloco:
                    optimizer.end_round()  # all ranks validate, and rank 0 saves, the same weights
                curves.add("validation loss", step, validate(model, validation, args))
                log(f"step {step}: {curves.last('validation loss')}")
                save()
                started, tokens = time.monotonic(), 0
            if is_last:
                break
            if hvd.preemption.requested():
                if args.diloco:
                    optimizer.end_round()
                save()
                hvd.barrier()  # a rank that exits earlier may have the launcher end the others
                sys.exit(128 + signal.SIGTERM)

    if hvd.rank() == 0:  # no collective in here: rank 0 waits for no other rank
        prompt = text.characters[-2 * args.context : -args.context].to(args.device).long()
        print(f"--- the model writes:\n{text.decode(model.generate(prompt, args.sample))}\n---")
        curves.write(args.json, args.plot)
    if args.report_steps is not None:  # last: it trains on, with each kind of data
        probe = {"step": train, "steps": -(-args.report_steps // 5), "rounds": 5}
        log(pipeline.report(**probe if args.report_steps else {}))


if __name__ == "__main__":
    main()
