# SPDX-License-Identifier: Apache-2.0
"""A made-up collective and a made-up setting take as few places as CONTRIBUTING.md says, and work.

Each is a patch of a copy of the tree, which is built and runs a program.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from copied_tree import ROOT, build, copy_tree
from launcher_commands import TORCHRUN, clean_environment

HERE = Path(__file__).parent
PLACES = {"collective": 9, "setting": 4}
RANKS = 3
HAS_GIT = (ROOT / ".git").exists()  # git lists the files to copy


def applied(patch: Path, tree: Path, *options: str) -> str:
    """Apply a patch; return the problem, "" if there is none."""
    command = ["git", "apply", *options, str(patch)]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize(("trial", "places"), PLACES.items())
def test_it_takes_few_places(trial: str, places: int) -> None:
    patch = HERE / f"{trial}.patch"
    assert len(re.findall(r"^\+\+\+ ", patch.read_text(), re.MULTILINE)) == places
    if HAS_GIT:
        assert not applied(patch, ROOT, "--check")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy with both patches, built."""
    if not HAS_GIT:
        pytest.skip("this is no checkout")
    tree = tmp_path_factory.mktemp("trials") / "tree"
    copy_tree(tree)
    for trial in PLACES:
        assert not applied(HERE / f"{trial}.patch", tree)
    build(tree)
    return tree


def output_of(program: str, tree: Path, **env: str) -> str:
    """Return the output of a program on three ranks, which import the copy."""
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", str(RANKS), str(HERE / program)],
        env=clean_environment(PYTHONPATH=os.fspath(tree), **env),
        cwd=tree.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.weekly
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_collective(tree: Path, transport: str) -> None:
    output = output_of("rotate.py", tree, TORCH_RING_TRANSPORT=transport)
    assert output.count("rotated") == RANKS, output


@pytest.mark.weekly
def test_the_setting(tree: Path) -> None:
    env = {"TORCH_RING_TIMEOUT": "1", "TORCH_RING_MOST_BLAMED": "1"}
    output = output_of("late.py", tree, **env)
    assert re.search(r"gave up after 1 s .*: rank 1 .* has not called it", output), output
    assert not re.search(r"rank 2 \(pid \d+\) has not called it", output), output
