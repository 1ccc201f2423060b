"""`import torch_ring` before torch: its names load torch at first use, the launcher never."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from slow import slow, slow_after

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


@pytest.mark.parametrize(
    "use",
    [
        "torch_ring.allreduce",
        slow("torch_ring.elastic.run"),
        slow("torch_ring._basics"),
        slow("dir(torch_ring).index('allreduce')"),
        slow("[exec('from torch_ring import *', names := {}), names['DistributedOptimizer']]"),
        slow("__import__('torch_ring.optimizer').optimizer.DistributedOptimizer"),
    ],
)
def test_names_come_with_their_first_use(use: str) -> None:
    program = f"""
import sys, torch_ring
assert "torch" not in sys.modules
assert {use} is not None
assert "torch" in sys.modules
print(torch_ring.allreduce.__name__, torch_ring.elastic.__name__)
"""
    assert run_python(program) == "allreduce torch_ring.elastic"


@pytest.mark.parametrize(
    "module", slow_after(1, ["elastic.state", "world.current", "state", "data"])
)
def test_a_module_can_be_the_first_import(module: str) -> None:
    program = f"import torch_ring.{module}; import torch_ring as hvd; print(hvd.Average.name)"
    assert run_python(program) == "Average"


@pytest.mark.parametrize("begin", ["import torch_ring, torch", slow("import torch, torch_ring")])
def test_the_backend_is_known_beside_torch(begin: str) -> None:
    program = f"""
{begin}
torch_ring.size  # where nothing is installed, the order of the imports may leave it to this
print("ring" in torch.distributed.Backend.backend_list)
"""
    assert run_python(program) == "True"


@pytest.mark.slow
def test_what_a_user_has_put_in_place_of_a_name_stays() -> None:
    program = """
import torch_ring
torch_ring.rank = lambda: 7
torch_ring.size
print(torch_ring.rank())
"""
    assert run_python(program) == "7"


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
