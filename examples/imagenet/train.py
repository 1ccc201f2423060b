# SPDX-License-Identifier: Apache-2.0
"""Trains ResNet-50, or any other model of torchvision, on a folder of images like ImageNet's.

    python train.py --data-dir imagenet                               # alone
    torchrun --nproc-per-node 8 train.py --data-dir imagenet --amp    # on the 8 GPUs of a machine
    mpirun -np 2 python train.py --data-dir images --smoke            # a try, in a minute
    python -m torch_ring.run -np 8 --min-np 4 python train.py --data-dir imagenet --elastic

Every rank runs this whole file. The recipe is that of Goyal et al. 2017 (arXiv:1706.02677).
"""

import argparse
import copy
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

import torch_ring as hvd
from torch_ring import checkpoint
from torch_ring.data import DevicePrefetcher, InputPipeline, ShardedSampler, default_num_workers
from torch_ring.lr_schedules import WarmupLR, step_decay
from torch_ring.metrics import Means

SMOKE = {"model": "resnet18", "image_size": 32, "batch_size": 8, "images": 200, "workers": 0}
SMOKE |= {"epochs": 3, "warmup_epochs": 1, "base_lr": 0.003}  # so few steps learn more slowly
WIRES = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16, "bf16": hvd.Compression.bf16}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flag = {"action": "store_true"}
    add = parser.add_argument
    add("--data-dir", type=Path, required=True, help="has train/CLASS/*.JPEG and val/CLASS/*.JPEG")
    add("--data", choices=["real", "cached", "synthetic"], default="real", help="see README.md")
    add("--images", type=int, metavar="N", help="use about so many of train and of val")
    names = models.list_models(module=models)
    add("--model", default="resnet50", choices=names, metavar="NAME")
    add("--image-size", type=int, default=224, help="pixels of an edge")
    add("--batch-size", type=int, default=32, help="of one rank in one backward pass")
    add("--accumulate", type=int, default=1, metavar="N", help="backward passes of a step")
    add("--epochs", type=int, default=90, help="in all, also with --resume")
    add("--base-lr", type=float, default=0.0125, help="right for one batch of one rank")
    add("--warmup-epochs", type=float, default=5)
    add("--momentum", type=float, default=0.9)
    add("--weight-decay", type=float, default=5e-5)
    add("--wire", choices=WIRES, default="none", help="how gradients are sent")
    add("--amp", **flag, help="compute in 16 bits where that is safe")
    add("--workers", type=int, help="processes that load images, of one rank; default: by CPUs")
    add("--checkpoint", type=Path, default=Path("imagenet.pt"), help="after every epoch")
    add("--checkpoint-every", type=int, metavar="STEPS", help="and within one")
    add("--resume", **flag, help="go on from the checkpoint, on any number of ranks")
    add("--elastic", **flag, help="train on when ranks die or come, if the launcher lets them")
    add("--tensorboard", type=Path, metavar="DIR")
    add("--plot", type=Path, metavar="FILE", help="draw the epochs")
    text = "report on the input pipeline, by N more steps with each kind of data; 0: by none"
    add("--report-steps", type=int, metavar="N", help=text)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cpu", "cuda"], default=default)
    add("--seed", type=int, default=0)
    add("--smoke", **flag, help="other defaults, for a try in a minute")
    if "--smoke" in sys.argv:
        parser.set_defaults(**SMOKE)
    args = parser.parse_args()
    for part in ("train", "val"):
        if not (args.data_dir / part).is_dir():
            parser.error(f"no {args.data_dir / part} here; make_images.py makes a small folder")
    if args.elastic and args.report_steps is not None:
        parser.error("--report-steps compares steps of the same ranks: leave out --elastic")
    for option, package in {"tensorboard": "tensorboard", "plot": "matplotlib"}.items():
        if getattr(args, option) and not find_spec(package):  # now, on all ranks: not after an hour
            parser.error(f"--{option} needs {package}: pip install {package}")
    return args


