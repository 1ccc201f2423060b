"""``python -m torch_ring``: the self-test."""

import sys

from torch_ring.self_test.command import main

if __name__ == "__main__":
    sys.exit(main())
