# SPDX-License-Identifier: Apache-2.0
"""The layers of csrc and the rooms of torch_ring: which may include or import which."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"

# folder -> the folders, or single headers, that it may include besides itself
MAY_INCLUDE: dict[str, set[str]] = {
    "core": set(),
    "memory": {"core"},
    "transport": {"core", "memory"},
    "control": {"core", "transport"},
    "messages": {"core", "control", "transport"},
    "collective": {"core", "memory", "transport"},
    "engine": {"core", "control", "collective/communicator.h", "collective/board.h"},
    "timeline": {"core", "messages", "engine/recorder.h"},
    "nccl": {"core", "collective/communicator.h"},
    "ucx": {"core", "transport"},
}
MAY_INCLUDE["bindings"] = {*MAY_INCLUDE}
MAY_INCLUDE["gradients"] = {"core", "engine", "memory", "bindings"}
MAY_INCLUDE["c10d"] = {"core", "control", "engine", "messages", "bindings"}
ABOVE_TORCH = ("bindings", "gradients", "c10d")
TORCH = r"torch/.*|ATen/.*|c10/.*"
THREADS = {"core": r"thread|condition_variable|sys/socket\.h", "memory": r"thread|sys/socket\.h"}

FILES = sorted(p for suffix in ("h", "cc", "inc") for p in CSRC.glob(f"*/*.{suffix}"))


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def test_includes():
    assert {path.parent.name for path in FILES} == {*MAY_INCLUDE}
    wrong = []
    for path in FILES:
        folder, text = path.parent.name, path.read_text()
        allowed = MAY_INCLUDE[folder] | {folder}
        for header in re.findall(r'#include "([^"]+)"', text):
            if not {header, header.split("/")[0]} & allowed:
                wrong.append(f"{name_of(path)} sees {header}")
        forbidden = [r"cuda.*", THREADS.get(folder), None if folder in ABOVE_TORCH else TORCH]
        pattern = "|".join(filter(None, forbidden))
        for header in re.findall(r"#include <([^>]+)>", text):
            if re.fullmatch(pattern, header):
                wrong.append(f"{name_of(path)} sees {header}")
    assert wrong == []


def test_nothing_includes_in_a_circle():
    """A header and its source are one module, and may not include modules built on it."""
    modules: dict[str, set[str]] = {}
    for path in FILES:
        module = f"{path.parent.name}/{path.stem}"
        seen = re.findall(r'#include "([^"]+)\.(?:h|inc)"', path.read_text())
        modules.setdefault(module, set()).update(set(seen) - {module})
    try:
        TopologicalSorter(modules).prepare()
    except CycleError as error:
        pytest.fail("includes run in a circle: " + " -> ".join(error.args[1]))


def test_a_name_is_one_class():
    """Two classes of one name in a namespace are one to the linker, which takes either's members.

    Anonymous namespaces do not count: their classes belong to one source.
    """
    defined: dict[str, set[str]] = {}
    for path in [*FILES, *(ROOT / "tests" / "cpp").glob("**/*.[hc]*")]:
        text = re.sub(r"(?ms)^namespace \{$.*?^\}  // namespace$", "", path.read_text())
        namespace = re.search(r"^namespace ([\w:]+) \{", text, flags=re.M)
        pattern = r"^(?:template <.*>\s+)?(?:class|struct|enum class) (\w+)(?:;| final| :| \{)"
        for match in re.finditer(pattern, text, flags=re.M):
            if namespace and not match[0].endswith(";"):
                defined.setdefault(f"{namespace[1]}::{match[1]}", set()).add(path.name)
    assert "torch_ring::Error" in defined
    assert {name: sorted(files) for name, files in defined.items() if len(files) > 1} == {}


def test_nothing_reads_the_environment_or_makes_a_communicator():
    """Variables are read in torch_ring/config/ and torch_ring/setup/ only (a ruff rule)."""
    for path in FILES:
        text = path.read_text()
        assert not re.search(r"\b(secure_)?getenv\b|\benviron\b", text), path.name
        # make_communicator knows all communicators, and so stands on top of its folder.
        if path.parent.name not in ABOVE_TORCH and path.stem != "make_communicator":
            assert "collective/make_communicator.h" not in text, path.name


# --- torch_ring/

# Room (a package or a module on top) -> the rooms that it may import besides itself, in the order
# of the house: from the ground up.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "native": {"errors"},
    "config": {"errors"},
    "compression": set(),
    "setup": {"_C", "config", "errors"},
    "membership": {"config", "errors", "setup"},
    "world": {"_C", "config", "errors", "membership", "native", "setup"},
    "tracing": {"_C", "errors", "setup", "world"},
    "lr_schedules": {"errors", "world"},
    "collectives": {"_C", "compression", "errors", "world"},
    "c10d": {"_C", "config", "errors", "native", "setup", "tracing", "world"},
    "metrics": {"collectives", "world"},
    "sync_batch_norm": {"collectives", "world"},
    "state": {"collectives", "world"},
    "data": {"collectives", "setup", "world"},
    "optimizer": {"_C", "collectives", "compression", "errors", "world"},
    "checkpoint": {"collectives", "errors", "state", "world"},
    "mpi_ops": {"_C", "collectives", "compression", "config", "errors", "world"},
    "functions": {"collectives", "state"},
    "elastic": {
        *("collectives", "data", "errors", "membership", "optimizer", "setup", "state", "world"),
    },
    "self_test": {"_C", "collectives", "config", "errors", "setup", "world"},
    "__main__": {"native", "self_test"},
    "api": {
        *("c10d", "checkpoint", "collectives", "compression", "data", "elastic", "errors"),
        *("functions", "lr_schedules", "metrics", "mpi_ops", "optimizer", "state"),
        *("sync_batch_norm", "tracing", "world"),
    },
    "run": {"api", "config", "errors", "membership", "mpi_ops", "native", "setup"},
    "horovod": {"config", "elastic", "errors", "mpi_ops", "run", "world"},
}

PACKAGE = ROOT / "torch_ring"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

SUBMODULES = MODULES.keys() - {"torch_ring"}  # that is a logger's name, too


def room_of(module: str) -> str:
    """Return the room of "torch_ring.world.join": "world"; of the package itself "__init__"."""
    return module.split(".")[1] if "." in module else "__init__"


@cache
def imported_modules(module: str) -> set[str]:
    """Return the package's modules, and _C, that a module imports anywhere in its text.

    If it calls ``importlib.import_module``, each of its strings that is a module's name counts.
    """
    names = set()
    text = MODULES[module].read_text()
    imports_by_name = "import_module(" in text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                names.add(submodule if submodule in MODULES else str(node.module))
        elif imports_by_name and isinstance(node, ast.Constant) and node.value in SUBMODULES:
            names.add(str(node.value))
    return {name for name in names if name.split(".")[0] == "torch_ring"}


def test_imports():
    """Each room imports what the table allows, which is what stands before it."""
    assert {room_of(module) for module in MODULES} == {*MAY_IMPORT, "__init__"}
    below = {"_C"}
    for room, allowed in MAY_IMPORT.items():
        assert allowed <= below, f"{room} would import upward: {allowed - below}"
        below.add(room)
    wrong = []
    for module in MODULES.keys() - {"torch_ring"}:
        room = room_of(module)
        for name in imported_modules(module):
            # The package's __init__ is for users.
            if name == "torch_ring" or room_of(name) not in MAY_IMPORT[room] | {room}:
                wrong.append(f"{module} sees {name}")
    assert wrong == []


def test_nothing_imports_in_a_circle():
    graph = {module: imported_modules(module) - {module} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("imports run in a circle: " + " -> ".join(error.args[1]))
