"""Trains on several ranks of one GPU: checks the result, and times their host beside DDP.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/gpu_ranks.py
    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/gpu_ranks.py --device stand-in

gpu_check.py starts it. To NCCL each rank is a host of its own, so the device's time is meaningless;
the host's time until a step returns is that of a rank with a GPU of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_check import Step, host_ms
from machine import log, machine, write_report
from stand_in import DEVICE, load_stand_ins
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import torch_ring as hvd

LAYERS = {"cuda": 250, "cpu": 250, "stand-in": 20}  # of two parameters
WIDTH, ROWS = 8, 4  # of a layer; of a rank's batch
LEARNING_RATE = 1e-4  # small, for many consecutive layers
CHECKED_STEPS = 5
TOLERANCE = 1e-3  # relative to the change of the weights
WARM_UP_ROUNDS = 2
DDP = ("ddp", "ddp on ring")
OURS = ("torch_ring", "run_ahead")
# NCCL reads these once. Between "hosts" it uses sockets.
NCCL_SETTINGS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
}


@dataclass(frozen=True)
class Row:
    """The host's time of a step of one variant: medians of the rounds, on rank 0."""

    variant: str
    host_ms: float
    ratio: float  # to plain torch


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu", "stand-in"], default="cuda")
    parser.add_argument("--steps", type=int, default=10, help="in a round")
    parser.add_argument("--rounds", type=int, default=9, help="each variant is timed once a round")
    parser.add_argument("--no-times", action="store_true", help="only check the result")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args()


def make_model(device: str) -> nn.Module:
    torch.manual_seed(0)
    count = LAYERS["stand-in" if device == DEVICE else device]
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(count)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers).to(device)


def batch_of(step: int, rank: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator).to(device)


# --- the result


def check_training(device: str) -> str:
    """Compare training on all ranks with one process on the joined batches."""
    alone, model = make_model(device), make_model(device)
    reference = SGD(alone.parameters(), lr=LEARNING_RATE, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9), model.named_parameters()
    )
    for step in range(CHECKED_STEPS):
        joined = torch.cat([batch_of(step, rank, device) for rank in range(hvd.size())])
        take_step(alone, reference, joined)
        take_step(model, optimizer, batch_of(step, hvd.rank(), device))
    mine, expected, before = (weights_of(m) for m in (model, alone, make_model(device)))
    all_ranks = hvd.allgather(mine[None])
    if not (all_ranks == all_ranks[:1]).all():
        return "failed: the ranks have different weights"
    apart = float((mine - expected).norm() / (expected - before).norm())
    if not apart < TOLERANCE:
        return f"failed: {apart:.3g} of what one process has changed in the weights"
    return "passed"


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


# --- the host's time


def start_ddp(device: str) -> str | None:
    """Start the process groups of DDP; return the reason if that is impossible."""
    if device == DEVICE:
        return "its NCCL process group does not run on a stand-in"
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=hvd.rank(), world_size=hvd.size())
    return None


def steps_of(device: str, with_ddp: bool) -> dict[str, Step]:
    batch = batch_of(0, hvd.rank(), device)
    ring = dist.new_group(backend="ring") if with_ddp else None

    def step_of(variant: str) -> Step:
        model = make_model(device)
        if variant.startswith("ddp"):
            group = ring if variant == "ddp on ring" else None
            model = DistributedDataParallel(
                model, process_group=group, gradient_as_bucket_view=True
            )
        optimizer: torch.optim.Optimizer = SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        if variant in OURS:
            run_ahead = variant == "run_ahead"
            optimizer = hvd.DistributedOptimizer(
                optimizer, model.named_parameters(prefix=variant), run_ahead=run_ahead
            )
        return lambda: take_step(model, optimizer, batch)

    variants = ("torch", *(DDP if with_ddp else ()), *OURS)
    return {variant: step_of(variant) for variant in variants}


def measure(args: argparse.Namespace, device: str, with_ddp: bool) -> list[Row]:
    steps = steps_of(device, with_ddp)
    wait = torch.get_device_module(device).synchronize
    times: dict[str, list[float]] = {variant: [] for variant in steps}

    def begin_together() -> None:
        wait()
        hvd.barrier()

    for turn in range(WARM_UP_ROUNDS + args.rounds):
        for variant, step in steps.items():
            one = host_ms(step, args.steps, begin_together)
            if turn >= WARM_UP_ROUNDS:
                times[variant].append(one)
    medians = {variant: statistics.median(rounds) for variant, rounds in times.items()}
    return [Row(variant, ms, ms / medians["torch"]) for variant, ms in medians.items()]


def main() -> int:
    args = parse_args()
    os.environ.update(NCCL_SETTINGS, NCCL_HOSTID=f"process-{os.getpid()}")
    torch.set_num_threads(1)
    if args.device == "stand-in":
        load_stand_ins()
    device = DEVICE if args.device == "stand-in" else args.device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    hvd.init()
    verdict = check_training(device)
    log(f"# {hvd.size()} ranks on one {args.device}: training {verdict}")
    rows: list[Row] = []
    without_ddp = None
    if not args.no_times:
        without_ddp = start_ddp(device)
        rows = measure(args, device, with_ddp=without_ddp is None)
        log(
            f"# host time of a step, {hvd.size()} ranks, {2 * LAYERS[args.device]} parameters",
            f"#{'':>11}{'host (ms)':>11}{'ratio':>9}",
            *(f"{row.variant:>12}{row.host_ms:>11.3f}{row.ratio:>9.3f}" for row in rows),
        )
        if without_ddp:
            log(f"# DDP is skipped: {without_ddp}")
    write_report(args.json, machine(), rows, training=[verdict], skipped=[without_ddp])
    if dist.is_initialized():
        dist.destroy_process_group()
    hvd.shutdown()
    return int(verdict != "passed")


if __name__ == "__main__":
    sys.exit(main())
