# SPDX-License-Identifier: Apache-2.0
"""Ray Train on ring: TorchConfig takes the name of the backend."""

import hashlib
import tempfile

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset


def train():
    torch.manual_seed(0)
    inputs = torch.randn(2048, 16)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = prepare_data_loader(DataLoader(dataset, batch_size=32, shuffle=True))
    model = prepare_model(
        torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()} on {dist.get_backend()}: "
        f"loss {losses[0]:.4f} to {losses[-1]:.4f}, weights {digest}"
    )


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            train,
            torch_config=TorchConfig(backend="ring"),  # the one line that changes
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()
    ray.shutdown()
