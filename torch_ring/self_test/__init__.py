"""The self-test, ``python -m torch_ring``: what a machine can do, in words or as JSON.

Open first: `command`.
"""
