# SPDX-License-Identifier: Apache-2.0
"""Times training steps of a torchvision model on one made-up batch: Horovod's benchmark.

    python benchmark.py                                           # alone
    torchrun --nproc-per-node 2 benchmark.py --model resnet18     # on two processes
    mpirun -np 2 python benchmark.py --compare ddp                # beside PyTorch's own DDP

It loads no data: it times the model and the averaging of its gradients.
"""

import argparse
import copy
import json
import os
import platform
import shlex
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchvision import models

import torch_ring as hvd

SMOKE = {"model": "resnet18", "image_size": 32, "batch_size": 2}
SMOKE |= {"num_warmup_batches": 1, "num_batches_per_iter": 1, "num_iters": 2}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flag = {"action": "store_true"}
    names = models.list_models(module=models)
    parser.add_argument("--model", default="resnet50", choices=names, metavar="NAME")
    parser.add_argument("--batch-size", type=int, default=32, help="of one rank")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of an edge")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="not timed")
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10, help="how often the time is taken")
    parser.add_argument("--fp16-allreduce", **flag, help="send gradients as float16")
    parser.add_argument("--use-adasum", **flag, help="combine by adaptive summation")
    parser.add_argument("--amp", **flag, help="autocast to bfloat16")
    parser.add_argument("--channels-last", **flag, help="memory format of model and images")
    parser.add_argument("--compare", choices=["ddp"], help="time this too, in turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--no-cuda", dest="device", action="store_const", const="cpu")
    parser.add_argument("--smoke", **flag, help="other defaults, for a try in seconds")
    if "--smoke" in sys.argv:
        parser.set_defaults(**SMOKE)
    args = parser.parse_args()
    if min(args.batch_size, args.image_size, args.num_batches_per_iter, args.num_iters) < 1:
        parser.error("batches, images and iterations must be 1 or more")
    return args


def start_torch_distributed(args: argparse.Namespace) -> None:
    """Start torch.distributed for DDP; its ranks find each other through torch_ring."""
    host = "127.0.0.1" if hvd.cross_size() == 1 else socket.gethostname()
    if hvd.cross_size() == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if hvd.rank() == 0:
        store = dist.TCPStore(host, 0, hvd.size(), is_master=True, wait_for_workers=False)
        hvd.broadcast_object((host, store.port))
    else:
        store = dist.TCPStore(*hvd.broadcast_object(None), hvd.size())
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=hvd.rank(), world_size=hvd.size())


def make_steps(args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Return, by library, the function that takes a training step with it."""
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    # The model moves before the optimizer is made, which would otherwise step the old weights.
    model = models.get_model(args.model).to(args.device, memory_format=layout)
    pixels = (args.batch_size, 3, args.image_size, args.image_size)
    images = torch.randn(pixels, device=args.device).to(memory_format=layout)
    labels = torch.randint(1000, (args.batch_size,), device=args.device)
    # Horovod's choice: Adasum needs no larger learning rate on more ranks.
    learning_rate = 0.01 * (1 if args.use_adasum else hvd.size())

    def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast(args.device, torch.bfloat16, enabled=args.amp):
                output = model(images)
                # Some models add a head in training; `logits` is the output of the main one.
                loss = cross_entropy(getattr(output, "logits", output), labels)
            loss.backward()
            optimizer.step()

        return step

    def with_torch_ring(model: nn.Module) -> Callable[[], None]:
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), learning_rate),
            named_parameters=model.named_parameters(),
            compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
            op=hvd.Adasum if args.use_adasum else hvd.Average,
        )
        # All ranks start from rank 0's weights: averaged gradients only keep equal weights equal.
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return make_step(model, optimizer)

    def with_ddp(model: nn.Module) -> Callable[[], None]:
        start_torch_distributed(args)
        model = DistributedDataParallel(model)
        if args.fp16_allreduce:
            model.register_comm_hook(None, fp16_compress_hook)
        return make_step(model, torch.optim.SGD(model.parameters(), learning_rate))

    if args.compare:
        return {"torch_ring": with_torch_ring(copy.deepcopy(model)), "DDP": with_ddp(model)}
    return {"torch_ring": with_torch_ring(model)}


def images_per_second(args: argparse.Namespace, step: Callable[[], None]) -> float:
    """Take the steps of one iteration; return the images per second of a rank, on average."""
    hvd.barrier()  # a rank that is late from before must not slow this iteration
    begun = time.perf_counter()
    for _ in range(args.num_batches_per_iter):
        step()
    # A GPU works asynchronously: without this, the time would be that of launching its work.
    torch.get_device_module(args.device).synchronize()
    rate = args.batch_size * args.num_batches_per_iter / (time.perf_counter() - begun)
    return hvd.allreduce(torch.tensor(rate, dtype=torch.float64)).item()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all ranks at once, and quietly
    args = parse_args()
    hvd.init()
    log = print if hvd.rank() == 0 else lambda *_, **__: None
    if args.device == "cuda":
        # One process drives one GPU; it may see one alone, or all GPUs of the host.
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        torch.backends.cudnn.benchmark = True
    # The ranks of a host share its cores; more threads than cores would be slower.
    on_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // hvd.local_size()))

    steps = make_steps(args)
    device = "GPU" if args.device == "cuda" else "CPU"
    log(f"Model: {args.model}\nBatch size: {args.batch_size}\nNumber of {device}s: {hvd.size()}")
    log("Running warmup...", flush=True)
    for step in steps.values():
        for _ in range(args.num_warmup_batches):
            step()
    torch.get_device_module(args.device).synchronize()

    log("Running benchmark...", flush=True)
    rates = {library: [] for library in steps}
    for iteration in range(args.num_iters):
        # The libraries take turns, in alternating order: other work on the machine slows both, and
        # neither always comes second.
        for library in list(steps)[:: -1 if iteration % 2 else 1]:
            rates[library].append(images_per_second(args, steps[library]))
            name = "" if library == "torch_ring" else f" ({library})"
            rate = f"{rates[library][-1]:.1f} img/sec per {device}"
            log(f"Iter #{iteration}{name}: {rate}", flush=True)

    results = {}
    for library, of_library in rates.items():
        mean, spread = statistics.fmean(of_library), 1.96 * statistics.pstdev(of_library)
        results[library] = {
            "img_sec_per_device": mean,
            "img_sec_per_device_conf": spread,
            "img_sec_total": hvd.size() * mean,
            "img_sec_total_conf": hvd.size() * spread,
            "img_sec_median": statistics.median(of_library),
            "img_secs": of_library,
        }
        if library != "torch_ring":
            log(f"--- {library}")
        log(f"Img/sec per {device}: {mean:.1f} +-{spread:.1f}")
        total = f"{hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}"
        log(f"Total img/sec on {hvd.size()} {device}(s): {total}")
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    report = {"command": shlex.join(sys.argv), "device": name}
    report |= {"torch": torch.__version__, "torch_ring": hvd.__version__, "size": hvd.size()}
    report |= {"options": vars(args), "results": results}
    if args.compare:
        medians = [result["img_sec_median"] for result in results.values()]
        report["ratio"] = medians[0] / medians[1]
        log(f"--- torch_ring / DDP: {report['ratio']:.3f} (of the medians)")
        dist.destroy_process_group()
    if args.json and hvd.rank() == 0:
        args.json.write_text(json.dumps(report, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
