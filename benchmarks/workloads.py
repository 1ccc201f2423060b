# SPDX-License-Identifier: Apache-2.0
"""Workloads of the benchmarks: models, batches, losses, optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

Batch = tuple[Tensor, Tensor]
CLASSES = 1000


@dataclass(frozen=True)
class Workload:
    """One model, with its batch, loss and optimizer."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]  # takes the number of samples
    loss: Callable[[nn.Module, Batch], Tensor]
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    batch: int  # default samples of a step


sgd = functools.partial(SGD, lr=0.001, momentum=0.9)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


# --- images


def mnist_cnn() -> nn.Module:
    """Return the model of examples/mnist."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(64 * 12**2, 128), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(128, 10),
    ).to(memory_format=torch.channels_last)


def torchvision_model(name: str) -> nn.Module:
    from torchvision import models

    return models.get_model(name, weights=None).to(memory_format=torch.channels_last)


def images(channels: int, edge: int, classes: int, count: int) -> Batch:
    pixels = torch.randn(count, channels, edge, edge).to(memory_format=torch.channels_last)
    return pixels, torch.randint(classes, (count,))


def of_torchvision(name: str, edge: int, batch: int) -> Workload:
    return Workload(
        functools.partial(torchvision_model, name),
        functools.partial(images, 3, edge, CLASSES),
        cross_entropy,
        sgd,
        batch,
    )


# --- a physics-informed network, as in examples/pinn: -u'' = f on [-1, 1], u(-1) = u(1) = 0


def pinn() -> nn.Module:
    """Return u: two hidden layers of 16 units."""
    layers = (nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    return nn.Sequential(*layers)


def points(count: int) -> Batch:
    """Return points where the equation must hold, and the ends of the interval."""
    return torch.rand(count, 1) * 2 - 1, torch.tensor([[-1.0], [1.0]])


def residual(model: nn.Module, batch: Batch) -> Tensor:
    inside, ends = batch
    inside = inside.detach().requires_grad_()
    # One call for both: DDP prepares a backward pass in every call.
    u = model(torch.cat([inside, ends]))
    (u_x,) = torch.autograd.grad(u[: len(inside)].sum(), inside, create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), inside, create_graph=True)
    f = torch.sin(2 * torch.pi * inside)  # in units of its largest value, (2 pi)^2
    return (u_xx / (2 * torch.pi) ** 2 + f).square().mean() + u[len(inside) :].square().mean()


# --- parameters only


class Parameters(nn.Module):
    """Many small parameters, whose gradients are cheap to compute: only handling them takes time.

    The gradients are slices of one product, dense and unshared, so that autograd keeps them without
    a copy, as it does those of a layer.
    """

    def __init__(self, count: int, numel: int = 16) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.zeros(numel) for _ in range(count))

    def forward(self, factors: Tensor) -> Tensor:
        return torch.dot(torch.cat(list(self.values)), factors)


def parameters(count: int) -> Workload:
    def make_batch(_: int) -> Batch:
        factors = torch.randn(sum(p.numel() for p in Parameters(count).parameters()))
        return factors, factors

    return Workload(
        functools.partial(Parameters, count),
        make_batch,
        lambda model, batch: model(batch[0]),
        functools.partial(SGD, lr=0.001),
        batch=1,
    )


WORKLOADS = {
    "mnist": Workload(
        mnist_cnn, functools.partial(images, 1, 28, 10), cross_entropy, Adam, batch=64
    ),
    "resnet18": of_torchvision("resnet18", edge=64, batch=16),
    "resnet50": of_torchvision("resnet50", edge=224, batch=2),
    "vgg16": of_torchvision("vgg16", edge=64, batch=8),
    "pinn": Workload(pinn, points, residual, Adam, batch=51),
    "parameters": parameters(500),
}
