"""Jobs: sizes and ready times of a model's gradients, from torchvision, without computing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Constructor options that save work here, or that fit the benchmarked variant.
OPTIONS: dict[str, dict[str, bool]] = {
    "inception_v3": {"init_weights": False, "aux_logits": False},
    "vgg16": {"init_weights": False},
}
EDGE = {"inception_v3": 299}  # pixels; the others: 224


@dataclass(frozen=True)
class Parameter:
    """One parameter: its elements, and the multiplications that make its layer's output."""

    numel: int
    work: float


@functools.cache
def parameters_of(name: str) -> tuple[Parameter, ...]:
    """Return the parameters of a torchvision model in the order of the forward pass.

    A convolution or linear layer multiplies each weight once for every position of its output.
    Normalisation and biases count as no work.
    """
    from torchvision import models

    with torch.device("meta"):
        model = models.get_model(name, weights=None, **OPTIONS.get(name, {})).eval()
        image = torch.empty(1, 3, EDGE.get(name, 224), EDGE.get(name, 224))
    found: list[Parameter] = []

    def visit(module: nn.Module, _: Any, output: Tensor) -> None:
        for index, parameter in enumerate(module.parameters(recurse=False)):
            multiplies = isinstance(module, nn.Conv2d | nn.Linear) and index == 0
            positions = output.numel() / parameter.shape[0] if multiplies else 0
            found.append(Parameter(parameter.numel(), parameter.numel() * positions))

    for module in model.modules():
        module.register_forward_hook(visit)
    model(image)
    assert sum(p.numel for p in found) == sum(p.numel() for p in model.parameters())
    return tuple(found)


@dataclass(frozen=True)
class Job:
    """Training of one model on one GPU: its parameters and its time.

    Attributes:
        parameters: in the order of the forward pass.
        compute_s: a step's forward and backward pass.
    """

    parameters: Sequence[Parameter]
    compute_s: float

    def faster(self, factor: float) -> Job:
        """Return the same job on a GPU that is `factor` times as fast."""
        return Job(self.parameters, self.compute_s / factor)

    def ready_s(self) -> list[float]:
        """Return, by parameter, when its gradient is ready, from the start of the forward pass.

        The forward pass takes a third of the time, as it multiplies once where the backward pass
        does twice. Backward visits the layers in reverse, for a time in proportion to their work.
        """
        whole = sum(p.work for p in self.parameters)
        now, ready = self.compute_s / 3, []
        for parameter in reversed(self.parameters):
            now += self.compute_s * 2 / 3 * parameter.work / whole
            ready.append(now)
        return ready[::-1]


def job_of(name: str, images: int, images_per_s: float) -> Job:
    return Job(parameters_of(name), images / images_per_s)
