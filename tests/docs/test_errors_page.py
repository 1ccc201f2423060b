"""docs/errors.md: its quoted messages have the words of the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from scripts import ROOT

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
    for path in (ROOT / "csrc").rglob("*.[ch]*"):
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
