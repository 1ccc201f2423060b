# SPDX-License-Identifier: Apache-2.0
"""Runs the programs and the behaviours in one job, whose processes start only once."""

import sys
from pathlib import Path

import gan
import imagenet
import mnist
import synthetic

import torch_ring as hvd

hvd.init()
for_adasum = hvd.size() == 2  # a power of two
mnist.main(["--fp16-allreduce", "--gradient-predivide-factor", "2"])
hvd.shutdown()
if hvd.is_initialized():
    raise SystemExit("shutdown() did nothing")
mnist.main(["--use-adasum", "--lr", "0.1"] if for_adasum else [])
imagenet.main([])
imagenet.main(["--fp16-allreduce"])
synthetic.main(["--fp16-allreduce"])
synthetic.main(["--use-adasum"] if for_adasum else [])
gan.main()
print(f"rank {hvd.rank()} of {hvd.size()}: all programs", flush=True)
hvd.shutdown()

sys.path.append(str(Path(__file__).parent.parent))
import horovod_behaviours  # noqa: E402

horovod_behaviours.main()
