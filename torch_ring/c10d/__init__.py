# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's backend ``ring``: ``init_process_group("ring")``.

Open first: `registration`, then `groups`; the operations are in C++ (csrc/c10d).
"""
