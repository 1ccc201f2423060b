# SPDX-License-Identifier: Apache-2.0
"""The notebook: a function of a cell trains on two processes."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from scripts import DEADLINE_S, ROOT

NOTEBOOK = ROOT / "examples" / "notebook" / "train.ipynb"
INSTALL = "is not installed: pip install 'torch_ring[examples]'"


def text_of(outputs: list[Any], kind: str | None = None) -> str:
    """Return the printed text of a cell, or its output of a kind."""
    if kind is None:
        return "".join(each.get("text", "") for each in outputs)
    (found,) = [each["data"][kind] for each in outputs if kind in each.get("data", {})]
    return str(found)


@pytest.mark.slow
def test_a_function_of_a_cell_trains_on_two_processes(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason=f"nbclient {INSTALL}")
    for module in ("ipykernel", "matplotlib", "bokeh", "cloudpickle"):
        pytest.importorskip(module, reason=f"{module} {INSTALL}")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=DEADLINE_S, resources=folder).execute()
    outputs = {cell.id: cell.get("outputs", []) for cell in notebook.cells}
    printed = text_of(outputs["run"])
    losses = [float(each) for each in re.findall(r"\[0\]<stdout>:epoch \d+: loss (.*)", printed)]
    assert len(losses) == 6
    assert losses[0] > 0.2
    assert losses[-1] < 0.05
    assert "[1]<stdout>" not in printed
    assert text_of(outputs["weights"], "text/plain") == "True"
    assert len(text_of(outputs["losses"], "image/png")) > 1000
    page = html.unescape(text_of(outputs["show"], "text/html"))
    assert "<dt>ranks</dt><dd>2</dd>" in page


def test_the_notebook_has_no_outputs_of_its_own() -> None:
    text = NOTEBOOK.read_text()
    assert '"outputs": []' in text
    assert '"data"' not in text


def test_every_example_has_a_page_of_the_site() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for folder in Path(ROOT / "examples").iterdir():
        if (folder / "README.md").exists():
            assert f"</examples/{folder.name}/README>" in index
