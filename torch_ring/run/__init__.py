"""The launcher: ``python -m torch_ring.run``, and `run`, which runs a function on ranks."""

from torch_ring.run.function import run

__all__ = ["run"]
