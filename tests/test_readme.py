"""README.md has a row for every setting."""

from __future__ import annotations

import pytest
from scripts import ROOT

from torch_ring.config import SETTINGS, Setting


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.variable)
def test_readme_has_every_setting(setting: Setting) -> None:
    rows = [
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith(f"| `{setting.variable}`")
    ]
    assert len(rows) == 1
    assert setting.meaning in rows[0]
    assert all(f"`{alias}`" in rows[0] for alias, _ in setting.aliases)
    assert rows[0].endswith(f"| {setting.default} |")
