"""Clusters of GPUs, and the modelled cost of a data-parallel training step on them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, log2

import torch
from choice import allreduce_s, choose_allreduce
from layers import Job
from steps import FUSION_BYTES, Bucket, Link, Step, horovod_step, ring_s, torch_ring_step

from torch_ring._C import GradientReport, PassReport

# A ring's share of a line's rate, from the fit to Horovod's curves at 25 Gbit/s.
LINE_SHARE = 0.82


@dataclass(frozen=True)
class Cluster:
    """Hosts with several GPUs each.

    Attributes:
        network: the link of a host, with all its adapters.
        local: the link between GPUs of a host.
        control: TCP between hosts, for the agreements.
        speed: a GPU's speed, relative to Horovod's Pascal GPUs.
        images: the images in a batch of a GPU.
    """

    name: str
    gpus_per_host: int
    network: Link
    local: Link
    control: Link
    speed: float = 1.0
    images: int = 64


# One TCP connection; 30 us for a message through both kernels.
TCP = Link(2.5e9, 30e-6)

# Latencies (us): NCCL's own model (src/graph/tuning.cc), ring, protocol Simple: network 9.6,
# NVLink 3.4, PCIe 5.7. A100: 235 GB/s inside a host (the same), 8 adapters of 200 Gbit/s. Speed:
# ResNet-50 in mixed precision, 2470 images/s (NVIDIA DeepLearningExamples), over 219 on a P100
# (TensorFlow's benchmarks page).
A100 = Cluster(
    "A100",
    gpus_per_host=8,
    network=Link(8 * 25e9 * LINE_SHARE, 9.6e-6),
    local=Link(235e9, 3.4e-6),
    control=TCP,
    speed=2470 / 219,
    images=256,
)
# 8 adapters of 400 Gbit/s, NVLink of 450 GB/s. Speed: the ratio of the tensor cores' rates, 989 to
# 312 Tflop/s. No training gains all of it, so the model demands more of the network.
H100 = replace(
    A100,
    name="H100",
    network=Link(8 * 50e9 * LINE_SHARE, 9.6e-6),
    local=Link(450e9 * LINE_SHARE, 3.4e-6),
    speed=A100.speed * 989 / 312,
)


def on_pascal(network: Link) -> Cluster:
    """Return Horovod's cluster, with the fitted network."""
    return Cluster("Pascal", 4, network, local=Link(10e9, 5.7e-6), control=TCP)


# --- allreduces


def flat_ring_s(size_bytes: float, cluster: Cluster, ranks: int) -> float:
    """Return the time of a ring of all GPUs, whose steps are as slow as the network."""
    return ring_s(size_bytes, ranks, cluster.network)


def hierarchical_s(size_bytes: float, cluster: Cluster, ranks: int) -> float:
    """Return the time inside each host, then around rings of hosts, one ring a GPU of a host."""
    around_s = ring_s(size_bytes, hosts_of(cluster, ranks), cluster.network)
    return inside_s(size_bytes, cluster, ranks) + around_s


def own_hierarchical_s(size_bytes: float, cluster: Cluster, ranks: int) -> float:
    """Return torch_ring's time: 16-bit data goes from host to host as float32 partial sums.

    Each GPU of a host is on a lane of its own and sends its part of them. The choice assumes a
    constant link, so it is not always the best for this network.
    """
    partial_bytes, hosts = 2 * size_bytes, hosts_of(cluster, ranks)
    chosen = choose_allreduce(int(partial_bytes / cluster.gpus_per_host), hosts)
    across_s = allreduce_s(partial_bytes, hosts, cluster.network, chosen)
    return inside_s(size_bytes, cluster, ranks) + across_s


