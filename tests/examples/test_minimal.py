"""The minimal program: README.md shows it as a diff, and it trains on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from scripts import ROOT, Run, run

TRAIN = ROOT / "examples" / "minimal" / "train.py"


def readme_diff() -> tuple[str, str]:
    """Return the program before and after the diff in README.md."""
    (diff,) = re.findall(
        r"```diff\n(--- train.py\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "@@"))]
    before, after = (
        "".join(f"{line[1:]}\n" for line in lines if not line.startswith(other)) for other in "+-"
    )
    return before, after


def losses(outcome: Run) -> list[float]:
    assert outcome.code is None, outcome
    return [float(loss) for loss in re.findall(r"loss (\S+)", outcome.output)]


def test_readme_shows_the_program() -> None:
    before, after = readme_diff()
    assert after == TRAIN.read_text()
    assert "hvd" not in before
    assert len(after.splitlines()) <= 50


def test_trains_as_well_on_several_ranks_as_alone(tmp_path: Path) -> None:
    script = tmp_path / "before.py"
    script.write_text(readme_diff()[0])
    (single,) = run(script, folder=tmp_path, size=1)
    last = losses(single)[-1]
    assert 0 < last < losses(single)[0] / 1000
    for size in (1, 2, 3):
        (tmp_path / "model.pt").unlink()
        first, *others = run(TRAIN, folder=tmp_path, size=size)
        assert [other.output for other in others] == [""] * (size - 1)
        assert len(losses(first)) == 3
        assert last / 10 < losses(first)[-1] < last * 10
        assert set(torch.load(tmp_path / "model.pt")) == {"weight", "bias"}
