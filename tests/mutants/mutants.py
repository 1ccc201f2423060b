# SPDX-License-Identifier: Apache-2.0
"""Plants faults, runs the tests of a room with each until the first failure, and prints which
faults they found.

    make mutants ROOM=gradients
    make mutants ARGS="--only launched_early --keep"
    make mutants ARGS="--generated 40 --seed 1"
    make mutants ROOM=setup ARGS=--own

A fault replaces one place of a source file (`faults/`, by hand; `generated.py`, by rules). It
works in a copy of the tree, so the checkout stays as it is. The faults of C++ files are all
compiled into one extension, and the variable TORCH_RING_MUTANT turns one of them on: a build a
fault would take hours. Each of a Python file is written to a copy of its own, and a room that has
no other faults builds nothing.

The tests that know the places of faults run once without any. A fault *died* if a test failed,
again when it ran alone, and passed without the fault, or if tests that end without the fault did
not end in time; it *survived* if all tests of the room passed. Tests that found a fault run first
for the next ones, so most faults die within seconds. The exit status is 1 if a fault survived, or
if its place is no longer in the source.

Faults of csrc/ may name tests of tests/cpp, too, by a word of their names: "cpp:engine". The copy
has their program, built with the faults.

With --own only the tests that know a fault's place run, and once: half the time, and the table
says whether they still know it.
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults import ROOMS, Fault, Room
from generated import generated

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "support"))
from copied_tree import build, copy_tree  # noqa: E402

SWITCH = "TORCH_RING_MUTANT"
CORE = "cpp:"  # of a test of tests/cpp; a word of its name follows
_FEW = 6  # tests that have found faults last, which one process runs
HEADER = f"""\
// Generated: the planted fault that is on.
#pragma once

#include <cstdlib>
#include <string_view>

namespace torch_ring {{

inline bool is_mutant(std::string_view name) {{
  static const char* const present = std::getenv("{SWITCH}");
  return present != nullptr && name == present;
}}

}}  // namespace torch_ring
"""


@dataclass(frozen=True)
class Result:
    """The end of one fault.

    Attributes:
        fault: the fault.
        fate: "died", "survived", or "no such place".
        by: the test that found it, or the reason.
        seconds: the time of its tests.
    """

    fault: Fault
    fate: str
    by: str
    seconds: float = 0.0


def switched(fault: Fault) -> str:
    """Return C++ that is `fault.new` while the fault is on, and `fault.old` otherwise."""
    is_on = f'::torch_ring::is_mutant("{fault.name}")'
    if fault.is_expression:
        return f"({is_on} ? ({fault.new}) : ({fault.old}))"
    return f"if ({is_on}) {{ {fault.new} }} else {{ {fault.old} }}"


def plant_in_cpp(faults: Iterable[Fault], tree: Path) -> dict[str, str]:
    """Plant the faults of C++ files, each behind its switch.

    Returns:
        For faults that are left out: the reason.
    """
    problems: dict[str, str] = {}
    texts: dict[str, str] = {}
    for fault in faults:
        text = texts.get(fault.file) or (tree / fault.file).read_text()
        if text.count(fault.old) != 1:
            problems[fault.name] = f"its text is there {text.count(fault.old)} times"
            continue
        texts[fault.file] = text.replace(fault.old, switched(fault))
    (tree / "csrc/core/mutant.h").write_text(HEADER)
    for file, text in texts.items():
        (tree / file).write_text('#include "core/mutant.h"\n' + text)
    return problems


def core_words(faults: Iterable[Fault]) -> list[str]:
    """Return the words that name tests of tests/cpp."""
    named = {test for fault in faults for test in fault.tests if test.startswith(CORE)}
    return sorted(test.removeprefix(CORE) for test in named)


def paths_of(fault: Fault) -> list[str]:
    """Return the paths of the fault's tests in Python."""
    return [f"tests/{test}" for test in fault.tests if not test.startswith(CORE)]


class Planted:
    """A fault in a copy of the tree. One of C++ is there already, behind its switch.

    Attributes:
        fault: the fault; None: no fault.
        name: its name.
        tree: the copy.
    """

    def __init__(self, fault: Fault | None, tree: Path) -> None:
        self.fault = fault
        self.name = fault.name if fault else "none"
        self.tree = tree
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        if fault is None or not fault.file.endswith(".py"):
            return
        self._copy = tempfile.TemporaryDirectory(dir=tree.parent)
        self.tree = Path(self._copy.name) / "tree"
        shutil.copytree(tree, self.tree, symlinks=True, copy_function=os.link)
        place = self.tree / fault.file
        sound = place.read_text()
        place.unlink()  # the tree has the same file
        place.write_text(sound.replace(fault.old, fault.new))

    def end(self) -> None:
        """Remove the copy of its own, if there is one."""
        if self._copy:
            self._copy.cleanup()


