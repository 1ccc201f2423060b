"""Checks torch_ring on a GPU, and times its cost in a training step there.

    python benchmarks/gpu_check.py --json gpu.json python benchmarks/gpu_check.py --device cpu
    --steps 2    # tries the script itself python benchmarks/gpu_check.py --device stand-in --steps
    2    # ... the part for stand-ins

It needs one GPU, torch and numpy; the checks need pytest, too. It lists the skipped parts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import torch_ring as hvd

ROOT = Path(__file__).parent.parent
CHECKS_TIMEOUT_S = 420.0  # leaves time to measure in ten minutes
RANKS_TIMEOUT_S = 120.0
RANKS = {2: "with times", 4: "only checked"}  # on one GPU
WARM_UP_ROUNDS = 2  # cuDNN chooses algorithms, DDP and torch_ring plan buckets again
CLASSES = 1000
Step = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """The time of a step of one variant; the ratios are to plain torch."""

    variant: str
    host_ms: float  # until the step returns
    step_ms: float  # until the device is done, for steps back to back
    host_ratio: float
    step_ratio: float


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu", "stand-in"], default="cuda")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--steps", type=int, default=10, help="in a round")
    parser.add_argument("--rounds", type=int, default=9, help="each variant is timed once a round")
    parser.add_argument("--no-checks", action="store_true", help="only measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args()


# --- the checks


def check() -> dict[str, str | list[str]]:
    """Run the tests for GPUs, show their output, and return it with the verdict."""
    if importlib.util.find_spec("pytest") is None:
        verdict = f"not run: there is no pytest for {sys.executable}"
        print(f"# checks {verdict}", flush=True)
        return {"verdict": verdict, "output": []}
    command = [sys.executable, "-m", "pytest", "-v", "--durations=10", "tests/gpu"]
    pytest = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    late = threading.Timer(CHECKS_TIMEOUT_S, pytest.kill)
    late.start()
    output = []
    assert pytest.stdout is not None
    for text in pytest.stdout:
        print(text, end="", flush=True)
        output.append(text.rstrip())
    status = pytest.wait()
    late.cancel()
    verdict = {0: "passed", -9: f"killed after {CHECKS_TIMEOUT_S:g} s"}.get(status, "failed")
    print(f"# checks {verdict}: {output[-1] if output else ''}", flush=True)
    return {"verdict": verdict, "output": output}


# --- ResNet-50 as torchvision has it, for machines without torchvision


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
    """Return a ResNet-50; its usual `width` is 64."""
    layers = [*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    inputs = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            inside = width << stage
            layers.append(Bottleneck(inputs, inside, 2 if stage > 0 and block == 0 else 1))
            inputs = 4 * inside
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)]
    return nn.Sequential(*layers)


# --- the measurement


def steps_of(args: argparse.Namespace) -> dict[str, Step]:
    """Return a training step of each variant: its own model, the same batch."""
    on_gpu = args.device == "cuda"
    width, edge = (64, 224) if on_gpu else (8, 32)
    images = torch.randn(args.batch, 3, edge, edge, device=args.device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (args.batch,), device=args.device)

    def step_of(variant: str) -> Step:
        torch.manual_seed(0)
        model = resnet50(width).to(args.device, memory_format=torch.channels_last)
        if variant == "ddp":
            model = DistributedDataParallel(model)
        optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
        if variant == "torch_ring":
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()

        return step

    return {variant: step_of(variant) for variant in ("torch", "ddp", "torch_ring")}


def host_ms(step: Step, steps: int, synchronize: Step) -> float:
    """Return the median time until a step returns, on an idle device."""
    times = []
    for _ in range(steps):
        synchronize()
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e3


def step_ms(step: Step, steps: int, synchronize: Step) -> float:
    """Return the time of a step among many, without a wait for the device between them."""
    synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return (time.perf_counter() - begun) / steps * 1e3


def measure(args: argparse.Namespace) -> list[Row]:
    """Time the variants in turns, so that other load on the machine slows all of them."""
    steps, synchronize = steps_of(args), torch.get_device_module(args.device).synchronize
    host: dict[str, list[float]] = {variant: [] for variant in steps}
    whole: dict[str, list[float]] = {variant: [] for variant in steps}
    for turn in range(WARM_UP_ROUNDS + args.rounds):
        for variant, step in steps.items():
            one = host_ms(step, args.steps, synchronize)
            many = step_ms(step, args.steps, synchronize)
            if turn >= WARM_UP_ROUNDS:
                host[variant].append(one)
                whole[variant].append(many)
    medians = {v: (statistics.median(host[v]), statistics.median(whole[v])) for v in steps}
    plain = medians["torch"]
    return [Row(v, *ms, ms[0] / plain[0], ms[1] / plain[1]) for v, ms in medians.items()]


# --- several ranks on one device


def run_ranks(args: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Run gpu_ranks.py with 2 and 4 ranks, show its output, and return its reports."""
    reports = {}
    for size in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            reports[size] = run_ranks_of(size, args, report)
    return reports