def load_images(args: argparse.Namespace, part: str, *transforms: nn.Module) -> ImageFolder:
    """Return images as uint8: the copy to the device has a quarter of the bytes of floats."""
    images = ImageFolder(args.data_dir / part, v2.Compose([*transforms, v2.PILToTensor()]))
    if args.images:  # some of each class: the files lie class by class
        images.samples = images.samples[:: max(1, len(images) // args.images)]
    return images


def average_buffers(model: nn.Module) -> None:
    """Average BatchNorm's running statistics: each rank has those of its own images.

    Otherwise every rank would test another model, and the checkpoint would have rank 0's.
    """
    running = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if running:
        hvd.grouped_allreduce_(running)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, prepare: nn.Module, device: str) -> dict:
    """Return the means over all images; each rank tests its share."""
    model.eval()
    means = Means("val_loss", "top1", "top5")
    for images, labels in DevicePrefetcher(loader, device):
        output = model(prepare(images))
        right = output.topk(min(5, output.shape[1])).indices == labels[:, None]
        means.update(
            len(labels),
            val_loss=cross_entropy(output, labels),
            top1=right[:, 0].double().mean(),
            top5=right.any(1).double().mean(),
        )
    # Not in the loop: shares differ in size, and a rank with one batch more would wait in it.
    return means.compute()


def draw(history: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    panels = {"loss": ["loss", "val_loss"], "accuracy": ["accuracy", "top1"]}
    panels |= {"images/s": ["images/s"]}
    for axes, (label, keys) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for key in keys:
            values = [row.get(key, float("nan")) for row in history]
            axes.plot([row["epoch"] for row in history], values, label=key)
        axes.set(xlabel="epoch", ylabel=label, ylim=(0, None))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()
    figure.savefig(path, dpi=160)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all ranks at once, and quietly
    args = parse_args()
    hvd.init()
    if not args.elastic:  # an elastic job goes on without the signalled rank
        hvd.preemption.watch()  # SIGTERM or SIGUSR1 to a rank: all stop at one step, and save it
    if args.device == "cuda":
        # One process drives one GPU. A newcomer to an elastic job is rank 0 of 1 until it is let
        # in, but its launcher gives it the number of a free GPU.
        free = os.environ.get("LOCAL_RANK") if args.elastic else None
        number = hvd.local_rank() if free is None else int(free)
        torch.cuda.set_device(number % torch.cuda.device_count())
        torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.seed + hvd.rank())  # other crops on every rank

    size = args.image_size
    crop, flip = v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()
    train_set = load_images(args, "train", crop, flip)
    val_set = load_images(args, "val", v2.Resize(size * 256 // 224), v2.CenterCrop(size))
    workers = default_num_workers() if args.workers is None else args.workers
    loading = {"num_workers": workers, "pin_memory": args.device == "cuda"}
    loading["worker_init_fn"] = hvd.preemption.shield_worker
    # drop_last, twice: all ranks have equally many batches, and all batches are full. A rank with
    # one batch more would wait in it for gradients that no other rank sends.
    sampler = ShardedSampler(train_set, seed=args.seed, drop_last=True)
    # A batch of the loader is a whole step of `accumulate` passes: an epoch leaves no pass over.
    batch_size = args.batch_size * args.accumulate
    loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True, **loading)
    # Testing takes every image exactly once; the shares of the ranks may differ in size.
    val_sampler = ShardedSampler(val_set, shuffle=False)
    val_loader = DataLoader(val_set, args.batch_size, sampler=val_sampler, **loading)
    pipeline = InputPipeline(loader, args.device, args.data)

    model = models.get_model(args.model, num_classes=len(train_set.classes))
    model.to(args.device, memory_format=torch.channels_last)
    statistics = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    prepare = nn.Sequential(v2.ToDtype(torch.float32, scale=True), v2.Normalize(**statistics))
    optimizer = torch.optim.SGD(
        model.parameters(), args.base_lr, args.momentum, weight_decay=args.weight_decay
    )
    scaler = torch.amp.GradScaler(args.device, enabled=args.amp and args.device == "cuda")

    def steps_of_epoch() -> int:
        """Return the number of steps of a whole epoch on the present ranks."""
        steps = len(train_set) // hvd.size() // batch_size
        if steps == 0:
            problem = f"{len(train_set)} images are less than a step of {hvd.size()} x {batch_size}"
            sys.exit(problem if hvd.rank() == 0 else 1)  # all ranks leave, one says why
        return steps

    def make_schedule() -> WarmupLR:
        """Return the learning rates for the present number of ranks."""
        # A step that averages more batches may be larger, but not while the weights are random.
        return WarmupLR(
            optimizer,
            args.warmup_epochs,
            step_decay([30, 60, 80]),
            steps_per_epoch=steps_of_epoch(),
            scale=hvd.size() * args.accumulate,
        )

    parts = {"model": model, "optimizer": optimizer, "schedule": make_schedule()}
    parts |= {"scaler": scaler, "sampler": sampler}
    program = f"examples/imagenet with {args.model} and {len(train_set.classes)} classes"
    history = []
    if args.resume:
        try:
            saved = checkpoint.load(args.checkpoint)  # rank 0 reads it and sends it to all
            if (other := saved.get("program", "another program")) != program:
                raise ValueError(f"it is of {other}, not of {program}")
            for name, part in parts.items():
                part.load_state_dict(saved[name])
            history = saved["history"]
        except (RuntimeError, ValueError, KeyError) as error:  # all ranks have the same error
            sys.exit(f"cannot resume from {args.checkpoint}: {error}" if hvd.rank() == 0 else 1)
    # All ranks start from rank 0's weights: averaged gradients only keep equal weights equal.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # backward_passes_per_step: only the last backward pass of a step averages the gradients.
    # (`no_sync()` does the same for steps whose number of passes is not known in advance.)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=WIRES[args.wire],
        backward_passes_per_step=args.accumulate,
    )
    dtype = torch.float16 if args.device == "cuda" else torch.bfloat16
    means = Means("loss", "accuracy")

    def train_step(batch: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        for images, labels in zip(*(part.chunk(args.accumulate) for part in batch), strict=True):
            with torch.autocast(args.device, dtype, enabled=args.amp):
                output = model(prepare(images).to(memory_format=torch.channels_last))
                output = getattr(output, "logits", output)  # some models add a head in training
                loss = cross_entropy(output, labels)
            # Gradients of the passes add up; the division makes them a mean. The last pass averages
            # them over the ranks: an infinity on one rank reaches all, and all skip this step.
            scaler.scale(loss / args.accumulate).backward()
            right = (output.detach().argmax(1) == labels).double().mean()
            means.update(len(labels), loss=loss.detach(), accuracy=right)
        scaler.step(optimizer)
        scaler.update()

    def progress(history: list[dict], row: dict) -> dict:
        """Return the progress of the training, without the weights and the optimizer."""
        names = ["schedule", "scaler", "sampler"]
        done = {name: copy.deepcopy(parts[name].state_dict()) for name in names}
        return done | {"history": history, "row": row}

    def train(state: SimpleNamespace | hvd.elastic.TorchState) -> None:
        """Continue the training from `state.done`, on the present ranks."""
        is_first = hvd.rank() == 0
        # The ranks of a host share its cores; more threads than cores would be slower.
        on_linux = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // hvd.local_size()))
        steps, parts["schedule"] = steps_of_epoch(), make_schedule()
        for name in ("schedule", "scaler", "sampler"):
            parts[name].load_state_dict(state.done[name])

        def save(history: list[dict]) -> None:
            states = {name: part.state_dict() for name, part in parts.items()}
            states |= {"program": program, "history": history}
            checkpoint.save(args.checkpoint, states)  # by rank 0, for all

        writer = None
        if args.tensorboard and is_first:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(args.tensorboard)
        images_a_step = batch_size * hvd.size()
        if is_first:
            images = f"{steps} steps of {images_a_step} images an epoch"
            print(f"{args.model}: size {hvd.size()}, {images}", flush=True)
        for epoch in range(len(state.done["history"]), args.epochs):
            history, row = state.done["history"], state.done["row"]
            if not row:  # otherwise a rank has died in the test after this epoch
                begun, begun_at = time.monotonic(), steps - len(loader)
                model.train()
                means.reset()
                # If a rank has died after the epoch's last step, only the means are left to do.
                is_due = sampler.epoch == epoch
                batches = pipeline if is_due else ()
                bar = tqdm(
                    batches, f"epoch {epoch + 1}", steps, initial=begun_at, disable=not is_first
                )
                for step, batch in enumerate(bar, begun_at + 1):
                    train_step(batch)
                    parts["schedule"].step()
                    if args.elastic:  # should a rank die now, the others go on from here
                        state.done = progress(history, {})
                    stops = hvd.preemption.requested() and step < steps
                    every = args.checkpoint_every
                    if stops or (every and step % every == 0 and step < steps):
                        # All ranks call both: under `if is_first`, rank 0 would wait for others.
                        average_buffers(model)
                        save(history)
                    if stops:
                        hvd.barrier()  # otherwise the launcher may end ranks that still save
                        sys.exit(128 + signal.SIGTERM)
                    if args.elastic:
                        state.check_host_updates()  # lets new processes join
                sampler.set_epoch(epoch + 1)  # another order, the same on all ranks
                lr = parts["schedule"].get_last_lr()[0]
                row = {"epoch": epoch + 1, "lr": lr}
                if is_due and begun_at < steps:  # otherwise sums died with a rank
                    row |= means.compute()
                    seconds = time.monotonic() - begun
                    row["images/s"] = (steps - begun_at) * images_a_step / seconds
                average_buffers(model)
                state.done = progress(history, row)
            row = row | evaluate(model, val_loader, prepare, args.device)
            history = [*history, row]
            save(history)
            state.done = progress(history, {})
            if is_first:
                line = ", ".join(f"{key} {value:.4g}" for key, value in row.items())
                print(line, flush=True)
            for key in list(row)[1:] if writer else []:
                writer.add_scalar(key, row[key], epoch + 1)
            if args.elastic:
                state.commit()  # a tested and saved epoch is never repeated
        if writer:
            writer.close()
        if args.plot and is_first:
            draw(state.done["history"], args.plot)

    done = progress(history, {})
    if args.elastic:
        # After a death, train() is called again on the remaining ranks: docs/elastic.md.
        hvd.elastic.run(train)(hvd.elastic.TorchState(model, optimizer, done=done))
    else:
        train(SimpleNamespace(done=done))
    if args.report_steps is not None:
        # It trains on, with each kind of data; the last checkpoint is on the disk already.
        model.train()
        compared, rounds = train_step if args.report_steps else None, min(5, args.report_steps or 1)
        report = pipeline.report(compared, steps=max(1, args.report_steps // rounds), rounds=rounds)
        if hvd.rank() == 0:
            print(report)


if __name__ == "__main__":
    main()
