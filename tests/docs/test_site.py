"""The documentation site, as `make docs` has built it: its links hold."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
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
