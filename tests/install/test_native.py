"""The choice of the native module at import."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import torch_ring
from torch_ring import _C
from torch_ring.native import find_module

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    for minor in (9, 13, 14):
        (tmp_path / f"torch_2_{minor}").mkdir()
        (tmp_path / f"torch_2_{minor}" / f"_C{SUFFIX}").touch()
    return tmp_path


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.1", "2.13.0.dev20260101"])
def test_the_module_of_the_minor_version(modules: Path, version: str) -> None:
    assert find_module(modules, version) == str(modules / "torch_2_13")


@pytest.mark.parametrize("version", ["2.15.0+cu130", "2.1.3", "3.13.0"])
def test_another_torch_is_refused_in_one_line(modules: Path, version: str) -> None:
    message = f"built for torch 2.9, 2.13, 2.14, and this is torch {version}: build it again with"
    with pytest.raises(ImportError, match=re.escape(message)) as caught:
        find_module(modules, version)
    assert "\n" not in str(caught.value)


def test_another_python_is_refused(modules: Path) -> None:
    (modules / "torch_2_13" / f"_C{SUFFIX}").rename(modules / "torch_2_13" / "_C.cpython-32.so")
    with pytest.raises(ImportError, match=r"built for another Python, and this is 3\.\d+: build"):
        find_module(modules, "2.13.0")


def test_none_is_built(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="not built: build it with"):
        find_module(tmp_path, "2.13.0")


def test_the_module_is_that_of_this_torch() -> None:
    major, minor = torch.__version__.split(".")[:2]
    assert Path(_C.__file__).parent.name == f"torch_{major}_{minor}"
    assert torch_ring._C is _C


def test_a_module_that_an_older_version_has_left_does_not_win(tmp_path: Path) -> None:
    package = Path(torch_ring.__file__).parent
    shutil.copytree(package, tmp_path / "torch_ring")
    (tmp_path / "torch_ring" / f"_C{SUFFIX}").write_text("not a native module")
    program = "import torch_ring; print(torch_ring._C.__file__)"
    command = [sys.executable, "-c", program]
    found = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True
    )
    assert Path(found.stdout.strip()).parent.parent.name == "native", found.stderr


@pytest.mark.slow
def test_the_self_test_shows_it_without_a_traceback(tmp_path: Path) -> None:
    package = Path(torch_ring.__file__).parent
    ignored = shutil.ignore_patterns("torch_2_*", "__pycache__")
    shutil.copytree(package, tmp_path / "torch_ring", ignore=ignored)
    ended = subprocess.run(
        [sys.executable, "-m", "torch_ring"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if "torch_ring" in line]
    assert "torch_ring is not built" in line
    assert "Traceback" not in ended.stderr
