# SPDX-License-Identifier: Apache-2.0
"""generated(): faults by rule, the usual operators of mutation testing, in a random sample.

A statement is left out; a condition is negated; `and` and `or` change places; a comparison takes
its bound in or leaves it out. (Jia and Harman, "An Analysis and Survey of the Development of
Mutation Testing", IEEE TSE 2011.) Only places whose text is unique in their file are taken, so that
all faults of C++ files can be compiled into one extension; universalmutator needs a build a fault.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from faults import Fault

_SWAPPED = {"&&": "||", "||": "&&", "<": "<=", "<=": "<", ">": ">=", ">=": ">"}
# Of C++ only what one line holds: an assignment or a call that declares nothing.
_STATEMENT = re.compile(r"^ +((?:\+\+|--)?[a-z][\w.>\[\]()*&:-]*(?: (?:=|\+=|-=|\|=|&=) .+)?;)$")
_CONDITION = re.compile(r"^ +(?:\} else )?if \((?!const |auto )(.+)\) (?:\{|[a-z].*;)$")
_KEYWORDS = ("return", "break", "continue", "throw", "using", "default", "delete", "else")


def generated(root: Path, files: Sequence[str], count: int, seed: int) -> list[Fault]:
    """Return `count` faults of these files, or all if there are fewer: one a place."""
    found: list[Fault] = []
    for file in files:
        text = (root / file).read_text()
        make = _of_python if file.endswith(".py") else _of_cpp
        for old, new in make(text):
            if text.count(old) == 1:
                name = f"generated_{len(found)}"
                says = f"{_one_line(old)}  ->  {_one_line(new)}"
                found.append(Fault(name, says, file, old, new))
    order = random.Random(seed).sample(found, len(found))
    chosen: list[Fault] = []
    for fault in order:
        if len(chosen) < count and not any(_overlap(fault, other) for other in chosen):
            chosen.append(fault)
    return sorted(chosen, key=found.index)


def _overlap(fault: Fault, other: Fault) -> bool:
    """Return whether one fault's text has the other's; then only one can be planted."""
    return fault.file == other.file and (fault.old in other.old or other.old in fault.old)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:60]


def _of_cpp(text: str) -> Iterator[tuple[str, str]]:
    before = ""
    for line in text.splitlines():
        statement, condition = _STATEMENT.match(line), _CONDITION.match(line)
        is_first, before = not before or before.endswith((";", "{", "}")), line
        if statement and is_first and not statement[1].startswith(_KEYWORDS):
            yield statement[1], ""
        elif condition and ";" not in condition[1] and _is_balanced(condition[1]):
            yield condition[1], f"!({condition[1]})"
            for found in re.finditer(r" (&&|\|\||<=?|>=?) ", condition[1]):
                swapped = f" {_SWAPPED[found[1]]} "
                new = condition[1][: found.start()] + swapped + condition[1][found.end() :]
                yield condition[1], new


def _is_balanced(text: str) -> bool:
    """Return whether no parenthesis closes that the text has not opened."""
    depth = 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            return False
    return depth == 0


def _of_python(text: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(text)):
        source = ast.get_source_segment(text, node) if isinstance(node, ast.AST) else None
        if not source:
            continue
        if isinstance(node, (ast.Expr, ast.AugAssign)) and not _is_docstring(node):
            yield source, "pass"
        elif isinstance(node, (ast.If, ast.While)):
            condition = ast.get_source_segment(text, node.test)
            keyword = "if" if isinstance(node, ast.If) else "while"
            yield f"{keyword} {condition}:", f"{keyword} not ({condition}):"
        elif isinstance(node, ast.BoolOp):
            word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            if source.count(f" {word} ") == 1:
                yield source, source.replace(f" {word} ", f" {other} ")
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            for operator, other in _SWAPPED.items():
                if source.count(f" {operator} ") == 1:
                    yield source, source.replace(f" {operator} ", f" {other} ")


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
