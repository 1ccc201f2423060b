# SPDX-License-Identifier: Apache-2.0
"""``python -m torch_ring.tracing``: draws timelines and dumps; needs no torch."""

import sys

from torch_ring.tracing.command import main

if __name__ == "__main__":
    sys.exit(main())
