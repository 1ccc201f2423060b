# SPDX-License-Identifier: Apache-2.0
"""Compares training on real data with training on synthetic data, on more and more ranks.

    python benchmarks/input_pipeline.py --ranks 1 2 4 --file pipeline.jsonl --plot pipeline.png
    srun --ntasks 32 python benchmarks/input_pipeline.py --device cuda --file pipeline.jsonl
    python benchmarks/input_pipeline.py --file pipeline.jsonl --plot pipeline.png --ranks

In a launched job it measures that job; otherwise it starts torchrun for each number of ranks. Each
job appends a line to the file, from which the table and the curves are made. benchmarks/README.md
explains them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from machine import machine
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchvision.io import decode_jpeg, encode_jpeg
from torchvision.models import resnet18
from torchvision.transforms import v2

import torch_ring as hvd
from torch_ring.data import InputPipeline, ShardedSampler, default_num_workers
from torch_ring.setup.launchers import discover

FILES = 64  # different JPEGs, decoded again for each sample
JPEG_PIXELS = 256
CLASSES = 10


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="none: only draw")
    parser.add_argument("--batch-size", type=int, default=16, help="of a rank")
    parser.add_argument("--image-size", type=int, default=64, help="pixels, after augmentation")
    parser.add_argument("--augment", type=int, default=1, help="passes of RandAugment an image")
    parser.add_argument("--workers", type=int, help="of a rank (default: by its CPUs)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--pretend-ms",
        type=float,
        help="a stand-in for a device: a step computes nothing, and sleeps for so long",
    )
    parser.add_argument("--epoch-steps", type=int, default=50, help="steps of the run")
    parser.add_argument("--steps", type=int, default=20, help="of a round, with each kind of data")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--file", type=Path, help="of results, a JSON object a line")
    parser.add_argument("--plot", type=Path, help="write the curves there")
    return parser.parse_args()


class Jpegs(Dataset[tuple[Tensor, int]]):
    """JPEGs in memory, decoded and augmented for each sample; the content does not matter."""

    def __init__(self, length: int, image_size: int, augment: int) -> None:
        generator = torch.Generator().manual_seed(0)
        coarse = torch.rand(FILES, 3, 16, 16, generator=generator)
        images = torch.nn.functional.interpolate(coarse, size=JPEG_PIXELS, mode="bicubic")
        noise = torch.randn(images.shape, generator=generator) / 20
        pixels = ((images + noise).clamp(0, 1) * 255).to(torch.uint8)
        self.files = [encode_jpeg(image) for image in pixels]
        self.length = length
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(image_size),
                v2.RandomHorizontalFlip(),
                *(v2.RandAugment() for _ in range(augment)),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
            ]
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = decode_jpeg(self.files[index % FILES])
        return self.transform(image), index % CLASSES


def stand_in_step(pretend_ms: float) -> Callable[[Any], None]:
    gradient = torch.zeros(1)

    def step(_batch: Any) -> None:
        time.sleep(pretend_ms / 1000)
        hvd.allreduce_(gradient)  # all ranks wait for the slowest

    return step


def training_step(device: torch.device) -> Callable[[Any], None]:
    torch.manual_seed(0)
    model = resnet18(num_classes=CLASSES).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def step(batch: Any) -> None:
        images, labels = batch
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def measure(args: argparse.Namespace) -> None:
    """Train on this job's ranks; rank 0 appends its measurements to the file."""
    hvd.init()
    torch.set_num_threads(1)  # the same for every number of ranks
    device = torch.device(args.device)
    if args.device == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    workers = default_num_workers() if args.workers is None else args.workers
    length = args.epoch_steps * args.batch_size * hvd.size()
    dataset = Jpegs(length, args.image_size, args.augment)
    loader = DataLoader(
        dataset,
        args.batch_size,
        sampler=ShardedSampler(dataset, drop_last=True),
        num_workers=workers,
        pin_memory=args.device == "cuda",
    )
    pretends = args.pretend_ms is not None
    step = stand_in_step(args.pretend_ms) if pretends else training_step(device)
    pipeline = InputPipeline(loader, device)
    for batch in pipeline:
        step(batch)
    report = pipeline.report(step, steps=args.steps, rounds=args.rounds)
    if hvd.rank() != 0:
        return
    print(report, flush=True)
    device_name = f"stand-in, {args.pretend_ms:g} ms" if pretends else args.device
    row = {
        "device": device_name,
        "augment": args.augment,
        "batch_size": args.batch_size,
        "image_size": args.image_size,
        "gap": report.gap,
        "loader_share": report.loader_share,
        **asdict(report),
        "machine": machine(),
        "command": shlex.join(sys.argv),
    }
    with args.file.open("a") as file:
        file.write(json.dumps(row) + "\n")


