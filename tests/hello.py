"""Every rank counts them all: what a launcher must make possible."""

import torch

import torch_ring as hvd

hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
print(f"rank {hvd.rank()} of {hvd.size()}: torch {torch.__version__} works")
hvd.shutdown()
