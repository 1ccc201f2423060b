# SPDX-License-Identifier: Apache-2.0
"""A copy of the source tree, to be changed and built."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def copy_tree(to: Path) -> None:
    """Copy the files that git knows or does not ignore, and the build so far."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if not (ROOT / name).is_file():
            continue
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)
    doubles = [*ROOT.glob("build/cpp/plain/*.so")]
    for built in doubles:
        (to / built.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, to / built.relative_to(ROOT))
    for built in [*ROOT.glob("torch_ring/native/torch_*"), ROOT / "build" / "core"]:
        if built.exists():
            shutil.copytree(built, to / built.relative_to(ROOT), dirs_exist_ok=True)


def build(tree: Path) -> None:
    """Build the extension of the copy in place."""
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=tree, check=True
    )
