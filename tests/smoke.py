# SPDX-License-Identifier: Apache-2.0
"""Smoke test of an installation: one training step, and one group, on any number of ranks."""

import torch
import torch.distributed as dist

import torch_ring as hvd

hvd.init()
model = torch.nn.Linear(3, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
model(torch.full((2, 3), float(hvd.rank()))).sum().backward()
assert model.weight.grad is not None
average = 2 * sum(range(hvd.size())) / hvd.size()
torch.testing.assert_close(model.weight.grad, torch.full((1, 3), average))
optimizer.step()
total = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum)
assert total.item() == hvd.size()

if hvd.size() == 1:
    dist.init_process_group("ring", store=dist.HashStore(), rank=0, world_size=1)
else:
    dist.init_process_group("ring")
ones = torch.ones(3)
dist.all_reduce(ones)
assert ones.eq(hvd.size()).all()
dist.destroy_process_group()

print(f"rank {hvd.rank()} of {hvd.size()}: torch {torch.__version__} works")
hvd.shutdown()
