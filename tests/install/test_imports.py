# SPDX-License-Identifier: Apache-2.0
"""Imports: the choice of the native module, and `import torch_ring` before torch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from other_system import Server
from scripts import ROOT
from slow import slow

import torch_ring
from torch_ring import _C
from torch_ring.native import find_module

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def test_the_module_of_the_minor_version(tmp_path: Path) -> None:
    """A refusal is one line, which names the modules and torch, or Python."""
    with pytest.raises(ImportError, match="not built: build it with"):
        find_module(tmp_path, "2.13.0")
    for minor in (9, 13, 14):
        (tmp_path / f"torch_2_{minor}").mkdir()
        (tmp_path / f"torch_2_{minor}" / f"_C{SUFFIX}").touch()
    for version in ("2.13.0+cpu", "2.13.1", "2.13.0.dev20260101"):
        assert find_module(tmp_path, version) == str(tmp_path / "torch_2_13")
    for version in ("2.15.0+cu130", "2.1.3", "3.13.0"):
        message = f"for torch 2.9, 2.13, 2.14, and this is torch {version}: build it again with"
        with pytest.raises(ImportError, match=re.escape(message)) as caught:
            find_module(tmp_path, version)
        assert "\n" not in str(caught.value)
    (tmp_path / "torch_2_13" / f"_C{SUFFIX}").rename(tmp_path / "torch_2_13" / "_C.cpython-32.so")
    with pytest.raises(ImportError, match=r"built for another Python, and this is 3\.\d+: build"):
        find_module(tmp_path, "2.13.0")
    major, minor = torch.__version__.split(".")[:2]
    assert Path(_C.__file__).parent.name == f"torch_{major}_{minor}"


def output_of(program: str) -> str:
    """Return the output of a program in a process that has imported nothing."""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_launchers_and_the_version_need_no_torch() -> None:
    program = """
import runpy, sys
sys.modules["torch"] = sys.modules["numpy"] = None  # importing them is an error
import torch_ring.run.agent, torch_ring.run.function
from torch_ring.run.command import main
assert main(["-np", "2", "sh", "-c", "echo $RANK"]) == 0
sys.argv = ["torch_ring", "--version"]
runpy.run_module("torch_ring", run_name="__main__")
"""
    expected = ["[0]<stdout>:0", "[1]<stdout>:1", torch_ring.__version__]
    assert sorted(output_of(program).split()) == sorted(expected)


def test_names_come_with_their_first_use() -> None:
    """They bring torch, the backend and what a user has set, and no compiler."""
    program = """
import sys, torch_ring
assert "torch" not in sys.modules
torch_ring.rank = lambda: 7
try:
    torch_ring.allredcue
except AttributeError as error:
    print(error)
import torch
print(torch_ring.allreduce.__name__, torch_ring.elastic.__name__, torch_ring.rank())
print("ring" in torch.distributed.Backend.backend_list)
torch_ring.init()
torch_ring.allreduce(torch.ones(1))
print([name for name in sys.modules if name in ("torch._dynamo", "torch._inductor", "sympy")])
"""
    assert output_of(program).splitlines() == [
        "module 'torch_ring' has no attribute 'allredcue'",
        "allreduce torch_ring.elastic 7",
        "True",
        "[]",
    ]


def test_a_module_can_be_the_first_import(tmp_path: Path, server: Server) -> None:
    program = "import torch_ring.elastic.state; import torch_ring as hvd; print(hvd.Average.name)"
    assert server.run("linux", "-c", program, folder=tmp_path) == (0, "Average\n")


def test_a_module_that_an_older_version_has_left_does_not_win(
    tmp_path: Path, server: Server
) -> None:
    shutil.copytree(Path(torch_ring.__file__).parent, tmp_path / "torch_ring")
    (tmp_path / "torch_ring" / f"_C{SUFFIX}").write_text("not a native module")
    program = "import torch_ring; print(torch_ring._C.__file__)"
    code, output = server.run("linux", "-c", program, folder=tmp_path)
    assert code == 0, output
    assert Path(output.strip()).parents[1] == tmp_path / "torch_ring" / "native"


@pytest.mark.parametrize("hides", [False, slow(True)], ids=["import", "first use"])
def test_another_torch_is_refused(tmp_path: Path, server: Server, hides: bool) -> None:
    """By the import, or by the first use if torch_ring was imported before torch."""
    begin = "torch = sys.modules.pop('torch')\nimport torch_ring\nsys.modules['torch'] = torch"
    program = f"""
import sys
{begin if hides else "import torch"}
torch.__version__ = "1.99.0"
try:
    import torch_ring
    torch_ring.allreduce
except ImportError as error:
    print(error)
"""
    code, output = server.run("linux", "-c", program, folder=tmp_path)
    assert code == 0, output
    assert "and this is torch 1.99.0: build it again" in output


def test_names_of_ddp_get_ours() -> None:
    """The advice names functions that there are, and no name that there is gets advice."""
    message = re.escape("module 'torch_ring' has no attribute 'world_size': use size()")
    with pytest.raises(AttributeError, match=f"^{message}$"):
        _ = torch_ring.world_size
    for theirs, ours in torch_ring._OURS.items():
        assert hasattr(torch_ring, ours.partition("(")[0]), ours
        assert theirs not in torch_ring.__all__
