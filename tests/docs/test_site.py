# SPDX-License-Identifier: Apache-2.0
"""The documentation site, as `make docs` has built it: its links hold."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from browser import wait_for
from scripts import ROOT

import torch_ring as hvd
from torch_ring.config import SETTINGS

pytestmark = pytest.mark.slow

LOADING = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src")}


class Page(HTMLParser):
    """The anchors of a page, its links, and the resources that a browser loads for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            if (tag, name) in LOADING and value:
                self.loaded.append(value)
            if name in ("href", "src") and value:
                self.links.append(value)


@pytest.fixture(scope="module")
def site() -> Path:
    folder = ROOT / "build" / "docs"
    if not (folder / "index.html").exists():
        pytest.skip("the site is not built: make docs")
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_internal_links_lead_to_anchors(site: Path, pages: dict[Path, Page]) -> None:
    assert len(pages) > 30
    broken = []
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme in ("http", "https", "mailto", "data"):
                continue  # no server answers here
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            anchors = pages[target].anchors if target in pages else {""}
            if not target.is_file() or (url.fragment and unquote(url.fragment) not in anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_pages_work_without_the_internet(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for link in page.loaded:
            assert not urlsplit(link).netloc, f"{path.relative_to(site)} loads {link}"
    for sheet in site.rglob("*.css"):
        text = sheet.read_text()
        assert "@import" not in text, sheet
        for quote in ("", "'", '"'):
            assert f"url({quote}http" not in text, sheet
            assert f"url({quote}//" not in text, sheet


def test_every_public_name_has_an_entry(pages: dict[Path, Page]) -> None:
    anchors = set().union(*(page.anchors for page in pages.values()))
    entries = {
        f"{'module-' if isinstance(getattr(hvd, name), ModuleType) else ''}torch_ring.{name}"
        for name in hvd.__all__
        if not name.startswith("_")
    }
    for module in (hvd.checkpoint, hvd.data, hvd.lr_schedules, hvd.metrics):
        entries |= {f"{module.__name__}.{name}" for name in module.__all__}
    assert entries - anchors == set()


def test_settings_come_from_the_code(site: Path) -> None:
    text = (site / "docs" / "settings.html").read_text()
    for setting in SETTINGS:
        assert setting.variable in text
        assert f"<td><p>{setting.default}</p></td>" in text or not setting.default


STEPS = re.findall(r"^\d\. (.*)", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_the_start_page_has_the_steps_of_the_readme(site: Path) -> None:
    assert len(STEPS) == 8
    page = re.sub(r"<[^>]*>", "", (site / "docs" / "index.html").read_text())
    for step in STEPS:
        for words in re.split(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", step):
            assert words in page


def test_docstrings_link_to_guides(site: Path) -> None:
    pages = list((site / "docs" / "api").glob("*.html"))
    texts = [re.sub(r"<a .*?</a>", "", page.read_text(), flags=re.DOTALL) for page in pages]
    assert len(texts) > 5
    assert [found for text in texts for found in re.findall(r"docs/[\w-]+\.md", text)] == []


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


# The code of a page that is cut: a line wider than its block, which does not scroll; and the words
# that break in a table though they are narrower than their column.
_CUT = """
const blocks = [...document.querySelectorAll(".highlight pre")].filter(
  each => each.scrollWidth > each.clientWidth && getComputedStyle(each).overflowX !== "auto");
const words = [...document.querySelectorAll("td code.literal .pre")].filter(each => {
  const text = document.createRange();
  text.selectNodeContents(each);
  const line = 1.9 * parseFloat(getComputedStyle(each).fontSize);
  const column = each.closest("td").clientWidth;
  const letter = 0.61 * parseFloat(getComputedStyle(each).fontSize);
  const is_narrow = each.textContent.length * letter < column - 40;
  return is_narrow && text.getBoundingClientRect().height > line;
});
const page = document.documentElement;
return [...blocks, ...words].map(each => each.textContent.slice(0, 60)).concat(
  page.scrollWidth > page.clientWidth ? [`the page is ${page.scrollWidth} wide`] : []);
"""


@pytest.mark.browser
@pytest.mark.parametrize("width", [480, 1400])
def test_nothing_is_cut(site: Path, chromium: Any, width: int) -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 1000}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        for page in ("docs/index", "docs/launching", "csrc/README", "benchmarks/README"):
            chromium.get((site / f"{page}.html").as_uri())
            assert chromium.execute_script(_CUT) == [], page
            if width == 1400 and page == "docs/index":  # the diff has room
                assert chromium.execute_script(
                    "return [...document.querySelectorAll('.highlight pre')].every("
                    "each => each.scrollWidth <= each.clientWidth)"
                )
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
