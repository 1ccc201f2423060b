# SPDX-License-Identifier: Apache-2.0
"""macOS and Windows: a world of one rank without the native module, and words for more ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import one_rank_calls
import pytest
import torch
from other_system import Server
from scripts import ROOT
from slow import slow

SYSTEMS = {"darwin": "macOS", "win32": "Windows"}


@pytest.mark.parametrize("system", ["win32", slow("darwin")])
def test_the_program_of_the_readme(tmp_path: Path, server: Server, system: str) -> None:
    program = ROOT / "examples" / "minimal" / "train.py"
    code, output = server.run(system, program, folder=tmp_path)
    assert code == 0, output
    assert output.count("loss") == 3, output
    weights = torch.load(tmp_path / "model.pt")
    torch.testing.assert_close(weights["weight"], torch.ones(1, 16), atol=0.05, rtol=0)


def same(one: Any, other: Any) -> bool:
    """Return whether two results are equal in type, dtype, layout and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        kinds = [(t.dtype, t.shape, t.stride(), t.requires_grad) for t in (one, other)]
        parts = (
            torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (one, other)
        )
        is_equal = torch.equal(
            *(t.detach().double().nan_to_num(math.pi) if t.is_floating_point() else t
              for t in parts)
        )  # fmt: skip
        return kinds[0] == kinds[1] and is_equal
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("system", ["darwin", slow("win32")])
def test_all_calls_do_the_same(tmp_path: Path, server: Server, system: str) -> None:
    results = []
    for each in ("linux", system):
        path = tmp_path / f"{each}.pt"
        code, output = server.run(each, one_rank_calls.__file__, path, folder=tmp_path)
        assert code == 0, output
        results.append(torch.load(path, weights_only=False))
    native, there = results
    assert native.keys() == there.keys() == one_rank_calls.CALLS.keys()
    wrong = [name for name, each in native.items() if str(each).endswith("Error")]
    assert wrong == [], "these calls themselves are wrong"
    differing = {name: (native[name], there[name]) for name in native}
    differing = {name: pair for name, pair in differing.items() if not same(*pair)}
    assert differing == {}


def test_every_public_name_has_a_call() -> None:
    answered = one_rank_calls.CALLS.keys() | one_rank_calls.WITHOUT_CALL
    assert one_rank_calls.public_names() - answered == set()


REFUSALS = """
import os
import torch
import torch.distributed as dist
import torch_ring as hvd
from torch_ring.run import command, run

def group(size):
    dist.init_process_group("ring", rank=0, world_size=size, store=dist.HashStore())

def launched():
    os.environ.update(RANK="1", WORLD_SIZE="2")
    try:
        hvd.init()
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]

for each in (lambda: hvd.init(rank=0, size=2), launched, lambda: run(max, (3, 4), np=2),
             lambda: group(2), lambda: run(max, (3, 4), np=1, output_filename="o"),
             lambda: run(max, (3, 4), np=1, executable="other")):
    try:
        each()
    except ValueError as error:
        print(error, flush=True)
    assert not hvd.is_initialized()
for arguments in (["-np", "2"], ["-H", "localhost:2"], ["-H", "192.0.2.1:1"],
                  ["-np", "1", "--grace-period", "5"], ["-np", "1", "--requeue"]):
    print(command.main([*arguments, "python", "-V"]), flush=True)
print(command.main(["-np", "1", "echo", "started"]), run(max, (3, 4), np=1), flush=True)
group(1)
ones = torch.ones(2)
dist.all_reduce(ones)
hvd.init()
print(ones.tolist(), hvd.size())
"""


