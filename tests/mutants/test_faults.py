# SPDX-License-Identifier: Apache-2.0
"""The table of faults: a place that has changed, or a test that has gone, is mended at once."""

from __future__ import annotations

import subprocess
from functools import cache

from faults import ROOMS
from scripts import ROOT


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text()


def test_the_places_and_the_tests_of_all_faults_are_there() -> None:
    faults = [fault for room in ROOMS.values() for fault in room.faults]
    wrong = [fault.name for fault in faults if text_of(fault.file).count(fault.old) != 1]
    assert wrong == []
    program = ROOT / "build" / "cpp" / "plain" / "core_tests"
    listed = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout
    for test in {test for fault in faults for test in fault.tests}:
        if test.startswith("cpp:"):
            assert test.removeprefix("cpp:") in listed, test
            continue
        file, _, function = test.partition("[")[0].partition("::")
        path = ROOT / "tests" / file
        assert path.exists(), test
        assert not function or f"def {function.split('::')[-1]}(" in text_of(f"tests/{file}"), test
