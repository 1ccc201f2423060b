# SPDX-License-Identifier: Apache-2.0
"""Settings of Sphinx for the documentation site. `make docs` builds it.

The sources are the whole repository, so that the READMEs beside the code are pages too, and their
relative links work on a git host and in the site alike.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pygments.lexers.special import TextLexer

import torch_ring

if TYPE_CHECKING:
    from docutils.nodes import Node
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

project = "torch_ring"
release = version = torch_ring.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
INCLUDED = "[README.md](../README.md)"  # on the start page, which shows the text of that file
include_patterns = [
    "docs/**.md",
    "examples/*/README.md",
    "benchmarks/README.md",
    "csrc/README.md",
    ".github/SECURITY.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "tests/README.md",
]
exclude_patterns = [".[!g]*", ".git", "build", "data", "dist"]  # not .github

nitpicky = True
nitpick_ignore_regex = [
    # of inventories on the internet
    ("py:.*", r"(torch|collections|os|pathlib|pickle)\..*|Tensor|Optimizer|LRScheduler"),
    ("py:class", r".*(CompressorT|ElementT|ObjectT|ResultT|TrainT)|Factor"),  # torch_ring's own
    ("py:class", r"torch_ring\.optimizer\.\w+Optimizer"),
]

myst_heading_anchors = 4

default_role = "code"  # a docstring's `name`
add_module_names = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_type_aliases = {  # at run time these are other classes
    name: f"torch_ring.optimizer.{name}"
    for name in ("DiLoCoOptimizer", "LocalOptimizer", "WrappedOptimizer")
}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_use_rtype = False
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 88

highlight_language = "none"  # where a page names no language: commands, output

html_theme = "furo"
pygments_style = "friendly"  # the theme's own shows no diff
html_title = f"torch_ring {release}"
html_copy_source = html_show_copyright = html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
html_additional_pages = {"index": "redirect.html"}


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001
    """Put README.md into the start page, and turn links to a folder into links to its page."""
    if docname == root_doc:
        source[0] = source[0].replace(INCLUDED, (ROOT / "README.md").read_text())
        folder = ROOT  # its links are those of README.md
    else:
        folder = (ROOT / docname).parent

    def link(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        if path == ROOT / "README.md":
            path = ROOT / "docs"
        if path.is_dir():
            path /= "index.md" if path.name == "docs" else "README.md"
        elif folder != ROOT or not path.exists():
            return match[0]
        return f"](/{path.relative_to(ROOT)}{match[2] or ''})"

    source[0] = re.sub(r"\]\(([^)#:\s]+)(#[^)]*)?\)", link, source[0])


def read_docstring(
    _app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]
) -> None:
    """Turn the name of a guide into a link to it."""
    lines[:] = [re.sub(r"\b(docs/[\w-]+)\.md(#[\w-]+)?", r":doc:`\1.md </\1>`", x) for x in lines]


EXCERPTS = "excerpts.js"
# A page that was opened from a disk may fetch no other one, and so a search would show no excerpts:
# it has the texts of all pages.
FETCH = """if (location.protocol === "file:") {
  const texts = %s;
  window.fetch = async (url) => {
    const [page] = decodeURI(new URL(url, location)).split(/[?#]/);
    const name = Object.keys(texts).find((each) => page.endsWith(`/${each}.html`)) ?? "";
    const main = document.createElement("div");
    main.setAttribute("role", "main");
    main.textContent = texts[name] ?? "";
    return { text: async () => main.outerHTML };
  };
}
"""
texts: dict[str, str] = {}


def keep_text(
    app: Sphinx, pagename: str, _template: str, _context: dict[str, Any], doctree: Node | None
) -> None:
    """Keep the text of a page for the search."""
    if doctree is not None:
        texts[pagename] = " ".join(doctree.astext().split())
    elif pagename == "search":
        app.add_js_file(EXCERPTS)


def write_texts(app: Sphinx, exception: Exception | None) -> None:
    """Write the texts of all pages, the longest names first: one may be the end of another."""
    if exception is None:
        names = sorted(texts, key=len, reverse=True)
        ordered = json.dumps({name: texts[name] for name in names})
        (Path(app.outdir) / "_static" / EXCERPTS).write_text(FETCH % ordered)


def setup(app: Sphinx) -> None:
    """Connect the hooks; Sphinx calls this function."""
    app.connect("source-read", read_page)
    app.connect("html-page-context", keep_text)
    app.connect("build-finished", write_texts)
    app.connect("autodoc-process-docstring", read_docstring)
    app.add_lexer("mermaid", TextLexer)  # a git host draws these, the site shows their text
