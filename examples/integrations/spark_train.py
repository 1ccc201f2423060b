# SPDX-License-Identifier: Apache-2.0
"""PySpark's TorchDistributor starts ranks of torch_ring, on the driver here. Needs Java 17."""

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession


def train():
    import hashlib
    import signal

    import torch

    import torch_ring as hvd

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all ranks at once, and quietly
    hvd.init()  # by the variables of torchrun, which the distributor starts
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    losses = []
    for _ in range(100):
        inputs = torch.randn(32, 16)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    line = (
        f"rank {hvd.rank()} of {hvd.size()} on ring: "
        f"loss {losses[0]:.4f} to {losses[-1]:.4f}, weights {digest}"
    )
    return hvd.allgather_object(line)


if __name__ == "__main__":
    spark = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    distributor = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False)
    print(*distributor.run(train), sep="\n")  # the result of rank 0
    spark.stop()
