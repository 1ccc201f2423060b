# SPDX-License-Identifier: Apache-2.0
"""Times a training step on a GPU beside torch's own and DDP's, and checks the weights.

    PYTHONPATH=. torchrun --nproc-per-node 1 benchmarks/gpu_ranks.py --model resnet50
    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/gpu_ranks.py --model buckets
    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/gpu_ranks.py --device stand-in

gpu_check.py starts it. Several ranks may share a GPU: to NCCL each is a host of its own, so the
device's time is meaningless. The host's time until a step returns is that of a rank with a GPU of
its own. One rank sends nothing: its steps have no launch of NCCL.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from machine import log, machine, write_report
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import torch_ring as hvd

sys.path.append(str(Path(__file__).parent.parent / "tests/device"))  # the stand-ins are the tests'
from device_double import DEVICE, NCCL_LIBRARY, load

LEARNING_RATE = 1e-4  # small, for many consecutive layers
CHECKED_STEPS = 5
TOLERANCE = 1e-3  # relative to the change of the weights
WARM_UP_ROUNDS = 2  # cuDNN chooses algorithms, DDP and torch_ring plan buckets again
DDP = ("ddp", "ddp on ring")
OURS = ("torch_ring", "run_ahead")
# NCCL reads these once. Between "hosts" it uses sockets.
NCCL_SETTINGS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
}
Step = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """The time of a step of one variant: medians of the rounds, on rank 0."""

    variant: str
    host_ms: float  # until the step returns, on an idle device
    step_ms: float  # until the device is done, for steps back to back
    host_ratio: float  # to plain torch
    step_ratio: float


@dataclass(frozen=True)
class Workload:
    """Makes equal models on a device, and trains them.

    Attributes:
        make: the model.
        shape: that of a rank's batch.
        bucket_bytes: of gradients in a bucket; None: the default of each library.
        bf16: whether to compute in bfloat16.
    """

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    bucket_bytes: int | None
    device: str
    bf16: bool

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().to(self.device)

    def batch(self, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        batch = torch.randn(self.shape, generator=generator).to(self.device)
        return batch.to(memory_format=torch.channels_last) if batch.dim() == 4 else batch

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()


def load_stand_ins() -> None:
    """Make `DEVICE` a device of torch, and NCCL its stand-in. Call before hvd.init()."""
    if not NCCL_LIBRARY.exists():
        sys.exit("the stand-ins are not built: make doubles")
    load()
    os.environ["TORCH_RING_NCCL_LIBRARY"] = str(NCCL_LIBRARY)


# --- the models


def linear_layers(count: int, width: int, bias: bool) -> nn.Module:
    layers = [nn.Linear(width, width, bias) for _ in range(count)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers)


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, outputs, 1),
        )
        same = inputs == outputs
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*convolution(inputs, outputs, 1, stride))
        )

    def forward(self, batch: Tensor) -> Tensor:
        return F.relu(self.body(batch) + self.shortcut(batch), inplace=True)


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> Iterator[nn.Module]:
    yield nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    yield nn.BatchNorm2d(outputs)


def resnet50(width: int) -> nn.Module:
    """Return a ResNet-50, as torchvision's, which may be missing; its usual `width` is 64."""
    layers = [*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    inputs = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            inside = width << stage
            layers.append(Bottleneck(inputs, inside, 2 if stage > 0 and block == 0 else 1))
            inputs = 4 * inside
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def workload(name: str, device: str, bf16: bool) -> Workload:
    """Return a workload; a smaller one where its times say nothing."""
    if name == "resnet50":
        width, edge = (64, 224) if device == "cuda" else (8, 32)
        title = "ResNet-50" if device == "cuda" else "an eighth of ResNet-50"
        shape = (32, 3, edge, edge)
        return Workload(title, lambda: resnet50(width), shape, None, device, bf16)
    has_buckets = name == "buckets"
    width = 64 if has_buckets else 8
    count = (64 if has_buckets else 250) if device != DEVICE else 8
    title = f"{count} buckets of one parameter"
    if not has_buckets:
        title = f"one bucket of {2 * count} parameters"
    return Workload(
        title,
        lambda: linear_layers(count, width, bias=not has_buckets),
        (4, width),
        4 * width * width if has_buckets else None,
        device,
        bf16,
    )


# --- the result


def check_training(work: Workload) -> str:
    """Compare training on all ranks with one process on the joined batches."""
    alone, model = work.model(), work.model()
    reference = SGD(alone.parameters(), lr=LEARNING_RATE, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9), model.named_parameters()
    )
    for step in range(CHECKED_STEPS):
        joined = torch.cat([work.batch(step, rank) for rank in range(hvd.size())])
        work.step(alone, reference, joined)
        work.step(model, optimizer, work.batch(step, hvd.rank()))
    mine, expected, before = (weights_of(m) for m in (model, alone, work.model()))
    all_ranks = hvd.allgather(mine[None])
    if not (all_ranks == all_ranks[:1]).all():
        return "failed: the ranks have different weights"
    apart = float((mine - expected).norm() / (expected - before).norm())
    if not apart < TOLERANCE:
        return f"failed: {apart:.3g} of what one process has changed in the weights"
    return "passed"


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()