class Tests:
    """Runs the tests of a room in the copy.

    Args:
        tree: the copy.
        room: the room.
        jobs: the number of pytest's processes.
        seconds: the time that a fault's tests may take.
        own_only: whether only the tests that know a fault's place look for it, and once.
    """

    def __init__(
        self, tree: Path, room: Room, jobs: int, seconds: float, *, own_only: bool
    ) -> None:
        self._without = Planted(None, tree)
        self._room = room
        self._jobs = jobs
        self._seconds = seconds
        self._own_only = own_only
        self._lock = threading.Lock()  # guards the members below
        self._finders: list[str] = []
        self._sound: set[str] = set()  # tests that pass without a fault
        self._unsound: set[str] = set()  # tests that fail without one, or now and then

    def run_without(self, faults: Sequence[Fault]) -> None:
        """Run the tests that know the faults' places, without a fault.

        Raises:
            SystemExit: there is no such test.
        """
        words = core_words(faults)
        if words and (failure := self._core_failure(self._without, words)):
            sys.exit(f"without a fault: {failure}")
        known = sorted({test for fault in faults for test in paths_of(fault)})
        if not known:
            return
        arguments = ["-rA", *known]
        status, output = self._output(self._without, arguments, self._jobs, 10 * self._seconds)
        if status == pytest.ExitCode.USAGE_ERROR:
            sys.exit("\n".join(re.findall(r"^ERROR: .+$", output, re.MULTILINE)))
        self._sound.update(re.findall(r"^PASSED (.+?)$", output, re.MULTILINE))

    def first_failure(self, planted: Planted) -> str:
        """Return the first test that fails with a fault; "" if all pass."""
        assert planted.fault is not None
        words = core_words([planted.fault])
        if words and (failure := self._core_failure(planted, words)):
            return failure
        own = paths_of(planted.fault)
        with self._lock:
            finders = list(self._finders)
        quick = ["-m", "not slow", *self._room.tests]
        steps = [
            (own, 1),
            (finders[:_FEW], 1),
            (finders[_FEW:], self._jobs),
            (quick, self._jobs),
            (list(self._room.slow_tests), self._jobs),
        ]
        for tests, jobs in steps[:1] if self._own_only else steps:
            while failure := self._failure(planted, tests, jobs) if tests else "":
                if "::" not in failure:
                    if not self._failure(self._without, tests, jobs):
                        return failure
                    break
                if self._is_found_by(planted, failure):
                    self._note(failure)
                    return failure
                with self._lock:
                    self._unsound.add(failure)
        return ""

    def _is_found_by(self, planted: Planted, test: str) -> bool:
        """Return whether a test that has failed passes without the fault, and fails again."""
        with self._lock:
            is_sound = test in self._sound
        if not is_sound:
            if self._failure(self._without, [test], 1):
                return False
            with self._lock:
                self._sound.add(test)
        return self._own_only or bool(self._failure(planted, [test], 1))

    def _failure(self, planted: Planted, tests: list[str], jobs: int) -> str:
        """Return the first test that fails, or the reason that none has ended; "" if all pass."""
        status, output = self._output(planted, ["-x", *tests], jobs, self._seconds)
        if status is None:
            return f"no end within {self._seconds:.0f} s"
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        if status in (0, 5):  # 5: no test is left
            return ""
        if failed:
            return failed[1]
        last = output.strip().splitlines()[-1:] or [f"exit status {status}"]
        return f"pytest: {last[0]}"

    def _core_failure(self, planted: Planted, words: Sequence[str]) -> str:
        """Return the first failure of the tests in C++ with these words; "" if all pass."""
        program = self._without.tree / "build/cpp/plain/core_tests"
        try:
            ended = subprocess.run(
                [program, *words], env={**os.environ, SWITCH: planted.name}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=self._seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"C++: no end within {self._seconds:.0f} s"
        if ended.returncode == 0:
            return ""
        failed = re.search(r"^FAILED +(.+)$", ended.stdout, re.MULTILINE)
        last = ended.stdout.strip().splitlines()[-1:] or [f"exit status {ended.returncode}"]
        return f"C++: {failed[1] if failed else last[0]}"

    def _output(
        self, planted: Planted, arguments: list[str], jobs: int, seconds: float
    ) -> tuple[int | None, str]:
        """Run pytest; return its status, None if it did not end in time, and its output."""
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no"]
        command += ["-p", "no:cacheprovider"]
        with self._lock:
            command += [f"--deselect={test}" for test in sorted(self._unsound)]
        command += ["--numprocesses", str(jobs), "--dist", "loadfile"] if jobs > 1 else []
        environment = {
            **os.environ,
            SWITCH: planted.name,
            "PYTHONPATH": str(planted.tree),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        process = subprocess.Popen(
            [*command, *arguments], cwd=planted.tree, env=environment, text=True,
            start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # multiprocessing's tracker outlives SIGTERM, and removes the semaphores of the others.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
        return process.returncode, output

    def _note(self, failure: str) -> None:
        with self._lock:
            self._finders = [failure, *(test for test in self._finders if test != failure)]


def result_of(fault: Fault, tree: Path, tests: Tests) -> Result:
    """Plant a fault, and run the tests until one fails."""
    begin = time.monotonic()
    planted = Planted(fault, tree)
    try:
        by = tests.first_failure(planted)
    finally:
        planted.end()
    return Result(fault, "died" if by else "survived", by, time.monotonic() - begin)


def run(faults: list[Fault], tree: Path, tests: Tests, at_once: int) -> Iterator[Result]:
    """Plant the faults, a few at a time in copies of their own; yield the results in order."""
    in_cpp = [fault for fault in faults if not fault.file.endswith(".py")]
    problems = plant_in_cpp(in_cpp, tree)
    for fault in faults:
        if fault.file.endswith(".py"):
            count = (tree / fault.file).read_text().count(fault.old)
            if count != 1:
                problems[fault.name] = f"its text is there {count} times"
    if in_cpp:
        build(tree)
    if core_words(faults):
        subprocess.run(
            ["make", "--silent", "-j2", "-C", "tests/cpp", "all", f"PYTHON={sys.executable}"],
            cwd=tree, check=True,
        )  # fmt: skip
    tests.run_without(faults)
    pool = ThreadPoolExecutor(at_once)
    try:
        waiting = {
            fault.name: pool.submit(result_of, fault, tree, tests)
            for fault in faults
            if fault.name not in problems
        }
        for fault in faults:
            if fault.name in problems:
                yield Result(fault, "no such place", problems[fault.name])
            else:
                yield waiting[fault.name].result()
    finally:  # after Ctrl-C only the faults under way end
        pool.shutdown(cancel_futures=True)


def main() -> None:
    """Parse the arguments, run the faults, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--room", default=["gradients"], nargs="+", choices=sorted(ROOMS), help="several: one build"
    )
    parser.add_argument("--only", nargs="*", help="names of faults")
    parser.add_argument("--generated", type=int, default=0, help="so many by rules instead")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of generated ones")
    parser.add_argument("--list", action="store_true", help="print the faults, and run none")
    parser.add_argument("--own", action="store_true", help="only the tests that know a place")
    parser.add_argument("--keep", action="store_true", help="keep the copy of the tree")
    parser.add_argument("--at-once", type=int, default=2, help="faults that are tried at a time")
    parser.add_argument("--jobs", type=int, default=2, help="processes of pytest, for a fault")
    parser.add_argument("--seconds", type=float, default=600.0, help="for the tests of a fault")
    options = parser.parse_args()
    rooms = [ROOMS[name] for name in options.room]
    room = Room(*(sum(parts, ()) for parts in zip(*rooms, strict=True)))
    planted: Sequence[Fault] = room.faults
    if options.generated:
        files = sorted({fault.file for fault in planted})
        planted = generated(ROOT, files, options.generated, options.seed)
    faults = [f for f in planted if options.only is None or f.name in options.only]
    if options.list:
        for fault in faults:
            count = (ROOT / fault.file).read_text().count(fault.old)
            lost = "" if count == 1 else f" (its text is there {count} times)"
            print(f"{fault.name:32} {fault.file}: {fault.says}{lost}")
        return
    tree = ROOT / "build" / "mutants" / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    copy_tree(tree)
    compileall.compile_dir(tree / "torch_ring", quiet=1)  # once, for all processes of all faults
    tests = Tests(tree, room, options.jobs, options.seconds, own_only=options.own)
    results: list[Result] = []
    try:
        for result in run(faults, tree, tests, options.at_once):
            results.append(result)
            fault = result.fault
            print(
                f"{result.fate:13} {fault.name:32} {result.seconds:5.0f} s  {fault.says}"
                f"{': ' + result.by if result.by else ''}",
                flush=True,
            )
    finally:
        if not options.keep:
            shutil.rmtree(tree, ignore_errors=True)
    alive = [result for result in results if result.fate != "died"]
    print(f"{len(results) - len(alive)} of {len(results)} faults of {', '.join(options.room)} died")
    sys.exit(1 if alive else 0)


if __name__ == "__main__":
    main()
