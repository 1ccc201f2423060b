"""python -m torch_ring.tracing show: its output, its requirements, and the files it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from recordings import dump_of, timeline_events, write_timeline

from torch_ring.tracing.command import main

DEADLINE_S = 60


def show(
    *arguments: str, without: tuple[str, ...] = ("torch",)
) -> subprocess.CompletedProcess[str]:
    """Run the command in a Python without some modules."""
    program = (
        "import sys, runpy\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {without!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "runpy.run_module('torch_ring.tracing', run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program, "show", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_it_draws_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("bokeh", reason="bokeh is not installed: pip install bokeh")
    write_timeline(tmp_path / "timeline.json", timeline_events(steps=2))
    done = show(str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "12 operations of 2 ranks" in done.stdout
    page = (tmp_path / "page.html").read_text()
    assert "gradients.0.1.0.0" in page or "gradients.0.0.0.0" in page
    assert '<script src="http' not in page
    again = show(str(tmp_path))  # its own page is no recording
    assert again.returncode == 0, again.stderr
    assert "left out" not in again.stdout


@pytest.mark.parametrize("number", [2**40 + 5, 2**44 + 1], ids=["not agreed on", "launched"])
def test_it_draws_operations_without_an_agreement(tmp_path: Path, number: int) -> None:
    pytest.importorskip("bokeh", reason="bokeh is not installed: pip install bokeh")
    for rank in range(2):
        dump = dump_of(rank)
        dump["entries"][1]["collective_seq_id"] = number
        (tmp_path / f"dump_{rank}").write_text(json.dumps(dump))
    assert main(["show", str(tmp_path)]) == 0
    assert (tmp_path / "page.html").exists()


def test_without_bokeh_it_says_what_to_install(tmp_path: Path) -> None:
    write_timeline(tmp_path / "timeline.json", timeline_events(steps=1))
    done = show(str(tmp_path), without=("torch", "bokeh"))
    assert done.returncode == 1
    assert "pip install 'torch_ring[trace]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "page.html").exists()


def test_nothing_there_is_one_sentence(tmp_path: Path) -> None:
    done = show(str(tmp_path))
    assert done.returncode == 1
    assert "has no timeline" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("value", ["-1", "inf", "soon"])
def test_a_time_that_is_none(tmp_path: Path, value: str) -> None:
    done = show(str(tmp_path), f"--late-ms={value}")
    assert done.returncode == 2
    assert "--late-ms" in done.stderr
