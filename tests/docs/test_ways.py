"""The files listed in the documentation: the paths of an allreduce, a gradient and others."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from pool import run
from scripts import ROOT
from torch.optim import SGD

import torch_ring as hvd

ALLREDUCE, GRADIENT = "csrc/README.md", "docs/internals/gradients.md"
PAGES = (ALLREDUCE, GRADIENT, "docs/internals/torch-distributed.md", "docs/internals/world.md")


def files_of_way(page: str) -> list[str]:
    """Return the files in the table of a page, in order."""
    _, _, rest = (ROOT / page).read_text().partition("# The files of this way\n")
    return re.findall(r"^\| `([\w/.]+)` \|", rest.partition("\n#")[0], re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_the_files_are_there(page: str) -> None:
    files = files_of_way(page)
    assert len(files) == len(set(files)) > 4
    for file in files:
        assert any((ROOT / f"{file}{suffix}").exists() for suffix in ("", ".h", ".cc")), file


@contextmanager
def seeing_files() -> Iterator[set[str]]:
    """Context that collects the files of torch_ring in which this thread calls functions."""
    seen: set[str] = set()
    package = Path(hvd.__file__).parent

    def note(frame: FrameType, _event: str, _argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if package in path.parents:
            seen.add(str(path.relative_to(package.parent)))

    gc.collect()  # garbage of earlier tests would be traced when it is collected
    gc.disable()
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        gc.enable()


def allreduce() -> Callable[[], Any]:
    tensor = torch.ones(256)
    return lambda: hvd.allreduce(tensor, name="t")


def train() -> Callable[[], Any]:
    parameter = torch.ones(256, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=0.1))

    def step() -> None:
        parameter.sum().backward()
        optimizer.step()

    return step


def files_of_call(make: Callable[[], Callable[[], Any]]) -> set[str]:
    """Return the files of one call, after some warm-up calls."""
    call = make()
    for _ in range(3):
        call()
    with seeing_files() as seen:
        call()
    return seen


@pytest.mark.parametrize(("page", "make"), [(ALLREDUCE, allreduce), (GRADIENT, train)])
def test_a_call_passes_the_files_in_python(page: str, make: Callable[[], Any]) -> None:
    listed = {file for file in files_of_way(page) if file.endswith(".py")}
    for seen in run(files_of_call, 2, args=(make,)):
        assert seen == listed
