# SPDX-License-Identifier: Apache-2.0
"""A job of any launcher: every rank counts all ranks."""

import sys

import torch

import torch_ring as hvd


def say_hello() -> None:
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    print(f"rank {hvd.rank()} of {hvd.size()}: torch {torch.__version__} works")
    hvd.shutdown()


if "--without-mpi4py-first" in sys.argv:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]  # to import it is an ImportError
    say_hello()
    del sys.modules["mpi4py"]
say_hello()
