# SPDX-License-Identifier: Apache-2.0
"""Begins an elastic job; the ranks in its arguments, as `rank:place`, die in init()."""

from __future__ import annotations

import os
import sys

from deaths_in_init import let_die

from torch_ring.world import current

if __name__ == "__main__":
    deaths = dict(each.split(":") for each in sys.argv[1:])
    rank, _, nth = os.environ["TORCH_RING_PROCESS"].partition(".")
    if rank in deaths and nth == "1":
        let_die(deaths[rank])
    current.init()
    print(f"process {os.environ['TORCH_RING_PROCESS']} is rank {current.world().rank}")
