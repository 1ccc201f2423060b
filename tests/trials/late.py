# SPDX-License-Identifier: Apache-2.0
"""Two late ranks: the error of the third one describes as many as the made-up setting says."""

import contextlib
import time

import torch

import torch_ring as hvd

hvd.init()
if hvd.rank() == 0:
    hvd.allreduce(torch.ones(3))
else:
    time.sleep(4)
    with contextlib.suppress(hvd.RingError):
        hvd.barrier()
