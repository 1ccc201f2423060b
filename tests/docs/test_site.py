"""The documentation site: it builds without a warning, and its links hold."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from scripts import ROOT

import torch_ring as hvd
from torch_ring.config import SETTINGS

pytestmark = pytest.mark.slow

BUILD_DEADLINE_S = 300
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
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as ``make docs`` does; return its folder."""
    for module in ("sphinx", "myst_parser", "furo"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: `make docs` installs it")
    folder = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "--quiet", "-c", "docs"]
    build = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, ".", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BUILD_DEADLINE_S,
    )
    assert build.returncode == 0, build.stderr
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
