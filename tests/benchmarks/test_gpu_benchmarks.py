# SPDX-License-Identifier: Apache-2.0
"""The check of a GPU reports each part, however it ends, and runs on the stand-ins."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import device_double
import pytest
from gpu_check import Part
from launcher_commands import clean_environment, output_of, start_program
from scripts import DEADLINE_S, ROOT

BENCHMARKS = ROOT / "benchmarks"
LATE_S = 3.0  # for parts that hang


def part(name: str, program: str, seconds: float = DEADLINE_S) -> Part:
    return Part(name, seconds, "", ["unused"], [sys.executable, "-c", program])


def results_of(parts: Sequence[Part], folder: Path, seconds: float = 10 * DEADLINE_S) -> list[dict]:
    """Check the parts in a process of their own, whose children are the parts' alone."""
    program = f"""
import sys
from pathlib import Path
from gpu_check import Part, check
sys.exit(check({list(parts)!r}, "stand-in", {seconds}, Path({str(folder)!r})))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean_environment(PYTHONPATH=str(BENCHMARKS)),
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
    )
    lines = (folder / "results.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    assert [result["part"] for result in results] == [each.name for each in parts]
    assert all(result["verdict"] in done.stdout for result in results)
    good = all(result["verdict"] in ("passed", "skipped") for result in results)
    assert done.returncode == (0 if good else 1), done.stderr
    return results


# A child in a session of its own, which a signal to the part's process group would not reach.
HANG = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"],
                         start_new_session=True)
print("hangs beside", child.pid, flush=True)
{end}
"""


def is_gone(said: str) -> bool:
    return not Path(f"/proc/{said.split()[-1]}").exists()


def test_each_part_is_reported_and_the_next_ones_run(tmp_path):
    parts = [
        part("first", "print('# a number: 1'); print('some text'); print('=== 3 passed ===')"),
        part("fails", "print('reason'); raise SystemExit(3)"),
        part("dies", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        part(
            "deaf",
            "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            + HANG.format(end="time.sleep(1000)"),
            LATE_S,
        ),
        part("leaves", HANG.format(end="")),
        part("skips", "print('=== 0 failed, 2 skipped (no GPU here: 2) in 0.1s ===')"),
        Part("other", 1.0, "", ["unused"], "it needs a GPU"),
        part("last", "print('# something else is skipped')"),
    ]
    results = results_of(parts, tmp_path)
    assert [result["verdict"] for result in results] == [
        "passed",
        "failed: exit status 3",
        "died: SIGSEGV",
        "late: ended after 3 s",
        "passed",
        "skipped",
        "skipped",
        "passed",
    ]
    said = {result["part"]: result["said"] for result in results}
    assert said["first"] == ["# a number: 1", "3 passed"]
    assert said["other"] == ["it needs a GPU"]
    log = (tmp_path / "log.txt").read_text()
    gone = [line for line in log.splitlines() if line.startswith("hangs beside")]
    assert len(gone) == 2
    assert all(map(is_gone, gone))
    assert "some text" in log


@pytest.mark.slow
def test_parts_after_the_time_or_a_failed_build_are_not_run(tmp_path):
    first = Part("first", LATE_S, "", ["unused"], ["true"])
    slow = part("slow", "import time; time.sleep(1000)", 6 * LATE_S)
    second = part("second", "print('done')")
    results = results_of([first, slow, second], tmp_path / "time", LATE_S)
    assert [result["verdict"].split(":")[0] for result in results] == ["passed", "late", "not run"]
    broken = part("first", "raise SystemExit(1)")
    results = results_of([broken, second], tmp_path / "build")
    assert [result["verdict"].split(":")[0] for result in results] == ["failed", "not run"]


COLLECT = """
import sys
import pytest
from gpu_check import PARTS

class Count:
    def pytest_collection_finish(self, session):
        self.names = [item.name for item in session.items]

for part in PARTS:
    for command in (part.command, part.on_stand_in):
        if "pytest" in command:
            options, count = command[command.index("pytest") + 1:], Count()
            assert pytest.main(["--collect-only", "-qq", *options], plugins=[count]) == 0, part
            print("#", part.name, len(count.names))
"""


@pytest.mark.weekly
def test_each_part_selects_tests():
    output = output_of(
        start_program([sys.executable, "-c", COLLECT], PYTHONPATH=f"{ROOT}:{BENCHMARKS}")
    )
    counted = [line.split()[1:] for line in output.splitlines() if line.startswith("# ")]
    assert {name for name, _ in counted} > {"one-rank", "four-ranks", "deaths"}, output
    counts = [int(count) for name, count in counted if name == "four-ranks"]
    assert counts[0] > 50, counted  # on a GPU


@pytest.mark.weekly
@pytest.mark.launcher
@device_double.needed
def test_parts_of_each_kind_on_the_stand_ins(tmp_path):
    """The other ones are tests of tests/device, which run there."""
    parts = {
        "build": "passed",
        "two-ranks": "passed",
        "buckets": "passed",
        "graphs": "skipped",
        "resnet50": "passed",
    }
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--device", "stand-in"]
    command += ["--output", str(tmp_path), "--patience", "5", "--seconds", "3000"]
    process = start_program([*command, "--parts", *parts])
    output = output_of(process, jobs=len(parts))
    results = [json.loads(x) for x in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {result["part"]: result["verdict"] for result in results} == parts, output
    assert process.returncode == 0
