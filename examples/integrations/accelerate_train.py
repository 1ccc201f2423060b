# SPDX-License-Identifier: Apache-2.0
"""Accelerate trains on ring: the program initialises torch.distributed before it does."""

import hashlib

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import torch_ring  # noqa: F401 - makes the backend known

# The one line that changes. On CPUs Accelerate knows no backends but gloo and mpi: it refuses
# InitProcessGroupKwargs(backend="ring"). It takes the default group that it finds, though.
dist.init_process_group("ring")
accelerator = Accelerator(cpu=True)

torch.manual_seed(0)
inputs = torch.randn(2048, 16)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.Adam(model.parameters(), lr=0.01),
    DataLoader(dataset, batch_size=32, shuffle=True),
)

losses = []
for _epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())

weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
print(
    f"rank {dist.get_rank()} of {dist.get_world_size()} on {dist.get_backend()}: "
    f"loss {losses[0]:.4f} to {losses[-1]:.4f}, weights {digest}",
    flush=True,
)
accelerator.end_training()  # destroys the group