@pytest.mark.parametrize("system", ["darwin", slow("win32")])
def test_several_ranks_are_refused_and_one_is_started(
    tmp_path: Path, server: Server, system: str
) -> None:
    code, output = server.run(system, "-c", REFUSALS, folder=tmp_path)
    assert code == 0, output
    needs = (
        f"needs Linux, and this is {SYSTEMS[system]}, where a process trains alone "
        "(docs/install.md)"
    )
    rest = f"a job of 2 ranks {needs}"
    sources = ("init(rank=, size=)", "RANK and WORLD_SIZE", "run()", 'init_process_group("ring")')
    expected = [f"{source}: {rest}" for source in sources]
    expected += [f"--output-filename {needs}", f"executable='other': {needs}"]
    refused = [f"the launcher: {rest}"] * 2 + [f"a rank on another host, 192.0.2.1, {needs}"]
    refused += [f"--grace-period {needs}", f"--requeue {needs}"]
    expected += [line for why in refused for line in (f"torch_ring.run: {why}", "2")]
    assert output.splitlines() == [*expected, "started", "0 [4]", "[1.0, 1.0] 1"]


LAUNCHES = """
import json, operator, os, sys
from torch_ring.run import command, run

def launch(*arguments):
    return command.main(["-np", "1", *arguments])

names = "FOO HOROVOD_TIMELINE HOROVOD_LOG_LEVEL TORCH_RING_LOG_LEVEL RANK LOCAL_RANK MASTER_ADDR"
show = f"import json, os; print(*map(os.getenv, {names.split()}), file=open('shown', 'w'))"
os.environ["TORCH_RING_LOG_LEVEL"] = "error"
options = ["--env", "FOO=x", "--timeline-filename", "t.json", "--log-level", "INFO", "--gloo"]
found = [launch(*options, sys.executable, "-c", show), open("shown").read()]
found += [launch(sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")]
found += [launch("no-such-program"), launch("./shown"), launch("--env", "UNSET", "true")]
found += [launch("--min-np", "2", "true")]
found += [run(os.getenv, ("FOO",), env={"FOO": "y"}), os.getenv("FOO"), run(sys.exit)]
found += [run(os.getenv, ("LOCAL_RANK",)), os.getenv("LOCAL_RANK")]
try:
    run(operator.truediv, (1, 0))
except RuntimeError as error:
    found += [str(error).splitlines()[0], repr(error.__cause__)]
print(json.dumps(found))
"""


@pytest.mark.parametrize("system", [slow("linux"), "darwin", slow("win32")])
def test_the_launcher_does_the_same(tmp_path: Path, server: Server, system: str) -> None:
    code, output = server.run(system, "-c", LAUNCHES, folder=tmp_path)
    assert code == 0, output
    *lines, found = output.splitlines()
    assert json.loads(found) == [
        *(0, "x t.json INFO None 0 0 127.0.0.1\n", 128 + 9, 127, 126, 2, 2),
        *(["y"], None, [None], ["0"], None),
        *("rank 0 on localhost failed with exit code 1", "ZeroDivisionError('division by zero')"),
    ]
    said = "torch_ring.run: rank 0 on localhost cannot start 'no-such-program'"
    assert [line.startswith(said) for line in lines].count(True) == 1, output
    assert any(line.startswith("torch_ring.run: --gloo changes nothing") for line in lines), output


# The command sends the launcher a signal, and ends by itself, or by the signal that is passed on.
SIGNALS = """
import sys
from torch_ring.run import command

program = "import os, signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); "
for number, seconds in ((15, 60), (2, 1)):
    more = f"os.kill(os.getppid(), {number}); time.sleep({seconds}); sys.exit(5)"
    print(command.main(["-np", "1", sys.executable, "-c", program + more]), flush=True)
"""


@pytest.mark.slow
def test_the_launcher_outlives_its_command(tmp_path: Path, server: Server) -> None:
    assert server.run("darwin", "-c", SIGNALS, folder=tmp_path) == (0, "7\n5\n")


NEEDS = """
import runpy
import torch_ring as hvd
hvd.init()
hvd.start_timeline("x.json")
print("on", flush=True)
runpy.run_module("torch_ring", run_name="__main__")
"""


def test_a_timeline_and_the_self_test_say_what_they_need(tmp_path: Path, server: Server) -> None:
    code, output = server.run("darwin", "-c", NEEDS, folder=tmp_path)
    needs = "needs Linux, and this is macOS"
    assert f"[torch_ring] no timeline is written: it {needs}" in output
    assert f"on\npython -m torch_ring: the self-test {needs}" in output
    assert code == 1
    assert list(tmp_path.iterdir()) == []
