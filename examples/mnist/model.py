# SPDX-License-Identifier: Apache-2.0
"""The classic small CNN: conv 32, conv 64, max-pool, dense 128, dense 10."""

import torch
from torch import nn


def make_model(pixels: int) -> nn.Module:
    """Return the CNN for images of `pixels` x `pixels`, with random weights."""
    pooled = (pixels - 4) // 2  # a convolution takes off one pixel at every edge
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(64 * pooled**2, 128), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(128, 10),
    )
    return model.to(memory_format=torch.channels_last)  # faster on a CPU
