# SPDX-License-Identifier: Apache-2.0
"""The documentation site, as `make docs` has built it; Sphinx has checked its links."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from browser import wait_for
from scripts import ROOT

import torch_ring as hvd

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site() -> Path:
    folder = ROOT / "build" / "docs"
    if not (folder / "index.html").exists():
        pytest.skip("the site is not built: make docs")
    return folder


def test_pages_work_without_the_internet(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=.?(?:https?:)?//")
    imports = re.compile(r"@import|url\(['\"]?(?:http|//)")
    pages, sheets = [*site.rglob("*.html")], [*site.rglob("*.css")]
    assert len(pages) > 30
    assert [page for page in pages if loads.search(page.read_text())] == []
    assert [sheet for sheet in sheets if imports.search(sheet.read_text())] == []


def test_every_public_name_has_an_entry(site: Path) -> None:
    text = "".join(page.read_text() for page in (site / "docs").rglob("*.html"))
    entries = {
        f"{'module-' if isinstance(getattr(hvd, name), ModuleType) else ''}torch_ring.{name}"
        for name in hvd.__all__
        if not name.startswith("_")
    }
    for module in (hvd.checkpoint, hvd.data, hvd.lr_schedules, hvd.metrics):
        entries |= {f"{module.__name__}.{name}" for name in module.__all__}
    assert entries - {*re.findall(r'\bid="([\w.-]+)"', text)} == set()


@pytest.mark.browser
def test_a_search_finds_the_readme_and_shows_an_excerpt(site: Path, chromium: Any) -> None:
    """The site is opened from a disk, where a page may fetch no other one."""
    chromium.get((site / "search.html").as_uri() + "?q=omissions")

    def excerpt(page: Any) -> str:
        found = page.find_elements("css selector", "#search-results li")
        texts = [
            each.text for each in found if "docs/index.html" in each.get_attribute("outerHTML")
        ]
        return texts[0] if texts and "\n" in texts[0] else ""

    assert "omissions" in wait_for(chromium, excerpt).lower()
