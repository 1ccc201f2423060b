# SPDX-License-Identifier: Apache-2.0
"""docs/launching.md: its command lines and its program run as printed."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from launcher_commands import mpirun_command, output_of, start_program
from scripts import ROOT
from slow import slow_after

PAGE = (ROOT / "docs" / "launching.md").read_text()
HELLO = Path(__file__).parent / "hello.py"
COMMANDS = list(dict.fromkeys(re.findall(r"^\|[^|]*\| `([^`]*train\.py)`", PAGE, re.MULTILINE)))
ON_ONE_HOST = [command for command in COMMANDS if "host0" not in command and "srun" not in command]
pytestmark = pytest.mark.launcher


def run_command(command: list[str], folder: Path) -> str:
    """Return a command's output in a folder, with the commands of this Python in the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = ["env", "-C", str(folder), *command]
    return output_of(start_program(command, PATH=path, PYTHONPATH=python_path))


def test_the_page_has_a_line_for_each_way_to_launch():
    for word in ("torch_ring.run", "torchrun", "mpirun", "mpiexec", "srun", "mp.spawn"):
        assert any(word in row for row in re.findall(r"^\|.*", PAGE, re.MULTILINE)), word
    assert len(ON_ONE_HOST) >= 5


# torchrun first: make test runs one of them.
@pytest.mark.parametrize(
    "command", slow_after(1, sorted(ON_ONE_HOST, key=lambda line: "torchrun" not in line))
)
def test_a_command_runs_as_printed(command, tmp_path):
    words = shlex.split(command)
    if words[0] == "mpirun":
        mpirun_command("Open MPI")  # skips if there is none
        if os.geteuid() == 0 and "--allow-run-as-root" not in words:
            output = run_command(words, tmp_path)
            assert "--allow-run-as-root" in output, output  # as the row below that line says
            return
    elif words[0] == "mpiexec":
        words[0] = mpirun_command("MPICH")[0]  # in the PATH, Open MPI's may come first
    shutil.copy(HELLO, tmp_path / "train.py")
    output = run_command(words, tmp_path)
    size = 1 if words == ["python", "train.py"] else 2
    for rank in range(size):
        assert f"rank {rank} of {size}: torch" in output, output


@pytest.mark.slow
def test_the_programs_run_as_printed(tmp_path):
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(programs) == 2
    outputs = []
    for program in programs:
        (tmp_path / "train.py").write_text(program)
        outputs.append(run_command(["python", "train.py"], tmp_path))
    assert outputs[0].splitlines()[-1] == "[0, 1]"
    for rank in range(2):
        assert f"rank {rank} of 2: the mean of all ranks is 0.5" in outputs[1], outputs[1]
    assert "no launcher was found" not in outputs[1]
