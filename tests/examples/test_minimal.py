"""The minimal program: README.md shows it as a diff, and it trains on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

from scripts import ROOT, Run, run

TRAIN = ROOT / "examples" / "minimal" / "train.py"


def readme_diff() -> tuple[str, str]:
    """Return the program before and after the diff in README.md."""
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
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


def test_trains_alone_and_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "before.py"
    script.write_text(readme_diff()[0])
    (single,) = run(script, folder=tmp_path, size=1)
    (alone,) = run(TRAIN, folder=tmp_path, size=1)
    together, silent = run(TRAIN, folder=tmp_path)
    assert silent.output == ""
    for outcome in (single, alone, together):
        assert len(losses(outcome)) == 3
        assert losses(outcome)[-1] < losses(outcome)[0] / 10
