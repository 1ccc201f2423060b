# SPDX-License-Identifier: Apache-2.0
"""Chromium, for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

DEADLINE_S = 600  # a hang, not a slow machine


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a headless Chromium; its window has 1400 x 1600 pixels."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium, or no chromedriver: apt-get install chromium-driver")
    folder = tmp_path_factory.mktemp("browser")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    flags = (
        "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
        "disable-component-update disable-sync disable-dev-shm-usage window-size=1400,1600"
    )
    for flag in [*flags.split(), f"user-data-dir={folder}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chromium.command_executor.client_config.timeout = DEADLINE_S  # of an answer of the driver
    chromium.set_page_load_timeout(DEADLINE_S)
    chromium.set_script_timeout(DEADLINE_S)
    yield chromium
    chromium.quit()


def wait_for(chromium: Any, condition: Callable[[Any], Any]) -> Any:
    """Return the first true value of the condition."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(chromium, DEADLINE_S).until(condition)
