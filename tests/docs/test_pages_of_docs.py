# SPDX-License-Identifier: Apache-2.0
"""docs/: links, quoted messages, settings, listed files; README.md and the public names."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

from scripts import ROOT

import torch_ring as hvd
from torch_ring.config import SETTINGS

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
    assert {ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "csrc" / "README.md"} <= {*FILES}
    broken = []
    for path in FILES:
        links = re.findall(r"\]\(([^)#:\s]*)(#([^)]*))?\)", without_code(path.read_text()))
        for target, _, anchor in links:
            page = path.parent / target if target else path
            if not page.exists() or (anchor and anchor not in anchors_of(page)):
                broken.append(f"{path.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []


# Between them stand the words of a message: values, marks, words of the system or a program, and
# words that the source composes.
VALUE = (
    r"'[^']*'|\[[^\]]*\]|\S*[\d_/=`]\S*|[A-Z][a-z]+[A-Z]\w+|[.,:;()]|MiB|SGD|"
    "CUDA out of memory|Connection reset by peer|Too many open files|no more data|"
    "averaging the gradients of|at which"
)


def quoted_messages() -> Iterator[str]:
    """Return the lines of the blocks that have no language."""
    inside = None
    for line in (ROOT / "docs" / "errors.md").read_text().splitlines():
        if line.startswith("```"):
            inside = line[3:] if inside is None else None
        elif inside == "":
            yield re.sub(r"^(\w+Error: |\[torch_ring\] )", "", line)


def texts_of_the_source() -> str:
    """Return the string literals of the product, a line each; a value breaks a literal."""
    found = []
    for path in (ROOT / "torch_ring").rglob("*.py"):
        tree = ast.parse(path.read_text())
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            is_docstring = id(node) in statements
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_docstring:
                found.append(node.value)
    for path in (ROOT / "csrc").rglob("*.*"):
        if path.suffix not in (".h", ".cc", ".inc"):
            continue
        code = re.sub(r"^\s*//.*", "", path.read_text(), flags=re.MULTILINE)
        for literals in re.findall(r'(?:"(?:[^"\\\n]|\\.)*"[\s,]*)+', code):
            found.append("".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', literals)))
    return "\n".join(re.sub(r"\s+", " ", text) for text in found)


def fragments(message: str) -> Iterator[str]:
    """Return the parts of four words or more between the values of a message."""
    for part in re.split(VALUE, message):
        words = part.strip(" ?")
        if len(words.split()) >= 4:
            yield words


def is_said(words: str, source: str) -> bool:
    """Return whether the source has these words, but for the first or the last beside a value."""
    return any(
        each in source for each in (words, words.partition(" ")[2], words.rpartition(" ")[0])
    )


def test_quoted_messages_have_the_words_of_the_source() -> None:
    source = texts_of_the_source()
    quoted = [each for message in quoted_messages() for each in fragments(message)]
    assert len(quoted) > 100
    assert [words for words in quoted if not is_said(words, source)] == []


INTERNALS = ("gradients", "torch-distributed", "world")
PAGES = ("csrc/README.md", *(f"docs/internals/{page}.md" for page in INTERNALS))


def files_of_way(page: str) -> list[str]:
    """Return the files in the table of a page, in order."""
    _, _, rest = (ROOT / page).read_text().partition("# The files of this way\n")
    return re.findall(r"^\| `([\w/.]+)` \|", rest.partition("\n#")[0], re.MULTILINE)


def test_the_files_of_a_way_are_there() -> None:
    for page in PAGES:
        files = files_of_way(page)
        assert len(files) == len(set(files)) > 4
        for file in files:
            assert any((ROOT / f"{file}{suffix}").exists() for suffix in ("", ".h", ".cc")), file


README = (ROOT / "README.md").read_text()


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


MODULES = {  # as docs/migrating-from-horovod.md and the guides import them
    "checkpoint",
    "compression",
    "data",
    "elastic",
    "functions",
    "lr_schedules",
    "metrics",
    "mpi_ops",
    "optimizer",
    "preemption",
    "sync_batch_norm",
}


def test_dir_has_the_public_names_and_modules():
    names = set(dir(hvd))
    assert names == {*hvd.__all__, *MODULES, "__version__"} - {"_basics"}
    found = {name for name in names if isinstance(getattr(hvd, name), types.ModuleType)}
    assert found == MODULES
    assert all(hasattr(hvd, name) for name in hvd.__all__)
