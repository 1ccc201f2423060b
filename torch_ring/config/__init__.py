# SPDX-License-Identifier: Apache-2.0
"""The settings, read from the environment here and nowhere else.

Open first: `settings`, the table of all settings.
"""

from torch_ring.config.settings import (
    GROUPS,
    SETTINGS,
    Config,
    Setting,
    failpoints,
    let_ddp_ask_for_memory,
    let_programs_find_horovod,
    misspelt,
    nccl_host,
    nccl_is_blocking,
    threads_are_chosen,
    variables_set,
)
from torch_ring.config.words import DEFAULT_GROUP, GROUP, PROCESS_SET, WORLD, Words

__all__ = [
    "DEFAULT_GROUP",
    "GROUP",
    "GROUPS",
    "PROCESS_SET",
    "SETTINGS",
    "WORLD",
    "Config",
    "Setting",
    "Words",
    "failpoints",
    "let_ddp_ask_for_memory",
    "let_programs_find_horovod",
    "misspelt",
    "nccl_host",
    "nccl_is_blocking",
    "threads_are_chosen",
    "variables_set",
]
