"""replace_gloo: the backend ring in place of gloo, for programs that accept no other name."""

from __future__ import annotations

import logging
from typing import Any

from torch.distributed import Backend

__all__ = ["replace_gloo"]

_GLOO = "gloo"


def replace_gloo(name: str) -> None:
    """Have torch.distributed take the backend `name` where a program asks for gloo.

    That is ``init_process_group("gloo")``, ``"cpu:gloo,cuda:nccl"``, ``new_group(backend="gloo")``,
    and the default of CPU tensors. ``torch.distributed.get_backend()`` then says `name`.
    Once more does nothing.
    """
    if Backend.default_device_backend_map.get("cpu") == name:
        return
    Backend.default_device_backend_map["cpu"] = name
    named = Backend.__new__

    def renamed(cls: type[Backend], backend: Any) -> Any:
        is_gloo = isinstance(backend, str) and backend.lower() == _GLOO
        return named(cls, name if is_gloo else backend)

    Backend.__new__ = renamed  # type: ignore[assignment]
    logging.getLogger("torch_ring").warning(
        "TORCH_RING_AS_GLOO=1: torch.distributed uses torch_ring where a program asks for gloo"
    )
