# SPDX-License-Identifier: Apache-2.0
"""Faults of horovod: the name horovod for programs that import it."""

from __future__ import annotations

from faults.fault import Fault, Room

MODULES = "torch_ring/horovod/modules.py"
MAIN = "torch_ring/horovod/__main__.py"
NAME = "torch_ring/horovod/on_path/horovod.py"
PATH = "torch_ring/config/horovod_path.py"

# fmt: off
FAULTS = (
    Fault(
        "module_twice", "a module of Horovod's name is a copy of ours", MODULES,
        "sys.modules[name] = found = importlib.import_module(ours)",
        "found = importlib.import_module(ours); module.__dict__.update(vars(found))",
        tests=(
            "horovod/test_horovod_alias.py",
            "horovod/test_horovod.py::test_every_module_is_there",
        ),
    ),
    Fault(
        "keras_is_empty", "a module that torch_ring lacks is an empty one", MODULES,
        "        elif name != _EMPTY:\n", "        elif False:\n",
        tests=("horovod/test_horovod_alias.py::test_what_torch_ring_does_not_have",),
    ),
    Fault(
        "runner_missing", "horovod.runner is not found", MODULES,
        '    "horovod.runner": "torch_ring.run",\n', "",
        tests=(
            "horovod/test_horovod_alias.py",
            "horovod/test_horovod.py::test_every_module_is_there",
        ),
    ),
    Fault(
        "exceptions_missing", "horovod.common.exceptions is not found", MODULES,
        '    "horovod.common.exceptions": "torch_ring.errors",\n', "",
        tests=(
            "horovod/test_horovod.py::test_every_module_is_there",
            "horovod/test_horovod_alias.py",
        ),
    ),
    Fault(
        "ignored_path", "python -I runs a program that finds no horovod", MAIN,
        "if sys.flags.ignore_environment:", "if False:",
        tests=("horovod/test_horovod_alias.py::test_a_python_that_ignores_the_path",),
    ),
    Fault(
        "options_lost", "the options of Python are lost", MAIN,
        "    return [*options, *arguments]", "    return [options[0], *arguments]",
        tests=("horovod/test_horovod_alias.py::test_the_command_without_the_alias",),
    ),
    Fault(
        "no_run", "horovod.run is missing", NAME,
        """if name == "run":""", "if False:",
        tests=("horovod/test_horovod_alias.py", "horovod/test_horovod.py"),
    ),
    Fault(
        "hides_horovod", "a Horovod that is installed is hidden", NAME,
        "if _problem is not None:", "if False:",
        tests=("horovod/test_horovod_alias.py::test_horovod_is_not_hidden",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/horovod",))
