# SPDX-License-Identifier: Apache-2.0
"""The launcher: ``python -m torch_ring.run``, and `run`, which runs a function on ranks.

Open first: `launch`, then `job`; `agent` is the one file that goes to another host.
"""

from torch_ring.run.function import run

__all__ = ["run"]
