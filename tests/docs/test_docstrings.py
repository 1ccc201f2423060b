# SPDX-License-Identifier: Apache-2.0
"""Docstrings of the public names: they describe every argument and result themselves."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from scripts import ROOT

import torch_ring as hvd
from torch_ring.compression.int8 import Int8Compressor
from torch_ring.compression.powersgd import PowerSGDCompressor

MODULES = (hvd, hvd.checkpoint, hvd.data, hvd.lr_schedules, hvd.metrics)
NO_CONSTRUCTOR = (hvd.Handle, hvd.NotInitializedError, hvd.Compressor)  # for users


def public_objects() -> Iterator[tuple[str, Any]]:
    for module in MODULES:
        for name in module.__all__:
            thing = getattr(module, name)
            if not isinstance(thing, ModuleType) and not name.startswith("_"):
                yield f"{module.__name__}.{name}", thing
    yield "Int8Compressor", Int8Compressor
    yield "PowerSGDCompressor", PowerSGDCompressor


def is_ours(kind: type) -> bool:
    return kind.__module__.startswith("torch_ring")


def public_functions() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Return the name, the signature's owner and the docstring of functions and constructors."""
    for name, thing in public_objects():
        if inspect.isfunction(thing):
            yield name, thing, inspect.getdoc(thing) or ""
        if not inspect.isclass(thing) or issubclass(thing, enum.Enum):
            continue
        if "__init__" in vars(thing) and thing not in NO_CONSTRUCTOR:
            yield name, thing.__init__, inspect.getdoc(thing) or ""
        inherited = {name for base in thing.__mro__[1:] for name in vars(base) if is_ours(base)}
        for method, value in vars(thing).items():
            if method in inherited:
                continue
            function = getattr(value, "__func__", value)
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"{name}.{method}", function, inspect.getdoc(function) or ""


def described_arguments(doc: str) -> dict[str, str]:
    """Return the text on each argument, by name."""
    section = re.search(
        r"^(?:Args|Attributes):\n((?:(?:    .*)?\n)*(?:    .*)?)", doc, re.MULTILINE
    )
    if section is None:
        return {}
    entries = re.findall(r"^    (\w[\w, ]*): ((?:.|\n     )*)", section[1], re.MULTILINE)
    return {name: text for names, text in entries for name in names.split(", ")}


FUNCTIONS = list(public_functions())
DOCS = {name.rpartition(".")[2]: doc for name, _, doc in FUNCTIONS}
AS = re.compile(r"As `(\w+)`, ")


def all_arguments(doc: str) -> dict[str, str]:
    """Return the text on each argument in a docstring, and in the docstring that it names.

    A docstring that names another one describes the differences in its text: "`tensors`: of one".
    """
    other = AS.match(doc)
    if other is None:
        return described_arguments(doc)
    return all_arguments(DOCS[other[1]]) | dict(re.findall(r"^`(\w+)`: (.*)", doc, re.MULTILINE))


def test_every_argument_and_result_is_described():
    for where, function, doc in FUNCTIONS:
        described = all_arguments(doc)
        parameters = {
            name: parameter
            for name, parameter in inspect.signature(function).parameters.items()
            if name not in ("self", "cls")
        }
        if AS.match(doc):  # the other may have more, or one tensor in place of several
            assert set(parameters) <= set(described), where
        else:
            assert set(described) == set(parameters), where
        for name, parameter in parameters.items():
            if parameter.default is None:
                assert "None" in described[name], f"{where}: what does {name}=None mean?"
        result = inspect.signature(function).return_annotation
        if result not in ("None", "NoReturn", None):
            assert "\nReturns:\n" in doc or doc.startswith("Return "), where


SOURCES = {".py", ".pyi", ".h", ".cc", ".inc"}
FOLDERS = ("torch_ring", "csrc", "tests", "benchmarks", "examples")
NO_SUBJECT = re.compile(
    r'(?:^|\s)(?:#|//+|r?"""|/\*\*?) ?(?:What|Who|Which|Whoever)\b', re.MULTILINE
)


def test_no_docstring_or_comment_begins_without_a_subject():
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    texts = {path: path.read_text() for path in paths if path.suffix in SOURCES}
    assert len(texts) > 300
    assert [str(path) for path, text in texts.items() if NO_SUBJECT.search(text)] == []
