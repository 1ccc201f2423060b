"""A workload's training step on this rank: alone, with torch_ring, or with DDP."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from peers import group_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workloads import Batch, Workload

import torch_ring as hvd

VARIANTS = ("torch", "torch_ring", "ddp")
"""No communication; DistributedOptimizer; DistributedDataParallel with its defaults.

Further variants: "nan_check" is DistributedOptimizer with nan_check; "ddp_ring" is DDP over the
backend ring; "barrier" sends no gradients, but waits for all ranks after each backward pass.
"""


class Replica:
    """A model and the step that trains it, always on the same batch."""

    def __init__(self, workload: Workload, variant: str, model: nn.Module, batch: Batch) -> None:
        self._batch = batch
        self._loss = workload.loss
        self._model = model
        if variant.startswith("ddp"):
            group = group_of("ring" if variant == "ddp_ring" else "gloo")
            self._model = DistributedDataParallel(model, process_group=group)
        self.optimizer = workload.make_optimizer(model.parameters())
        self._waits = variant == "barrier"
        if variant in ("torch_ring", "nan_check"):
            named, looks = model.named_parameters(), variant == "nan_check"
            hvd.DistributedOptimizer(self.optimizer, named, nan_check=looks)
        self.parameters: list[Tensor] = list(model.parameters())

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._loss(self._model, self._batch).backward()
        if self._waits:
            hvd.barrier()
        self.optimizer.step()

    @property
    def gradient_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters)


def replicas_of(
    workload: Workload, samples: int | None = None, variants: Sequence[str] = VARIANTS
) -> dict[str, Replica]:
    """Return a replica of each variant: the same weights on all ranks, a batch for each rank.

    Args:
        samples: in a batch; None: the workload's own number.
    """
    torch.manual_seed(0)
    model = workload.make_model()
    torch.manual_seed(1 + hvd.rank())
    batch = workload.make_batch(samples or workload.batch)
    return {variant: Replica(workload, variant, deepcopy(model), batch) for variant in variants}


def difference(one: Replica, other: Replica) -> float:
    """Return the largest difference of two replicas' gradients, relative to the largest gradient.

    Gradients are compared and not weights: Adam's first steps hardly depend on a gradient's size.
    """
    pairs = [(p.grad, q.grad) for p, q in zip(one.parameters, other.parameters, strict=True)]
    largest = max(float(gradient.abs().max()) for gradient, _ in pairs)
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs) / largest
