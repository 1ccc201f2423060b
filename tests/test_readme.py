"""README.md: its length and its settings; docs/settings.md: all settings."""

from __future__ import annotations

import re
import sys

from scripts import ROOT

from torch_ring.config import SETTINGS

README = (ROOT / "README.md").read_text()


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 110


def test_settings_of_the_readme() -> None:
    defaults = {setting.variable: setting.default for setting in SETTINGS}
    named = set(re.findall(r"`(TORCH_RING_\w+)`", README))
    assert named <= defaults.keys()
    with_defaults = re.findall(r"`(TORCH_RING_\w+)` \(default (\w+)", README)
    assert len(with_defaults) == len(named) - 1  # the secret has none
    assert all(defaults[variable] == default for variable, default in with_defaults)


def test_the_page_of_settings_is_written_anew() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from write_settings import PAGE, page
    finally:
        sys.path.remove(str(ROOT / "docs"))
    assert PAGE.read_text() == page(), "type: python docs/write_settings.py"
