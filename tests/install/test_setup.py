# SPDX-License-Identifier: Apache-2.0
"""setup.py: its messages about missing requirements, and the torch that it builds for."""

from __future__ import annotations

import ast
import os
import pty
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from scripts import ROOT

DEADLINE_S = 60
HIDE_PACKAGES = "import sys; sys.path = [p for p in sys.path if not p.endswith('site-packages')]"
HOOKS = "import setuptools.build_meta as backend"
# The required parts of torch: its version, and the classes that setup.py uses.
TORCH = """
__version__ = "{}"
"""
CPP_EXTENSION = """
from setuptools import Extension as CppExtension
from setuptools.command.build_ext import build_ext as BuildExtension
"""


class Environment:
    """A virtual environment without pip, and a source tree of its own."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        self.tree = folder / "tree"
        self.tree.mkdir()
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
            shutil.copy(ROOT / name, self.tree)
        for name in ("csrc", "torch_ring"):
            ignored = shutil.ignore_patterns("torch_2_*", "__pycache__")
            shutil.copytree(ROOT / name, self.tree / name, ignore=ignored)
        self.setuptools = folder / "setuptools"
        self.setuptools.mkdir()
        site = Path(setuptools.__file__).parents[1]
        for path in (*site.glob("setuptools*"), site / "_distutils_hack"):
            (self.setuptools / path.name).symlink_to(path)
        self.variables = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.setuptools),
            "PYTHONUSERBASE": str(folder / "user"),
        }

    def install_torch(self, version: str, library: Path | None = None) -> Path:
        """Put a torch with the parts that setup.py reads into the environment, or elsewhere."""
        (own,) = self.python.parents[1].glob("lib/python*")
        site = (library or own) / "site-packages"
        (site / "torch" / "utils").mkdir(parents=True)
        (site / "torch" / "__init__.py").write_text(TORCH.format(version))
        (site / "torch" / "utils" / "cpp_extension.py").write_text(CPP_EXTENSION)
        return site / "torch"

    def run(self, *arguments: str, **variables: str) -> tuple[int, str]:
        """Run Python in the tree; return its exit status and output."""
        ended = subprocess.run(
            [self.python, *arguments],
            cwd=self.tree,
            env={**self.variables, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # without a terminal
            timeout=DEADLINE_S,
            check=False,
        )
        return ended.returncode, ended.stdout.decode()

    def isolated(self, code: str, **variables: str) -> str:
        """Run code with setuptools as `backend`, like pip's isolated build."""
        status, output = self.run("-c", f"{HIDE_PACKAGES}\n{HOOKS}\n{code}", **variables)
        assert status == 0, output
        return output


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


