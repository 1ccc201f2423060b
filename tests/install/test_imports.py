# SPDX-License-Identifier: Apache-2.0
"""Imports: the choice of the native module, and `import torch_ring` before torch."""

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


def test_the_module_of_the_minor_version(modules: Path) -> None:
    for version in ("2.13.0+cpu", "2.13.1", "2.13.0.dev20260101"):
        assert find_module(modules, version) == str(modules / "torch_2_13")


def test_another_torch_is_refused_in_one_line(modules: Path) -> None:
    for version in ("2.15.0+cu130", "2.1.3", "3.13.0"):
        message = f"for torch 2.9, 2.13, 2.14, and this is torch {version}: build it again with"
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


ROOT = Path(__file__).parents[2]


def run_python(program: str, **environment: str) -> str:
    """Return the output of a program in a fresh process."""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_the_launcher_and_its_agent_import_no_torch() -> None:
    program = """
import sys, torch_ring
import torch_ring.run.command, torch_ring.run.agent, torch_ring.run.function
assert torch_ring.__version__
print([name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy")])
"""
    assert run_python(program) == "[]"


def test_a_job_runs_where_torch_cannot_be_imported() -> None:
    program = """
import sys
sys.modules["torch"] = None  # importing it is an error
from torch_ring.run.command import main
sys.exit(main(["-np", "2", "sh", "-c", "echo $RANK"]))
"""
    assert sorted(run_python(program).split()) == ["[0]<stdout>:0", "[1]<stdout>:1"]


def test_names_come_with_their_first_use() -> None:
    program = """
import sys, torch_ring
assert "torch" not in sys.modules
torch_ring.rank = lambda: 7
assert torch_ring.allreduce is not None
assert "torch" in sys.modules
print(torch_ring.allreduce.__name__, torch_ring.elastic.__name__, torch_ring.rank())
"""
    assert run_python(program) == "allreduce torch_ring.elastic 7"


def test_the_compiler_is_imported_by_those_who_compile() -> None:
    program = """
import sys, torch, torch_ring
torch_ring.init()
torch_ring.allreduce(torch.ones(1))
print([name for name in sys.modules if name in ("torch._dynamo", "torch._inductor", "sympy")])
"""
    assert run_python(program) == "[]"


def test_a_module_can_be_the_first_import() -> None:
    program = "import torch_ring.elastic.state; import torch_ring as hvd; print(hvd.Average.name)"
    assert run_python(program) == "Average"


def test_the_backend_is_known_beside_torch() -> None:
    program = """
import torch_ring, torch
torch_ring.size  # where nothing is installed, the order of the imports may leave it to this
print("ring" in torch.distributed.Backend.backend_list)
"""
    assert run_python(program) == "True"


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    program = """
import torch_ring
try:
    torch_ring.allredcue
except AttributeError as error:
    print(error)
"""
    assert run_python(program) == "module 'torch_ring' has no attribute 'allredcue'"


@pytest.mark.parametrize("begin", ["import torch_ring", "import torch"])
def test_another_torch_is_refused_by_import_or_first_use(begin: str) -> None:
    program = f"""
{begin}
import torch
torch.__version__ = "1.99.0"
try:
    import torch_ring
    torch_ring.allreduce
except ImportError as error:
    print(error)
"""
    assert "and this is torch 1.99.0: build it again" in run_python(program)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("world_size", "size()"), ("get_rank", "rank()"), ("all_reduce", "allreduce()")],
)
def test_names_of_ddp_get_ours(name: str, ours: str) -> None:
    message = re.escape(f"module 'torch_ring' has no attribute '{name}': use {ours}")
    with pytest.raises(AttributeError, match=f"^{message}$"):
        getattr(torch_ring, name)
    assert not hasattr(torch_ring, "words_of_nobody")


def test_all_advice_for_names_of_ddp_is_true() -> None:
    """The advice names functions that there are, and no name that there is gets advice."""
    for theirs, ours in torch_ring._OURS.items():
        assert hasattr(torch_ring, ours.partition("(")[0]), ours
        assert theirs not in torch_ring.__all__


def test_the_version_needs_no_torch() -> None:
    program = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['torch_ring', '--version']"
    )
    run = f"{program}; runpy.run_module('torch_ring', run_name='__main__')"
    shown = subprocess.run([sys.executable, "-c", run], stdout=subprocess.PIPE, check=True)
    assert shown.stdout.decode() == f"{torch_ring.__version__}\n"
