# SPDX-License-Identifier: Apache-2.0
"""A rank of torchrun whose agent is killed; for test_exits.py."""

import os
import signal
import time

import torch

import torch_ring as hvd

hvd.init()
hvd.allreduce(torch.ones(3))
if hvd.rank() == 0:
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(60)
print("has outlived its agent")