def requirements(folder: Path) -> list[str]:
    """Return the requirements in a folder's metadata."""
    (metadata,) = folder.glob("*.dist-info/METADATA")
    return HeaderParser().parsestr(metadata.read_text()).get_all("Requires-Dist") or []


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1]


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions of setup.py."""
    return runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


def test_an_old_python_or_setuptools_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ast.parse((ROOT / "setup.py").read_text(), feature_version=(3, 7))
    monkeypatch.setattr(setuptools, "__version__", "65.5.0")
    with pytest.raises(SystemExit, match="needs setuptools 77 or newer to build, and this is 65"):
        runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    with pytest.raises(SystemExit, match=r"needs Python 3\.10 or newer, and this is Python 3\.9"):
        runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


def test_what_is_missing_is_said_in_one_sentence(environment: Environment, tmp_path: Path) -> None:
    def last_line_of(*arguments: str, **variables: str) -> str:
        status, output = environment.run("setup.py", *arguments, **variables)
        assert status == 1
        return last_line(output).partition("torch_ring")[2]

    setuptools_is_missing = last_line_of("build_ext", PYTHONPATH="")
    assert setuptools_is_missing.startswith(": setuptools is missing: pip install")
    assert last_line_of("dist_info").startswith(": there is no torch to build for: pip install")
    torch = environment.install_torch("2.10.1")
    assert last_line_of("build_ext").startswith(" needs torch 2.11 or newer, and this is 2.10.1")
    (torch / "__init__.py").write_text(TORCH.format("2.13.0+cpu"))
    without_compiler = last_line_of("build_ext", PATH=str(tmp_path))
    assert without_compiler.startswith(": there is no C++ compiler (g++): install g++")
    shutil.rmtree(environment.tree / "csrc")
    assert last_line_of("build_ext") == (": there are no sources in csrc/: is this tree complete?")


def test_an_isolated_build_asks_for_torch_unless_the_environment_has_it(
    environment: Environment,
) -> None:
    ask = "print(backend.get_requires_for_build_wheel())"
    with pytest.raises(AssertionError, match=r"no C\+\+ compiler \(none-such\): install g"):
        environment.isolated(ask, CXX="none-such")  # before the download
    output = environment.isolated(ask)
    assert "there is no torch in this environment: pip downloads the newest one" in output
    assert last_line(output) == "['torch>=2.11']"
    environment.install_torch("2.13.0+cpu")
    assert last_line(environment.isolated(ask, CXX="none-such")) == "[]"
    environment.isolated("backend.prepare_metadata_for_build_wheel('.')")
    assert "torch==2.13.*" in requirements(environment.tree)


def test_other_systems_get_a_package_without_a_module(environment: Environment) -> None:
    first = "import setuptools.command.bdist_wheel, setuptools.command.build_ext"  # of this system
    there = f"{first}\nsys.platform = 'win32'\nsys.modules['fcntl'] = None\n"
    output = environment.isolated(f"{there}print(backend.get_requires_for_build_wheel())")
    assert last_line(output) == "[]"
    name = last_line(environment.isolated(f"{there}print(backend.build_wheel('.'))"))
    assert name == "torch_ring-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(environment.tree / name) as wheel:
        names = wheel.namelist()
        (metadata,) = (each for each in names if each.endswith("/METADATA"))
        required = HeaderParser().parsestr(wheel.read(metadata).decode()).get_all("Requires-Dist")
    assert "torch_ring/native/one_rank.py" in names
    assert not any(each.endswith(".so") for each in names)
    assert [each for each in required if "extra" not in each] == ["torch>=2.11", "numpy"]


@pytest.mark.parametrize("sees_others", [False, True])
def test_torch_outside_of_a_virtual_environment(
    environment: Environment, sees_others: bool
) -> None:
    """A torch of the user, or of the system, counts only if the environment sees it, too."""
    settings = environment.python.parents[1] / "pyvenv.cfg"
    text = f"home = {settings.parent}\ninclude-system-site-packages = {str(sees_others).lower()}\n"
    settings.write_text(text)
    base = environment.tree.parent / "base"
    for site in (Path(environment.variables["PYTHONUSERBASE"]), base):
        library = site / "lib" / f"python3.{sys.version_info[1]}"
        environment.install_torch("2.13.0", library)
        output = environment.isolated(
            f"sys.base_prefix = {str(base)!r}\nprint(backend.get_requires_for_build_wheel())"
        )
        assert last_line(output) == ("[]" if sees_others else "['torch>=2.11']")
        shutil.rmtree(library)


def test_tools_that_cannot_compile(
    setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "env g++ -O1")
    setup["check_tools"]()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(SystemExit, match=r"false does not know C\+\+20"):
        setup["check_tools"]()
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(SystemExit, match=r"no headers \(Python\.h\): .*python3-dev"):
        setup["check_tools"]()


@pytest.mark.parametrize("flags", ["", "-static-libstdc++"])
def test_a_compiler_that_links_its_own_runtime(
    setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str
) -> None:
    monkeypatch.setenv("LDFLAGS", flags)
    arguments = setup["runtime_arguments"]()
    assert bool(arguments) == bool(flags)
    built = tmp_path / "built.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(built), *flags.split()]
    source = b"void f() { throw 1; }"
    subprocess.run([*command, *arguments], input=source, check=True)
    assert b"libstdc++.so.6" in built.read_bytes()


def test_a_wheel_takes_modules_that_were_built_before(
    environment: Environment, tmp_path: Path
) -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    modules = tmp_path / "modules"
    for minor in (13, 14):
        (modules / f"torch_2_{minor}").mkdir(parents=True)
        (modules / f"torch_2_{minor}" / f"_C{suffix}").write_text(f"for 2.{minor}")
    stale = environment.tree / "build" / f"lib.linux-x86_64-{sys.implementation.cache_tag}"
    (stale / "torch_ring").mkdir(parents=True)
    (stale / "torch_ring" / "removed.py").touch()
    for name in ("first", "second"):
        environment.isolated(
            f"backend.build_wheel('{name}')", TORCH_RING_NATIVE_MODULES=str(modules)
        )
    (wheel,) = (environment.tree / "second").glob("*.whl")
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for minor in (13, 14):
            path = f"torch_ring/native/torch_2_{minor}/_C{suffix}"
            assert archive.read(path).decode() == f"for 2.{minor}"
        assert not [name for name in names if name.endswith("removed.py")]
        assert {"torch_ring/py.typed", "torch_ring/_C.pyi"} <= set(names)
        archive.extractall(tmp_path / "unpacked")
    assert "torch<2.15,>=2.13" in requirements(tmp_path / "unpacked")


def test_the_requirement_of_a_wheel(setup: dict[str, Any]) -> None:
    assert setup["torch_requirement"]([(2, 13), (2, 14), (2, 15)]) == "torch>=2.13,<2.16"
    gap = Requirement(setup["torch_requirement"]([(2, 13), (2, 15)]))
    versions = ("2.12.1", "2.13.0", "2.14.1", "2.15.0", "2.16.0")
    assert [each in gap.specifier for each in versions] == [False, True, False, True, False]
    with pytest.raises(SystemExit, match="2 and 3"):
        setup["torch_requirement"]([(2, 15), (3, 0)])
    # NVIDIA's containers have pre-releases; pip would replace them.
    one = Requirement(setup["torch_requirement"]([setup["minor"]("2.15.0a0+1d2f.nv25")]))
    versions = ("2.15.0a0+1d2f.nv25", "2.15.1+cu130", "2.14.1", "2.16.0a0")
    found = [one.specifier.contains(each, prereleases=True) for each in versions]
    assert found == [True, True, False, False]


def test_messages_reach_the_terminal_past_pip() -> None:
    """pip captures the output of a build, and shows it only after a failure."""
    say = f"import runpy; runpy.run_path({str(ROOT / 'setup.py')!r})['say']('hello')"
    child, terminal = pty.fork()
    if child == 0:
        ended = subprocess.run([sys.executable, "-c", say], capture_output=True, check=False)
        os._exit(ended.returncode)
    shown = b""
    try:
        while chunk := os.read(terminal, 1024):
            shown += chunk
    except OSError:  # the child has ended
        pass
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0
    assert "torch_ring: hello" in shown.decode()
