# SPDX-License-Identifier: Apache-2.0
"""The self-test, ``python -m torch_ring``: reports a machine's abilities, in words or as JSON.

Open first: `command`.
"""
