# SPDX-License-Identifier: Apache-2.0
"""The behaviours of horovod.torch that users rely on, a function for each.

Each function runs on the ranks of an initialised world of 2 or 3 and leaves it usable. main() runs
all of them in one job of any launcher. The project's list has the same numbers.
"""

import behaviours_of_collectives
import behaviours_of_training

import torch_ring as hvd

_NAMED = vars(behaviours_of_collectives) | vars(behaviours_of_training)
BEHAVIOURS = [_NAMED[name] for name in sorted(_NAMED) if name.startswith("behaviour_")]


def main() -> None:
    hvd.init()
    for behaviour in BEHAVIOURS:
        behaviour()
    print(f"rank {hvd.rank()} of {hvd.size()}: {len(BEHAVIOURS)} behaviours", flush=True)
