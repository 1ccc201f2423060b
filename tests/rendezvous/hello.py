"""Every rank counts them all: what a launcher must make possible."""

import sys

import torch

import torch_ring as hvd


def hello() -> None:
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    print(f"rank {hvd.rank()} of {hvd.size()}: torch {torch.__version__} works")
    hvd.shutdown()


if "--without-mpi4py-first" in sys.argv:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]  # to import it is an ImportError
    hello()
    del sys.modules["mpi4py"]
hello()
