# SPDX-License-Identifier: Apache-2.0
"""Writes docs/settings.md from torch_ring.config: python docs/write_settings.py."""

from __future__ import annotations

import re
from pathlib import Path

from torch_ring.config import GROUPS

PAGE = Path(__file__).parent / "settings.md"
INTRODUCTION = """\
<!-- Written by docs/write_settings.py: change torch_ring/config/settings.py, and run it. -->

# Settings

`init()` reads these environment variables: set them before it, to the same values on all ranks. A launcher passes them on (Open MPI to other hosts with `-x NAME` only). A wrong value is an `InvalidArgumentError` that names the variable and the values that it may have; a variable that begins with `TORCH_RING_` and is no setting is a warning. The variables of Horovod in parentheses are honoured when ours is not set.

[Launching](launching.md) has the variables by which launchers tell a process its rank.
"""  # noqa: E501


def page() -> str:
    """Return the text of docs/settings.md."""
    lines = [INTRODUCTION]
    for title, group in GROUPS.items():
        lines += [f"## {title}\n", "| variable | means | default |", "|---|---|---|"]
        for setting in group:
            names = f"`{setting.variable}`"
            aliases = ", ".join(f"`{alias}`" for alias, _ in reversed(setting.aliases))
            names += f" ({aliases})" if aliases else ""
            meaning = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", setting.meaning)
            lines.append(f"| {names} | {meaning} | {setting.default} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
