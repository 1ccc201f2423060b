"""Settings of Sphinx for the documentation site. `make docs` builds it.

The sources are the whole repository, so that the READMEs beside the code are pages too, and their
relative links work on a git host and in the site alike.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

import torch_ring

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

project = "torch_ring"
release = version = torch_ring.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "examples/*/README.md",
    "benchmarks/README.md",
    "csrc/README.md",
    "CHANGELOG.md",
]
exclude_patterns = [".*", "build", "data", "dist"]

nitpicky = True
nitpick_ignore_regex = [
    # of inventories on the internet
    ("py:.*", r"(torch|collections|os|pathlib|pickle)\..*|Tensor|Optimizer"),
    ("py:class", r".*(OptimizerT|CompressorT|ElementT|ResultT)|Factor"),  # torch_ring's own
]

myst_heading_anchors = 4

default_role = "code"  # a docstring's `name`
add_module_names = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
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
    """Turn links to a folder into links to its page."""
    folder = (ROOT / docname).parent

    def link(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        if path == ROOT / "README.md":
            return "](/docs/index.md)"
        if path.is_dir():
            return f"]({match[1]}/{'index.md' if path.name == 'docs' else 'README.md'})"
        return match[0]

    source[0] = re.sub(r"\]\(([^)#:\s]+)(#[^)]*)?\)", link, source[0])


def setup(app: Sphinx) -> None:
    """Connect the hook; Sphinx calls this function."""
    app.connect("source-read", read_page)
    app.add_lexer("mermaid", TextLexer)  # a git host draws these, the site shows their text
