"""Relative links in Markdown lead to files and headings, so that they work on a git host, too."""

from __future__ import annotations

import re
from pathlib import Path

from scripts import ROOT

FILES = [
    path
    for pattern in ("*.md", "*/*.md", "docs/api/*.md", "examples/*/*.md")
    for path in sorted(ROOT.glob(pattern))
    if not path.parent.name.startswith(".")
]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors_of(path: Path) -> set[str]:
    """Return the anchors that a git host gives to headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_relative_links():
    broken = []
    for path in FILES:
        links = re.findall(r"\]\(([^)#:\s]*)(#([^)]*))?\)", without_code(path.read_text()))
        for target, _, anchor in links:
            page = path.parent / target if target else path
            if not page.exists() or (anchor and anchor not in anchors_of(page)):
                broken.append(f"{path.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []


def test_all_guides_are_looked_at():
    assert {ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "csrc" / "README.md"} <= {*FILES}
