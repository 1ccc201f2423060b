# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO-1 trains on ring: the program initialises torch.distributed before it does.

DeepSpeed compiles an operation of its own at the first start, for a minute.
"""

import hashlib
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist

import torch_ring  # noqa: F401 - makes the backend known

# The one line that changes: DeepSpeed takes the default group that it finds.
dist.init_process_group("ring")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
    config={
        "train_micro_batch_size_per_gpu": 32,
        "zero_optimization": {"stage": 1},
        "zero_force_ds_cpu_optimizer": False,  # torch's own Adam
    },
)

torch.manual_seed(dist.get_rank())
losses = []
for _ in range(100):
    inputs = torch.randn(32, 16)
    loss = (engine(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)  # averages the gradients
    engine.step()
    losses.append(loss.item())

weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
print(
    f"rank {dist.get_rank()} of {dist.get_world_size()} on {dist.get_backend()}: "
    f"loss {losses[0]:.4f} to {losses[-1]:.4f}, weights {digest}",
    flush=True,
)
dist.destroy_process_group()