def nccl_s(size_bytes: float, cluster: Cluster, ranks: int) -> float:
    """Return NCCL's time: the faster of a ring and a double binary tree.

    Through a tree of hosts all bytes go up once and down once. P. Sanders et al., "Two-tree
    algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009.
    """
    rings_s = hierarchical_s(size_bytes, cluster, ranks)
    hosts, network = hosts_of(cluster, ranks), cluster.network
    if hosts == 1:
        return rings_s
    tree_s = 2 * (size_bytes / network.bandwidth + depth(hosts) * network.latency_s)
    return min(rings_s, inside_s(size_bytes, cluster, ranks) + tree_s)


def inside_s(size_bytes: float, cluster: Cluster, ranks: int) -> float:
    """Return the time to reduce a part on each GPU of a host, and later to gather all parts."""
    return ring_s(size_bytes, min(ranks, cluster.gpus_per_host), cluster.local)


def hosts_of(cluster: Cluster, ranks: int) -> int:
    return ceil(ranks / cluster.gpus_per_host)


def depth(hosts: int) -> int:
    """Return the number of steps of a tree, or of Bruck's allgather."""
    return ceil(log2(hosts))


# --- agreements

# Bytes of a frame of csrc/collective/frames.h, and of its only run (csrc/collective/runs.h).
FRAME_BYTES, RUN_BYTES, OWN_RUN_BYTES = 16, 16, 8
# Of an entry with one request (csrc/engine/entry.h): the entry, its announcement, and a fingerprint
# of one dimension with a name of at most 48 characters.
ENTRY_BYTES = 8 + 16 + (40 + 8 + 48)


def frame_bytes(parameters: int) -> tuple[int, int]:
    """Return the bytes of a frame before a bucket, and at the end of backward.

    All ranks submit the same request, so a frame has one entry for any number of ranks. The second
    frame also has a report about the gradients, with its rows and length.
    """
    frame = FRAME_BYTES + RUN_BYTES + ENTRY_BYTES
    report = PassReport(1, (GradientReport(0, (1 << parameters) - 1),)).encode()
    return frame, frame + OWN_RUN_BYTES + 8 + 8 + (len(report) + 7) // 8 * 8


def board_s(frame: int, cluster: Cluster, ranks: int) -> float:
    """Return the time of torch_ring's agreement: a frame in each step of Bruck's allgather."""
    control = cluster.control
    return depth(hosts_of(cluster, ranks)) * (control.latency_s + frame / control.bandwidth)


# --- steps


@dataclass(frozen=True)
class Variant:
    """One way to average gradients."""

    step: Callable[[Job], Step]
    allreduce_s: Callable[[float, Cluster, int], float]
    agree_s: Callable[[int, Cluster, int], float] = lambda *_: 0.0


def planned(job: Job) -> Step:
    """Return the step with torch_ring's buckets, bfloat16 on the wire."""
    return torch_ring_step(job, torch.bfloat16)


VARIANTS = {
    "Horovod, flat ring": Variant(lambda job: horovod_step(job, FUSION_BYTES), flat_ring_s),
    "torch_ring, own algorithms": Variant(planned, own_hierarchical_s, board_s),
    "torch_ring, NCCL": Variant(planned, nccl_s, board_s),
}


def efficiency(
    job: Job, cluster: Cluster, variant: Variant, ranks: int, slowdown: float = 0.0
) -> float:
    """Return the scaling efficiency: the time of a step on one GPU over that on `ranks`.

    Agreements and transfers run one after the other, as they do without NCCL; with NCCL they can
    overlap. The last agreement begins when the backward pass ends.
    """
    if ranks == 1:
        return 1.0
    before, closing = frame_bytes(len(job.parameters))
    agreement_s = variant.agree_s(before, cluster, ranks)
    closing_s = variant.agree_s(closing, cluster, ranks)
    step = variant.step(job)
    # A bucket without bytes stands for the agreement that ends the pass.
    step = Step(step.compute_s, (*step.buckets, Bucket(0.0, step.compute_s)))

    def transfer_s(size_bytes: float) -> float:
        if not size_bytes:
            return closing_s
        return agreement_s + variant.allreduce_s(size_bytes, cluster, ranks)

    return step.compute_s / step.time_s(transfer_s, slowdown)