# --- the times


def start_ddp(device: str) -> str | None:
    """Start the process groups of DDP; return the reason if that is impossible."""
    if device == DEVICE:
        return "its NCCL process group does not run on a stand-in"
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=hvd.rank(), world_size=hvd.size())
    return None


def steps_of(work: Workload, with_ddp: bool) -> dict[str, Step]:
    batch = work.batch(0, hvd.rank())
    ring = dist.new_group(backend="ring") if with_ddp else None
    cap_mb = work.bucket_bytes and work.bucket_bytes / (1 << 20)

    def step_of(variant: str) -> Step:
        model = work.model()
        if variant.startswith("ddp"):
            model = DistributedDataParallel(
                model,
                process_group=ring if variant == "ddp on ring" else None,
                gradient_as_bucket_view=True,
                bucket_cap_mb=cap_mb,
            )
        optimizer: torch.optim.Optimizer = SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        if variant in OURS:
            run_ahead = variant == "run_ahead"
            optimizer = hvd.DistributedOptimizer(
                optimizer, model.named_parameters(prefix=variant), run_ahead=run_ahead
            )
        return lambda: work.step(model, optimizer, batch)

    variants = ("torch", *(DDP if with_ddp else ()), *OURS)
    return {variant: step_of(variant) for variant in variants}


def measure(steps: dict[str, Step], device: str, count: int, rounds: int) -> list[Row]:
    """Time the variants in turns, so that other load on the machine slows all of them."""
    wait = torch.get_device_module(device).synchronize
    host: dict[str, list[float]] = {variant: [] for variant in steps}
    whole: dict[str, list[float]] = {variant: [] for variant in steps}
    for turn in range(WARM_UP_ROUNDS + rounds):
        for variant, step in steps.items():
            times = []
            for _ in range(count):
                wait()
                hvd.barrier()
                times.append(ms_of(step))
            wait()
            hvd.barrier()

            def all_steps(step: Step = step) -> None:
                for _ in range(count):
                    step()
                wait()

            together = ms_of(all_steps) / count
            if turn >= WARM_UP_ROUNDS:
                host[variant].append(statistics.median(times))
                whole[variant].append(together)
    medians = {v: (statistics.median(host[v]), statistics.median(whole[v])) for v in steps}
    plain = medians["torch"]
    return [Row(v, *ms, ms[0] / plain[0], ms[1] / plain[1]) for v, ms in medians.items()]


def ms_of(call: Step) -> float:
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1e3


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu", "stand-in"], default="cuda")
    parser.add_argument("--model", choices=["layers", "buckets", "resnet50"], default="layers")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--steps", type=int, default=10, help="in a round")
    parser.add_argument("--rounds", type=int, default=9, help="each variant is timed once a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    os.environ.update(NCCL_SETTINGS, NCCL_HOSTID=f"process-{os.getpid()}")
    torch.set_num_threads(1)
    if args.device == "stand-in":
        load_stand_ins()
    device = DEVICE if args.device == "stand-in" else args.device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    work = workload(args.model, device, args.bf16)
    if work.bucket_bytes:
        os.environ["TORCH_RING_BUCKET_BYTES"] = str(work.bucket_bytes)
    hvd.init()
    verdict = "not checked"  # batch normalization sees a rank's batch alone
    if args.model != "resnet50":
        verdict = check_training(work)
        log(f"# {hvd.size()} ranks on one {args.device}: training {verdict}")
    without_ddp = start_ddp(device)
    steps = steps_of(work, with_ddp=without_ddp is None)
    rows = measure(steps, device, args.steps, args.rounds)
    dtype = "bfloat16 autocast" if args.bf16 else "float32"
    log(
        f"# {work.title}, {dtype}, ranks: {hvd.size()}; of a step, in ms, and relative to torch",
        f"#{'':>12}{'host':>10}{'step':>10}{'host':>9}{'step':>9}",
        *(
            f"#{row.variant:>12}{row.host_ms:>10.3f}{row.step_ms:>10.3f}"
            f"{row.host_ratio:>9.3f}{row.step_ratio:>9.3f}"
            for row in rows
        ),
    )
    if without_ddp:
        log(f"# DDP is skipped: {without_ddp}")
    write_report(args.json, machine(), rows, training=[verdict], skipped=[without_ddp])
    if dist.is_initialized():
        dist.destroy_process_group()
    hvd.shutdown()
    return int(verdict.startswith("failed"))


if __name__ == "__main__":
    sys.exit(main())
