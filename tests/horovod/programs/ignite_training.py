# SPDX-License-Identifier: Apache-2.0
"""Trains with PyTorch-Ignite on Horovod: ignite starts the ranks, and wraps model and data."""

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from torch.utils.data import TensorDataset

SAMPLES, FEATURES, EPOCHS = 64, 4, 20


def train(local_rank: int) -> None:
    torch.manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES)
    data = TensorDataset(inputs, inputs @ torch.arange(1.0, FEATURES + 1).reshape(-1, 1))
    loader = idist.auto_dataloader(data, batch_size=16, shuffle=True)
    torch.manual_seed(idist.get_rank())  # ranks begin with different weights
    model = idist.auto_model(torch.nn.Linear(FEATURES, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
    losses = []

    @trainer.on(Events.EPOCH_COMPLETED)
    def note(engine: Engine) -> None:
        losses.append(engine.state.output)

    trainer.run(loader, max_epochs=EPOCHS)
    assert losses[-1] < losses[0] / 100, losses
    weights = idist.all_gather(model.weight.detach())
    assert all(torch.equal(weights[0], each) for each in weights), weights
    assert idist.get_world_size() == weights.shape[0]
    print(f"rank {idist.get_rank()} of {idist.get_world_size()} on {idist.backend()}: trained")


if __name__ == "__main__":
    with idist.Parallel(backend="horovod", nproc_per_node=int(sys.argv[1])) as parallel:
        parallel.run(train)
