# SPDX-License-Identifier: Apache-2.0
"""register_backend: makes ``ring`` known to torch.distributed.

This module imports nothing of torch_ring that has native code: torch may import it at the end of
every ``import torch``.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import Backend, ProcessGroup

from torch_ring.config import Config, let_ddp_ask_for_memory
from torch_ring.config.horovod_path import install
from torch_ring.native import is_for_one_rank, require_one_rank

if TYPE_CHECKING:
    from torch_ring._C import RingBackend
    from torch_ring.c10d.groups import Group

__all__ = ["autoload", "register_backend"]

_NAME = "ring"


def register_backend() -> None:
    """Make ``torch.distributed.init_process_group("ring")`` work. A second call does nothing.

    ``import torch_ring`` calls it, and so does torch 2.14 and later, from the entry point
    ``torch.distributed.backends``, when a program asks for a backend of this name.
    """
    if dist.is_available() and _NAME not in dist.Backend.backend_list:
        # A list: torch 2.13 would take each letter of a string for a device.
        dist.Backend.register_backend(
            _NAME, _make_backend, extended_api=True, devices=["cpu", "cuda"]
        )


def autoload() -> None:
    """Make the backend known at the end of ``import torch``: the entry point ``torch.backends``.

    With ``TORCH_RING_AS_GLOO=1`` the backend takes the place of gloo, and with
    ``TORCH_RING_AS_HOROVOD=1`` torch_ring that of Horovod. Raises nothing: an error here would make
    ``import torch`` fail.
    """
    try:
        register_backend()
        config = Config.from_environment()
        if dist.is_available() and config.as_gloo:
            replace_gloo(_NAME)
        if config.as_horovod != "0":
            install()
    except Exception as error:
        logging.getLogger("torch_ring").warning(
            "torch_ring could not prepare this process: %s", error
        )


def _make_backend(options: Any, _: Any) -> RingBackend | dist.ProcessGroupGloo:
    """Return the backend of one group. `options`: torch's _DistributedBackendOptions."""
    from torch_ring.c10d.groups import Group

    if is_for_one_rank():  # gloo does it
        require_one_rank(options.group_size, 'init_process_group("ring")')
        return dist.ProcessGroupGloo(options.store, 0, 1, options.timeout)
    if torch.cuda.device_count() == 0:  # with GPUs, leave NCCL's setting alone
        let_ddp_ask_for_memory()
    rank, size, timeout_s = options.group_rank, options.group_size, options.timeout.total_seconds()
    group = Group(
        rank,
        size,
        tuple(options.global_ranks_in_group) or tuple(range(size)),
        options.store,
        timeout_s,
        name=options.group_id,
        is_default=not dist.is_initialized(),
        part_of=_default_group() if dist.is_initialized() else None,
        is_deferred=getattr(options, "enable_reconfigure", False),  # torch 2.14 and later
    )
    return _backend_of(group, options.store, timeout_s)


def _backend_of(group: Group, store: Any, timeout_s: float) -> RingBackend:
    """Return a backend, which leaves the group when its last reference is dropped."""
    from torch_ring._C import RingBackend

    def split(store: Any, ranks: list[int], timeout_s: float) -> RingBackend:
        return _backend_of(group.among(ranks, store, timeout_s), store, timeout_s)

    return RingBackend(
        group.rank, group.size, group=group, split=split, store=store, timeout_s=timeout_s
    )


def _default_group() -> Group | None:
    """Return the default group of torch.distributed, if a backend of ours has it."""
    from torch_ring._C import RingBackend

    default = dist.group.WORLD
    assert default is not None
    for device in default._device_types:
        backend: Any = default._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(backend, RingBackend):
            group: Group = backend.group
            return group
    return None


_GLOO = "gloo"


def replace_gloo(name: str) -> None:
    """Have torch.distributed take the backend `name` where a program asks for gloo.

    That is ``init_process_group("gloo")``, ``"cpu:gloo,cuda:nccl"``, ``new_group(backend="gloo")``,
    and the default of CPU tensors. ``torch.distributed.get_backend()`` still returns ``"gloo"``,
    since programs compare it. A second call does nothing.
    """
    if Backend.default_device_backend_map.get("cpu") == name:
        return
    Backend.default_device_backend_map["cpu"] = name
    named = Backend.__new__

    def renamed(cls: type[Backend], backend: Any) -> Any:
        is_gloo = isinstance(backend, str) and backend.lower() == _GLOO
        return named(cls, name if is_gloo else backend)

    Backend.__new__ = renamed  # type: ignore[assignment]
    answer = dist.get_backend

    @functools.wraps(answer)
    def get_backend(group: ProcessGroup | None = None) -> str:
        backend = answer(group)
        return _GLOO if backend == name else backend

    dist.get_backend = get_backend
    logging.getLogger("torch_ring").warning(
        "TORCH_RING_AS_GLOO=1: torch.distributed uses torch_ring where a program asks for gloo"
    )