def series_of(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return series of rows that differ only in the number of ranks, by name, in ascending order.

    For each number of ranks the last row counts. Adds `efficiency`: steps a second over those with
    synthetic data on the fewest ranks. A rank's work does not depend on the number of ranks.
    """
    series: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        name = (
            f"{row['device']}, {row['augment']} x RandAugment, batch {row['batch_size']} of "
            f"{row['image_size']} x {row['image_size']}"
        )
        series[name][row["ranks"]] = row
    result = {}
    for name, by_ranks in series.items():
        ordered = [by_ranks[ranks] for ranks in sorted(by_ranks)]
        base = ordered[0]["rates"]["synthetic"]
        for row in ordered:
            row["efficiency"] = {
                mode: row["rates"][mode] / base for mode in ("synthetic", "cached", "real")
            }
        result[name] = ordered
    return result


def print_tables(series: dict[str, list[dict[str, Any]]]) -> None:
    for name, rows in series.items():
        print(f"\n# {name}")
        print(f"#{'':15}{'steps/s':>30}{'efficiency':>20}{'':18}{'wait for data (ms)':>34}")
        print(
            f"#{'ranks':>6}{'workers':>9}{'real':>10}{'cached':>10}{'synthetic':>10}"
            f"{'real':>10}{'synthetic':>10}{'gap':>9}{'loader':>9}"
            f"{'mean':>9}{'p95':>8}{'max':>8}{'latest':>9}{'slowest':>9}"
        )
        for row in rows:
            rates, waits, efficiency = row["rates"], row["waits"], row["efficiency"]
            print(
                f"{row['ranks']:>7}{row['num_workers']:>9}{rates['real']:>10.2f}"
                f"{rates['cached']:>10.2f}{rates['synthetic']:>10.2f}"
                f"{efficiency['real']:>10.1%}{efficiency['synthetic']:>10.1%}"
                f"{row['gap']:>9.1%}{row['loader_share']:>9.1%}"
                f"{1000 * waits['mean_s']:>9.1f}{1000 * waits['p95_s']:>8.1f}"
                f"{1000 * waits['max_s']:>8.1f}{1000 * waits['latest_s']:>9.1f}"
                f"{waits['slowest_rank']:>9}"
            )


def plot(series: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for index, (name, rows) in enumerate(series.items()):
        ranks = [row["ranks"] for row in rows]
        for mode, style in (("synthetic", "o--"), ("real", "o-")):
            efficiency = [100 * row["efficiency"][mode] for row in rows]
            axes.plot(ranks, efficiency, style, color=f"C{index}", label=f"{mode}: {name}")
    axes.set(xlabel="ranks", ylabel="efficiency (%)", ylim=(0, None), xscale="log")
    every = sorted({row["ranks"] for rows in series.values() for row in rows})
    axes.set_xticks(every, [str(ranks) for ranks in every], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def main() -> None:
    args = parse_args()
    if discover().launcher != "python":
        if args.file is None:
            sys.exit("--file says where the results of this job go")
        measure(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        args.file = args.file or Path(folder) / "results.jsonl"
        for ranks in args.ranks:
            launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            subprocess.run([*launch, *sys.argv, "--file", str(args.file)], check=True)
        series = series_of([json.loads(line) for line in args.file.read_text().splitlines()])
    print_tables(series)
    if args.plot:
        plot(series, args.plot)


if __name__ == "__main__":
    main()
