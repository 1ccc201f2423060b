# SPDX-License-Identifier: Apache-2.0
"""setup: the identity of this process, and how the ranks of a world find one another and connect.

Open first: `_connect` in `world/join.py`, which calls the phases; then `exchange`.
"""