def run_ranks_of(size: int, args: argparse.Namespace, report: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    command += [str(Path(__file__).with_name("gpu_ranks.py")), "--device", args.device]
    command += ["--steps", str(args.steps), "--rounds", str(args.rounds), "--json", str(report)]
    if RANKS[size] == "only checked":
        command.append("--no-times")
    try:
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=RANKS_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        verdict = f"failed: not done after {RANKS_TIMEOUT_S:g} s"
        print(f"# {size} ranks on one {args.device}: {verdict}", flush=True)
        return {"training": [verdict]}
    print(ended.stdout, end="", flush=True)
    if not report.exists():
        verdict = f"failed: exit status {ended.returncode}"
        print(f"# {size} ranks on one {args.device}: {verdict}", flush=True)
        return {"training": [verdict]}
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def machine(device: str) -> dict[str, str]:
    """Return the facts on which the numbers depend."""
    nccl = "none"
    if device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "torch_ring": hvd.__version__,
        "nccl": nccl,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }


def table(args: argparse.Namespace, facts: dict[str, str], rows: list[Row]) -> Iterator[str]:
    yield "# " + ", ".join(f"{key} {value}" for key, value in facts.items())
    dtype = "bfloat16 autocast" if args.bf16 else "float32"
    model = "ResNet-50" if args.device == "cuda" else "an eighth of ResNet-50"
    yield f"# {model}, batch {args.batch}, channels_last, {dtype}, one rank, SGD with momentum"
    yield f"#{'':>11}{'host':>10}{'step':>10}{'host':>9}{'step':>9}"
    yield f"#{'':>11}{'(ms)':>10}{'(ms)':>10}{'ratio':>9}{'ratio':>9}"
    for row in rows:
        times = f"{row.host_ms:>10.3f}{row.step_ms:>10.3f}"
        yield f"{row.variant:>12}{times}{row.host_ratio:>9.3f}{row.step_ratio:>9.3f}"


def main() -> int:
    args = parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here; --device cpu tries the script", file=sys.stderr)
        return 1
    checks = {"verdict": "not asked for", "output": []} if args.no_checks else check()
    ranks = run_ranks(args)
    facts, rows = machine(args.device), measure_alone(args)
    if rows:
        print(*table(args, facts, rows), sep="\n")
    else:
        print("# one rank, ResNet-50, DDP: skipped, as a stand-in has neither", flush=True)
    if args.json:
        command = shlex.join(sys.argv)
        report = {"command": command, "machine": facts, "checks": checks, "rows": rows}
        report["ranks"] = ranks
        args.json.write_text(json.dumps(report, default=asdict, indent=1) + "\n")
    has_failed = any(report["training"] != ["passed"] for report in ranks.values())
    return int(has_failed or checks["verdict"].startswith(("failed", "killed")))


def measure_alone(args: argparse.Namespace) -> list[Row]:
    """Measure with one rank; nothing on a stand-in."""
    if args.device == "stand-in":
        return []
    hvd.init()
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rows = measure(args)
    dist.destroy_process_group()
    hvd.shutdown()
    return rows


if __name__ == "__main__":
    sys.exit(main())
