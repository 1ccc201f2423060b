# SPDX-License-Identifier: Apache-2.0
"""Users' programs under type checkers, which find torch_ring as an installed package."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin
from unittest import mock

import pytest
import typing_extensions
from on_ranks import on_ranks
from scripts import ROOT, run_script

import torch_ring as hvd

CALLS = ROOT / "tests" / "docs" / "typed_calls.py"
README = ROOT / "examples" / "minimal" / "train.py"  # a test compares it with README.md

# Errors of README's program that it would also have without torch_ring.
OF_TORCH = {
    'Need type annotation for "sampler"',
    'Call to untyped function "backward" in typed context',
    '"loss" is possibly unbound',
}


@pytest.fixture
def site() -> Iterator[dict[str, str]]:
    """Yield an environment in which Python finds a copy of the package, and no source tree.

    The folder is always the same, so that mypy's cache serves again.
    """
    folder = ROOT / "build" / "typed"
    shutil.rmtree(folder / "site", ignore_errors=True)
    kept = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(hvd.__file__).parent, folder / "site" / "torch_ring", ignore=kept)
    yield {**os.environ, "PYTHONPATH": str(folder / "site")}
    shutil.rmtree(folder / "site")


def complaints(command: list[str], environment: dict[str, str], folder: Path) -> str:
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400
    )
    assert ended.stderr == "", ended.stderr
    return ended.stdout


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_takes_users_programs(site: dict[str, str], tmp_path: Path) -> None:
    programs = [shutil.copy(each, tmp_path) for each in (CALLS, README)]
    cache = ROOT / "build" / "typed" / "mypy"
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), *programs]
    found = complaints(command, site, tmp_path).splitlines()
    assert re.match(r"(Found|Success)", found[-1]), found
    errors = [line for line in found[:-1] if ": error:" in line]
    assert [e for e in errors if not any(message in e for message in OF_TORCH)] == []


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pyright") is None, reason="pyright is not installed")
def test_pyright_takes_users_programs(site: dict[str, str], tmp_path: Path) -> None:
    programs = [shutil.copy(each, tmp_path) for each in (CALLS, README)]
    settings = {"reportUnnecessaryTypeIgnoreComment": "error"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    report = json.loads(complaints([*command, *programs], site, tmp_path))
    assert report["summary"]["filesAnalyzed"] == len(programs)
    errors = [each["message"] for each in report["generalDiagnostics"]]
    assert [message for message in errors if message not in OF_TORCH] == []


@on_ranks(2, transport="", initialized=False, kind="script")
def test_the_types_are_those_of_the_results(tmp_path) -> None:
    folder = str(tmp_path)
    with mock.patch.object(typing_extensions, "assert_type", assert_is):
        assert run_script(str(CALLS), [], folder).code is None


def assert_is(value: Any, kind: Any) -> None:
    is_union = get_origin(kind) in (Union, UnionType)
    kinds = get_args(kind) if is_union else (type(None) if kind is None else kind,)
    assert isinstance(value, tuple(get_origin(each) or each for each in kinds)), (value, kind)


def test_type_checkers_see_all_public_names() -> None:
    tree = ast.parse(Path(hvd.__file__).read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname for each in imports for alias in each.names}
    assert {*seen, "__version__"} - {"_basics"} == set(dir(hvd))
