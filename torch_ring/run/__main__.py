# SPDX-License-Identifier: Apache-2.0
"""``python -m torch_ring.run``: the launcher."""

import sys

from torch_ring.run.command import main

if __name__ == "__main__":
    sys.exit(main())
