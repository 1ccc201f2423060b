# SPDX-License-Identifier: Apache-2.0
"""The benchmark that Horovod's users know, on a small model."""

import argparse
import timeit

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

import torch_ring as hvd


def log(text):
    if hvd.rank() == 0:
        print(text)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--num-warmup-batches", type=int, default=1)
    parser.add_argument("--num-batches-per-iter", type=int, default=2)
    parser.add_argument("--num-iters", type=int, default=2)
    parser.add_argument("--use-adasum", action="store_true")
    args = parser.parse_args(argv)
    args.cuda = torch.cuda.is_available() and bool(hvd.nccl_built())

    hvd.init()
    torch.set_num_threads(1)
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank())
    model = nn.Sequential(nn.Conv2d(3, 16, 7, 4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, 3, 64, 64))
    lr_scaler = hvd.size() if not args.use_adasum else 1
    optimizer = optim.SGD(model.parameters(), lr=0.01 * lr_scaler)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.randn(args.batch_size, 3, 64, 64)
    target = torch.LongTensor(args.batch_size).random_() % 10

    def benchmark_step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()

    timeit.timeit(benchmark_step, number=args.num_warmup_batches)
    img_secs = []
    for x in range(args.num_iters):
        time = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
        img_sec = args.batch_size * args.num_batches_per_iter / time
        log(f"Iter #{x}: {img_sec:.1f} img/sec per CPU")
        img_secs.append(img_sec)
    mean, conf = np.mean(img_secs), 1.96 * np.std(img_secs)
    log(f"Img/sec per CPU: {mean:.1f} +-{conf:.1f}")
    log(f"Total img/sec on {hvd.size()} CPU(s): {hvd.size() * mean:.1f} +-{hvd.size() * conf:.1f}")
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert all(torch.equal(weights, other) for other in hvd.allgather_object(weights))


if __name__ == "__main__":
    main()
