# SPDX-License-Identifier: Apache-2.0
"""csrc/build_core.py: the files that a build recompiles, and its message when one fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import ROOT

sys.path.insert(0, str(ROOT / "csrc"))
import build_core

SOURCES = {
    "low/number.h": "int number();\n",
    "low/one.cc": '#include "low/number.h"\nint number() { return 1; }\n',
    "low/two.cc": "int two() { return 2; }\n",
    "high/three.cc": '#include "low/number.h"\nint three() { return number() + 2; }\n',
}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[str]]:
    """Builds a small tree of two folders, and returns the names of the files compiled."""
    for name, text in SOURCES.items():
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(build_core, "CSRC", tmp_path / "csrc")
    monkeypatch.setattr(build_core, "FOLDERS", ("low", "high"))
    for variable in ("TORCH_RING_BY_FILE", "MAX_JOBS", "CXX", "CPPFLAGS", "CXXFLAGS"):
        monkeypatch.delenv(variable, raising=False)
    commands: list[list[str]] = []

    def call(command: list[str]) -> int:
        if "-c" in command:  # not the archiver
            commands.append(command)
        return subprocess.run(command, check=False).returncode

    monkeypatch.setattr(build_core.subprocess, "call", call)

    def build() -> list[str]:
        commands.clear()
        build_core.build(tmp_path / "libtiny.a")
        return sorted(Path(each[each.index("-c") + 1]).name for each in commands)

    return build


def edit(path: Path, text: str) -> None:
    """Write a file that is newer than all others, even if the file system's clock is coarse."""
    newest = max(each.stat().st_mtime_ns for each in path.parents[2].rglob("*"))
    path.write_text(text)
    os.utime(path, ns=(newest + 1, newest + 1))


def number_in(library: Path) -> int:
    """Return the number that a program finds in a library to which it is linked."""
    main = library.with_name("main.cc")
    main.write_text("int number(); int main() { return number(); }\n")
    program = library.with_name("program")
    subprocess.run(["g++", str(main), str(library), "-o", str(program)], check=True)
    return subprocess.run([program], check=False).returncode


def test_a_folder_is_one_file_and_is_compiled_again_when_a_part_changes(
    compiled: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert compiled() == ["high.cc", "low.cc"]
    assert number_in(tmp_path / "libtiny.a") == 1
    assert compiled() == []
    edit(tmp_path / "csrc/low/one.cc", "int number() { return 7; }\n")
    assert compiled() == ["low.cc"]
    assert number_in(tmp_path / "libtiny.a") == 7
    edit(tmp_path / "csrc/low/number.h", "int number();  // of low\n")
    assert compiled() == ["high.cc"]  # one.cc no longer includes it
    (tmp_path / "csrc/low/two.cc").unlink()
    assert compiled() == ["low.cc"]
    symbols = subprocess.run(["nm", tmp_path / "libtiny.a"], capture_output=True, check=True).stdout
    assert (b"number" in symbols, b"two" in symbols) == (True, False)
    monkeypatch.setenv("CXXFLAGS", "-DA=1 -DB=2")
    assert compiled() == ["high.cc", "low.cc"]
    assert compiled() == []


def test_by_file_a_change_compiles_one_file(
    compiled: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_RING_BY_FILE", "1")
    assert compiled() == ["one.cc", "three.cc", "two.cc"]
    edit(tmp_path / "csrc/low/two.cc", "int two() { return 22; }\n")
    assert compiled() == ["two.cc"]
    monkeypatch.setenv("TORCH_RING_BY_FILE", "0")
    assert compiled() == ["high.cc", "low.cc"]
    assert number_in(tmp_path / "libtiny.a") == 1  # there is one number()


def test_a_failure_leaves_no_library(
    compiled: Callable[[], list[str]], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    compiled()
    edit(tmp_path / "csrc/high/three.cc", "int three() { return nothing; }\n")
    for _ in range(2):
        with pytest.raises(SystemExit, match="g\\+\\+ has failed; its messages are above"):
            compiled()
        assert "nothing" in capfd.readouterr().err
        assert not (tmp_path / "libtiny.a").exists()


def test_a_header_that_changes_while_it_is_compiled_is_compiled_again(
    compiled: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as during:
        call = build_core.subprocess.call

        def and_edit(command: list[str]) -> int:
            status = call(command)
            (tmp_path / "csrc/low/number.h").write_text("int number();  // edited\n")
            return int(status)

        during.setattr(build_core.subprocess, "call", and_edit)
        compiled()
    assert compiled() == ["high.cc", "low.cc"]
