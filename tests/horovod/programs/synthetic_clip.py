# SPDX-License-Identifier: Apache-2.0
"""open_clip on made-up data: for its sampler it asks torch.distributed, also with --horovod."""

import sys

import torch.distributed as dist
from open_clip_train.main import main

dist.init_process_group("ring")
main(sys.argv[1:])
dist.destroy_process_group()
