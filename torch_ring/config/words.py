# SPDX-License-Identifier: Apache-2.0
"""Words: the names that a program calls, for errors. Each door of torch_ring has its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["DEFAULT_GROUP", "GROUP", "PROCESS_SET", "WORLD", "Words"]


@dataclass(frozen=True)
class Words:
    """The words of the errors of a world, a process set, or a group of torch.distributed.

    Attributes:
        join: the call that makes it.
        leave: the call by which a rank leaves it.
        whole: its ranks together, as in "this world has ended".
        members: the same, as in "the process set of rank 0, rank 1".
        remedy: advice when it has ended: a sentence without its full stop.
        threads: advice to threads that use it at once.
    """

    join: str
    leave: str
    whole: str
    members: str
    remedy: str
    threads: str


WORLD = Words(
    join="init()",
    leave="shutdown()",
    whole="world",
    members="process set",
    remedy="Call shutdown() and init(), or exit",
    threads="give them names, by which the ranks match them in any order, or give each thread a "
    "process set of its own",
)

PROCESS_SET = replace(
    WORLD,
    join="add_process_set()",
    whole="set",
    remedy="Remove it, or call shutdown() and init(), or exit",
)

DEFAULT_GROUP = Words(
    join="init_process_group()",
    leave="destroy_process_group()",
    whole="group",
    members="group",
    remedy="Call destroy_process_group() and init_process_group(), or exit",
    threads="give each its own group, as in dcp.async_save(..., process_group=dist.new_group())",
)

GROUP = replace(
    DEFAULT_GROUP,
    join="new_group()",
    remedy="Call destroy_process_group(group), or destroy_process_group() and "
    "init_process_group(), or exit",
)
