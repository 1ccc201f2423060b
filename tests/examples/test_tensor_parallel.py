"""Tensor-parallel inference generates the tokens of one process, through each door."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from scripts import ROOT, run
from slow import slow

GENERATE = ROOT / "examples" / "tensor_parallel" / "generate.py"
SMALL = ("--tokens", "8", "--layers", "2", "--width", "64", "--dtype", "float32")


def tokens(folder: Path, *options: str, size: int) -> list[int]:
    first, *others = run(GENERATE, *SMALL, *options, folder=folder, size=size)
    assert all(each.output == "" and each.code is None for each in others)
    found: list[int] = ast.literal_eval(first.output.partition("they begin ")[2])
    return found


@pytest.mark.parametrize("options", [("--eager",), ("--eager", "--over", "ring"), slow(())])
def test_generates_the_tokens_of_one_process(options: tuple[str, ...], tmp_path: Path) -> None:
    alone = tokens(tmp_path, "--eager", size=1)
    assert len(set(alone)) > 3
    assert tokens(tmp_path, *options, size=2) == alone
