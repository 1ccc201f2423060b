# SPDX-License-Identifier: Apache-2.0
"""``python -m torch_ring``: the self-test."""

import sys

from torch_ring.native import NEEDS_LINUX, is_for_one_rank

if sys.argv[1:] == ["--version"]:
    print(sys.modules["torch_ring"].__version__)
    sys.exit()
if is_for_one_rank():
    sys.exit(f"python -m torch_ring: the self-test {NEEDS_LINUX}")
try:
    from torch_ring.self_test.command import main
except ImportError as error:
    if error.name != "torch_ring":
        raise
    sys.exit(f"python -m torch_ring: {error}")  # no native module for this torch

if __name__ == "__main__":
    sys.exit(main())
