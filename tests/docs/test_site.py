"""The documentation site: it builds without a warning, its links hold, and its search finds."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from scripts import ROOT

import torch_ring as hvd
from torch_ring.config import SETTINGS

pytestmark = pytest.mark.slow

BUILD_DEADLINE_S = 300
BROWSER_DEADLINE_S = 30
LOADING = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src")}


class Page(HTMLParser):
    """The anchors of a page, its links, and what it makes a browser load."""

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
                continue  # nobody answers here; test_external_links looks at them
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            anchors = pages[target].anchors if target in pages else {""}
            if not target.is_file() or (url.fragment and unquote(url.fragment) not in anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_external_links(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme in ("http", "https"):
                assert "." in (url.hostname or ""), f"{path.relative_to(site)}: {link}"
                assert " " not in link, f"{path.relative_to(site)}: {link}"


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


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site; return its address."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.browser
def test_search_finds_a_function(address: str, tmp_path: Path) -> None:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium, or no chromedriver: apt-get install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    flags = (
        "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
        "disable-component-update disable-sync disable-dev-shm-usage window-size=1280,1024"
    )
    for flag in [*flags.split(), f"user-data-dir={tmp_path}"]:
        options.add_argument(f"--{flag}")
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        chromium.set_page_load_timeout(BROWSER_DEADLINE_S)
        waiting = WebDriverWait(chromium, BROWSER_DEADLINE_S)

        def find(selector: str) -> Any:
            return waiting.until(lambda page: page.find_elements(By.CSS_SELECTOR, selector))[0]

        chromium.get(address)
        waiting.until(lambda page: page.current_url == f"{address}docs/index.html")
        field = find(".sidebar-search")
        field.send_keys("allreduce")
        field.submit()
        page = "docs/api/collectives.html"
        result = find(f'#search-results a[href*="{page}"][href$="#torch_ring.allreduce"]')
        loaded = "return performance.getEntriesByType('resource').map(entry => entry.name)"
        assert all(url.startswith(address) for url in chromium.execute_script(loaded))
        # Not a click: results still arrive, and push this one from under the pointer.
        chromium.get(result.get_attribute("href"))
        assert chromium.current_url.startswith(f"{address}{page}")
        entry = find('dt[id="torch_ring.allreduce"]')
        assert entry.is_displayed()
        assert "prescale_factor=1.0" in entry.text
    finally:
        chromium.quit()
