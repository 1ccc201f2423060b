# SPDX-License-Identifier: Apache-2.0
"""The name horovod: programs that find torch_ring under it, submodules, and Horovod beside it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_commands import DEADLINE_S, TORCHRUN, clean_environment, output_of, start_program
from scripts import ROOT

from torch_ring.config import Config
from torch_ring.config.horovod_path import alias_variables, hidden_horovod
from torch_ring.horovod.__main__ import plain_command
from torch_ring.horovod.modules import Finder

PROGRAM = str(Path(__file__).parent / "programs" / "alias.py")
ALIAS = ("-m", "torch_ring.horovod")
SAY = "import horovod; print(horovod.__version__)"
INSTALLED = "is installed ({file}), and torch_ring does not hide it"


def run_python(*arguments: str, **variables: str) -> tuple[int, str, str]:
    """Run Python with torch_ring importable; return its exit code, output and errors."""
    path = os.pathsep.join(filter(None, (variables.pop("PYTHONPATH", ""), str(ROOT))))
    done = subprocess.run(
        [sys.executable, *arguments],
        env=clean_environment(PYTHONPATH=path, **variables),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a folder in which a Horovod is installed."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text('__version__ = "its own"\n')
    return tmp_path


def test_every_name():
    code, out, err = run_python(*ALIAS, PROGRAM, "--lr", "1")
    assert (code, out) == (0, "rank 0: 1 ranks, ['--lr', '1']"), err


@pytest.mark.launcher
@pytest.mark.slow
def test_a_program_under_torchrun():
    program = (
        "import horovod.torch as hvd, sys; hvd.init(); "
        "print(f'rank {hvd.rank()} of {hvd.size()}: {sys.argv[1:]}', flush=True)"
    )
    command = [*TORCHRUN, "--nproc-per-node", "2", *ALIAS, "-c", program, "--lr", "1"]
    output = output_of(start_program(command, PYTHONPATH=str(ROOT)))
    for rank in range(2):
        assert f"rank {rank} of 2: ['--lr', '1']" in output, output


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("python -u -X dev -m torch_ring.horovod -m train", 2, "python -u -X dev -m train"),
        ("python -umtorch_ring.horovod", 0, "python -u"),
        ("python -m coverage run -m torch_ring.horovod a.py", 1, "python -m coverage run a.py"),
        ("python -m torch_ring.horovod -m torch_ring.horovod", 2, "python -m torch_ring.horovod"),
    ],
)
def test_the_command_without_the_alias(command, arguments, expected):
    words = command.split()
    assert plain_command(words, words[len(words) - arguments :]) == expected.split()


def test_a_program_is_mains(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        "import sys; print(__name__, __spec__ and __spec__.name, sys.argv[1:], sys.flags.utf8_mode)"
    )
    code, out, err = run_python("-X", "utf8", *ALIAS, str(tmp_path / "package" / "train.py"), "-x")
    assert (code, out, err) == (0, "__main__ None ['-x'] 1", "")
    code, out, err = run_python(*ALIAS, "-m", "package.train", "-y", PYTHONPATH=str(tmp_path))
    assert (code, out, err) == (0, "__main__ package.train ['-y'] 0", "")
    code, _, err = run_python(*ALIAS, "-c", "import sys; sys.exit(int(sys.argv[1]))", "7")
    assert (code, err) == (7, "")


def test_a_python_that_ignores_the_path():
    code, _, err = run_python(
        "-I",
        "-c",
        f"import sys; sys.path.append({str(ROOT)!r}); "
        "import runpy; runpy.run_module('torch_ring.horovod', run_name='__main__')",
    )
    assert code == 1
    assert (
        err == "torch_ring.horovod: python -E and -I ignore PYTHONPATH, by which horovod is found"
    )


def test_what_torch_ring_does_not_have():
    find = Finder().find_spec
    for name in ("horovod", "horovod.run", "horovod.torch.nothing", "horovodx.torch", "os"):
        assert find(name) is None, name
    for name in ("tensorflow", "keras", "mxnet", "ray", "spark"):
        spec = find(f"horovod.{name}")
        assert spec is not None  # as of a Horovod without that extension
        with pytest.raises(ImportError, match=f"of horovod.torch, and has no horovod.{name}$"):
            importlib.util.module_from_spec(spec).__loader__.exec_module(
                importlib.util.module_from_spec(spec)
            )


def test_importing_horovod_needs_no_torch():
    program = "import horovod, sys; print([m for m in sys.modules if m in ('torch', 'numpy')])"
    assert run_python(*ALIAS, "-c", program)[:2] == (0, "[]")
    program = "import sys; sys.modules['torch'] = None\nimport horovod.torch"
    code, _, err = run_python(*ALIAS, "-c", program)
    assert code == 1
    assert "ModuleNotFoundError: import of torch halted" in err, err


def test_a_notebook():
    program = f"import torch_ring.horovod as h; h.install(); h.install(); {SAY}"
    assert run_python("-c", program) == (0, "0.28.1", "")
    assert run_python("-c", SAY)[0] == 1  # nothing was written anywhere


def test_horovod_is_not_hidden(installed):
    file = installed / "horovod" / "__init__.py"
    refused = INSTALLED.format(file=file)
    both = {"PYTHONPATH": str(installed)}
    assert run_python("-c", SAY, **both) == (0, "its own", "")
    code, out, err = run_python(*ALIAS, "-c", SAY, **both)
    assert (code, out) == (1, "")
    assert err.startswith(f"torch_ring.horovod: Horovod {refused}")
    code, _, err = run_python("-c", "import torch_ring.horovod as h; h.install()", **both)
    assert code == 1
    assert f"ImportError: Horovod {refused}" in err
    # A process that has both on its path, because another Python has started it.
    inherited = alias_variables({"TORCH_RING_AS_HOROVOD": "1", **both})
    code, _, err = run_python("-c", SAY, **inherited)
    assert code == 1
    assert f"ImportError: Horovod {refused}" in err


def test_force_hides_it(installed):
    both = {"PYTHONPATH": str(installed), "TORCH_RING_AS_HOROVOD": "force"}
    assert run_python(*ALIAS, "-c", SAY, **both) == (0, "0.28.1", "")
    inherited = {**both, **alias_variables(both)}
    assert run_python("-c", SAY, **inherited) == (0, "0.28.1", "")
    code, _, err = run_python("-c", f"{SAY}; import torch_ring.horovod as h; h.install()", **both)
    assert code == 1
    assert f"horovod has been imported from {installed}" in err


def test_a_folder_of_that_name_is_no_horovod(tmp_path, monkeypatch):
    (tmp_path / "horovod").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert hidden_horovod(Config()) is None


def test_variables_of_ranks(monkeypatch):
    assert alias_variables({"PYTHONPATH": "a"}) == {}
    wanted = {"TORCH_RING_AS_HOROVOD": "1"}
    folder = alias_variables(wanted)["PYTHONPATH"]
    assert {path.name for path in Path(folder).glob("*.py")} == {"__init__.py", "horovod.py"}
    for path, expected in (("", folder), ("a", f"{folder}:a"), (f"a:{folder}:", f"{folder}:a:")):
        assert alias_variables({**wanted, "PYTHONPATH": path}) == {"PYTHONPATH": expected}


@pytest.mark.slow
def test_once_torch_has_been_imported(installed):
    """By the entry point for torch, if pip has installed torch_ring."""
    program = (
        "import os; from torch_ring.c10d.registration import autoload; autoload(); "
        "del os.environ['PYTHONPATH']; autoload(); print(os.environ.get('PYTHONPATH', '')[-7:]); "
        + SAY
    )
    wanted = {"TORCH_RING_AS_HOROVOD": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert run_python("-c", program, **wanted)[:2] == (0, "on_path\n0.28.1")
    code, out, err = run_python("-c", program, PYTHONPATH=str(installed), **wanted)
    assert (code, out) == (0, "its own"), err  # and nothing on the path
    assert INSTALLED.format(file=installed / "horovod" / "__init__.py") in err
