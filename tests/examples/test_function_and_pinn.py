# SPDX-License-Identifier: Apache-2.0
"""Function approximation and PINN: ranks share a domain, or are an ensemble."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from scripts import ROOT, Run, run
from slow import slow

EXAMPLES = ROOT / "examples"
FUNCTION = EXAMPLES / "function_approximation" / "train.py"
PINN = EXAMPLES / "pinn" / "train.py"

NUMBER = r"(\d\.?\d*(?:e[+-]\d+)?)"


def numbers(name: str, outcome: Run) -> list[float]:
    """Return the number after `name` in every line of the output that contains it."""
    assert outcome.code is None, outcome
    found = re.findall(rf"{name}:? {NUMBER}", outcome.output)
    assert found, outcome.output
    return [float(number) for number in found]


def weights(checkpoint: Path) -> torch.Tensor:
    model = torch.load(checkpoint, weights_only=True)["model"]
    return torch.cat([tensor.flatten() for tensor in model.values()])


@pytest.mark.parametrize("script", [slow(FUNCTION), PINN], ids=["function", "pinn"])
def test_smoke(script: Path, tmp_path: Path) -> None:
    outputs = ("--plot", "picture.png", "--tensorboard", "events")
    first, second = run(script, "--smoke", *outputs, folder=tmp_path)
    assert first.code is None
    assert second == Run(None, "")
    assert (tmp_path / f"{script.parent.name}.pt").exists()
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "events").rglob("*tfevents*"))


@pytest.mark.parametrize("script", [FUNCTION, PINN], ids=lambda path: path.parent.name)
def test_many_ranks_do_what_one_does_on_all_points(script: Path, tmp_path: Path) -> None:
    common = ("--checkpoint", "{}.pt", "--every", "10")
    if script == FUNCTION:
        common = (*common, "--dtype", "float64", "--steps", "40")
        one, three = ("--points", "24", "--lr", "0.003"), ("--points", "8", "--lr", "0.001")
    else:
        common = (*common, "--iterations", "20")
        one, three = ("--points", "48"), ("--points", "16")

    def losses(name: str, size: int, arguments: tuple[str, ...]) -> list[float]:
        given = [argument.format(name) for argument in (*common, *arguments)]
        outcome = run(script, *given, folder=tmp_path, size=size)[0]
        return numbers("loss" if script == FUNCTION else "residual", outcome)

    alone, together = losses("one", 1, one), losses("three", 3, three)
    assert together == pytest.approx(alone, rel=1e-3)  # the number of printed digits
    assert alone[-1] < alone[0]
    # L-BFGS divides by differences of gradients, in which rounding errors grow.
    tolerance = 1e-10 if script == FUNCTION else 1e-6
    torch.testing.assert_close(
        weights(tmp_path / "three.pt"), weights(tmp_path / "one.pt"), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(("script", "length"), [(FUNCTION, "--steps"), (PINN, "--iterations")])
def test_resumes(script: Path, length: str, tmp_path: Path) -> None:
    def train(count: int, *more: str, size: int = 2) -> list[str]:
        options = ("--every", "5", length, str(count), *more)
        outcome = run(script, *options, folder=tmp_path, size=size)[0]
        assert outcome.code is None, outcome
        return re.findall(r"^(?:step|iteration) .*", outcome.output, re.MULTILINE)

    straight = train(10)
    assert len(straight) == 2
    assert train(5) + train(10, "--resume") == straight
    (line,) = train(15, "--resume", size=3)  # and on a different number of ranks
    assert re.match(r"\w+ 15:", line)


def test_an_ensemble_that_lacks_a_member_ends_on_all_ranks(tmp_path: Path) -> None:
    run(PINN, "--smoke", "--ensemble", folder=tmp_path)
    first, *others = run(PINN, "--smoke", "--ensemble", "--resume", folder=tmp_path, size=3)
    assert str(first.code).startswith("cannot resume: ")
    assert [other.code for other in others] == [1, 1]
    first, second = run(FUNCTION, "--smoke", "--members", "3", folder=tmp_path)
    assert (first, second.code) == (Run("2 ranks cannot train 3 members", ""), 1)


@pytest.mark.slow
def test_members_of_an_ensemble_train_apart(tmp_path: Path) -> None:
    common = ("--dtype", "float64", "--steps", "10", "--every", "5")

    def train(name: str, size: int, *arguments: str) -> str:
        checkpoint = ("--checkpoint", f"{name}.pt")
        first, *others = run(FUNCTION, *common, *checkpoint, *arguments, folder=tmp_path, size=size)
        assert first.code is None, first
        assert all(other == Run(None, "") for other in others)
        return first.output

    output = train("teams", 4, "--members", "2", "--plot", "picture.png")
    assert re.search(rf"error: {NUMBER}, {NUMBER}\nmean of the members: {NUMBER};", output)
    assert (tmp_path / "picture.png").exists()
    train("pair", 2, "--seed", "1")  # the second of two members, which start at seed 0
    first, second, pair = (weights(tmp_path / f"{n}.pt") for n in ("teams-0", "teams-1", "pair"))
    torch.testing.assert_close(second, pair)
    assert not torch.allclose(first, second)


def test_each_rank_solves_its_own_equation(tmp_path: Path) -> None:
    common = ("--iterations", "10", "--every", "10")
    ensemble = ("--ensemble", "--plot", "picture.png")
    first, second = run(PINN, *common, *ensemble, folder=tmp_path)
    assert re.findall(r"^k = (\d): relative L2 error", first.output, re.MULTILINE) == ["1", "2"]
    assert second == Run(None, "")
    assert (tmp_path / "picture.png").exists()
    run(PINN, *common, "--points", "101", folder=tmp_path, size=1)
    # k = 2 alone, and as a member
    torch.testing.assert_close(weights(tmp_path / "pinn-2.pt"), weights(tmp_path / "pinn.pt"))


def test_network_solves_the_equation(tmp_path: Path) -> None:
    # A part of the README's run on two ranks, whose final error is far below 1e-2.
    outcome = run(PINN, "--points", "102", "--iterations", "240", folder=tmp_path, size=1)[0]
    (error,) = numbers("relative L2 error", outcome)
    assert error < 3e-2, outcome.output
