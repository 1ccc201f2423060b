"""The layers of csrc: who may include whom."""

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"

# folder -> the folders, or single headers, that it may include besides itself
MAY_INCLUDE: dict[str, set[str]] = {
    "core": set(),
    "memory": {"core"},
    "transport": {"core", "memory"},
    "collective": {"core", "memory", "transport"},
    "engine": {"core", "collective/communicator.h", "collective/host_communicator.h"},
    "nccl": {"core", "collective/communicator.h"},
    "bindings": {"core", "memory", "transport", "collective", "engine", "nccl"},
}
FORBIDDEN = {
    "core": r"<(thread|condition_variable|sys/socket\.h|cuda.*|torch/.*|ATen/.*|c10/.*)>",
    "memory": r"<(thread|sys/socket\.h|cuda.*|torch/.*|ATen/.*|c10/.*)>",
    "transport": r"<(cuda.*|torch/.*|ATen/.*|c10/.*)>",
    "collective": r"<(cuda.*|torch/.*|ATen/.*|c10/.*)>",
    "nccl": r"<(cuda.*|torch/.*|ATen/.*|c10/.*)>",
    "engine": r"<(cuda.*|torch/.*|ATen/.*|c10/.*)>",
    "bindings": r"<cuda.*>",
}

FILES = sorted(p for suffix in ("h", "cc", "inc") for p in CSRC.glob(f"*/*.{suffix}"))


def test_every_folder_has_a_rule():
    assert {path.parent.name for path in FILES} == set(MAY_INCLUDE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_includes(path):
    folder = path.parent.name
    text = path.read_text()
    for header in re.findall(r'#include "([^"]+)"', text):
        allowed = MAY_INCLUDE[folder] | {folder}
        assert header in allowed or header.split("/")[0] in allowed, f"{path.name} sees {header}"
    for header in re.findall(r"#include (<[^>]+>)", text):
        assert not re.fullmatch(FORBIDDEN[folder], header), f"{path.name} sees {header}"


def test_nothing_includes_in_a_circle():
    """A header and its source are one module: neither may see what is built on the other."""
    modules: dict[str, set[str]] = {}
    for path in FILES:
        module = f"{path.parent.name}/{path.stem}"
        seen = re.findall(r'#include "([^"]+)\.(?:h|inc)"', path.read_text())
        modules.setdefault(module, set()).update(set(seen) - {module})
    try:
        TopologicalSorter(modules).prepare()
    except CycleError as error:
        pytest.fail("includes run in a circle: " + " -> ".join(error.args[1]))


def test_nothing_below_bindings_makes_a_communicator():
    """collective/make_communicator knows all of them, and so stands on top of its folder."""
    for path in FILES:
        if path.parent.name == "bindings" or path.stem == "make_communicator":
            continue
        assert "collective/make_communicator.h" not in path.read_text(), path.name


def test_nothing_reads_the_environment():
    """Settings come from Python (torch_ring/config.py), which checks and documents them."""
    for path in FILES:
        assert not re.search(r"\b(secure_)?getenv\b|\benviron\b", path.read_text()), path.name


def test_every_source_is_in_a_layer_and_short():
    for path in FILES:
        lines = len(path.read_text().splitlines())
        assert lines <= 400, f"{path.name} has {lines} lines: two ideas?"
