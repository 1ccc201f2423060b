# SPDX-License-Identifier: Apache-2.0
"""The stub of the native module, against the signatures that pybind11 writes into it."""

from __future__ import annotations

import ast
import re
from types import ModuleType
from typing import Any

from scripts import ROOT

from torch_ring import _C

STUB = ast.parse((ROOT / "torch_ring" / "_C.pyi").read_text())
HIDDEN = {"__init__", "name", "value"}  # of classes without a constructor, and of enums


def members(node: ast.Module | ast.ClassDef) -> dict[str, ast.AST]:
    """Return the classes, functions and attributes in a body of the stub, by name."""
    found: dict[str, ast.AST] = {}
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.ClassDef):
            found[each.name] = each
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found[each.target.id] = each
    return found


def native_members(owner: Any) -> dict[str, Any]:
    names = vars(owner) if isinstance(owner, ModuleType | type) else {}
    return {
        name: value
        for name, value in names.items()
        if not name.startswith("_pybind11") and (not name.startswith("__") or name == "__init__")
    }


def argument_names(function: Any) -> list[list[str]]:
    """Return the arguments of each overload, by pybind11's docstring; "arg0" has no name."""
    lines = (function.__doc__ or "").splitlines()
    name = getattr(function, "__func__", function).__name__
    found = [re.match(rf"(?:\d+\. )?{name}\((.*)\) -> ", line) for line in lines]
    signatures = [match[1] for match in found if match and match[1] != "*args, **kwargs"]
    return [
        [
            part.split(":")[0].strip()
            for part in re.split(r", (?=\w+:|\*$|\*,|/)", text)
            if ":" in part
        ]
        for text in signatures
    ]


def stub_names(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def compare(where: str, stub: ast.Module | ast.ClassDef, native: Any) -> list[str]:
    """Return the differences between a part of the stub and the module."""
    ours, theirs = members(stub), native_members(native)
    problems = [f"{where}.{name}: not in the stub" for name in theirs.keys() - ours.keys() - HIDDEN]
    for name, node in ours.items():
        if name not in theirs:
            if not (isinstance(stub, ast.Module) and name.startswith("_")):  # a type of the stub's
                problems.append(f"{where}.{name}: not in the module")
        elif isinstance(node, ast.ClassDef):
            problems += compare(f"{where}.{name}", node, theirs[name])
        elif isinstance(node, ast.FunctionDef) and callable(theirs[name]):
            told = stub_names(node)
            if isinstance(stub, ast.ClassDef) and not isinstance(theirs[name], staticmethod):
                told[0:1] = ["self"]
            for names in argument_names(theirs[name]):
                same = len(names) == len(told) and all(
                    one == other or re.fullmatch(r"arg\d+|self", other)
                    for one, other in zip(told, names, strict=True)
                )
                if not same:
                    problems.append(f"{where}.{name}: {told} in the stub, {names} in the module")
    return problems


def test_the_stub_is_that_of_the_module() -> None:
    assert compare("_C", STUB, _C) == []


def test_a_difference_is_found() -> None:
    for text, problem in (
        ("def nothing() -> None: ...", "_C.nothing: not in the module"),
        ("def in_words(other: str, more: int) -> str: ...", "_C.in_words: ['other', 'more'] in"),
    ):
        assert any(each.startswith(problem) for each in compare("_C", ast.parse(text), _C))
