# SPDX-License-Identifier: Apache-2.0
"""Lightning trains on ring: DDPStrategy takes the name of the backend."""

import hashlib

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import torch_ring  # noqa: F401 - makes the backend known, in each process that imports this file


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_train_end(self):
        weights = torch.nn.utils.parameters_to_vector(self.parameters())
        digest = hashlib.sha256(weights.detach().numpy().tobytes()).hexdigest()[:16]
        first, last = self.losses[0], self.losses[-1]
        print(
            f"rank {dist.get_rank()} of {dist.get_world_size()} on {dist.get_backend()}: "
            f"loss {first:.4f} to {last:.4f}, weights {digest}",
            flush=True,
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    inputs = torch.randn(2048, 16)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="ring"),  # the one line that changes
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(dataset, batch_size=32, shuffle=True))
