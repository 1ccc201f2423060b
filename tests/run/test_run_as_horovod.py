"""Programs that import horovod, as ranks of the launcher."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launched_jobs import run_job
from rank_functions import horovods_version

from torch_ring.run import run

SAY = "import horovod; print(horovod.__version__)"
pytestmark = pytest.mark.launcher


def test_ranks_find_torch_ring():
    program = (
        "import horovod.torch as hvd; import torch; hvd.init(); "
        "print(hvd.rank(), int(hvd.allreduce(torch.ones(1), op=hvd.Sum)))"
    )
    code, out, err = run_job(
        *("-np", "2", sys.executable, "-c", program), TORCH_RING_AS_HOROVOD="1"
    )
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[0]<stdout>:0 2", "[1]<stdout>:1 2"]


def test_the_setting_as_an_option_and_a_shell_between():
    options = ("-np", "1", "--env", "TORCH_RING_AS_HOROVOD=1")
    code, out, err = run_job(*options, "sh", "-c", f'{sys.executable} -c "{SAY}"')
    assert (code, out) == (0, "[0]<stdout>:0.28.1\n"), err


def test_functions_find_torch_ring():
    assert run(horovods_version, np=1, env={"TORCH_RING_AS_HOROVOD": "1"}) == ["0.28.1"]


def test_horovod_is_not_hidden(tmp_path: Path, monkeypatch):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text('__version__ = "its own"\n')
    monkeypatch.syspath_prepend(tmp_path)
    command = ("-np", "1", sys.executable, "-c", SAY)
    path = {"PYTHONPATH": str(tmp_path)}
    code, out, err = run_job(*command, TORCH_RING_AS_HOROVOD="1", **path)
    assert (code, out) == (2, "")
    assert f"Horovod is installed ({tmp_path}" in err
    assert run_job(*command, **path)[:2] == (0, "[0]<stdout>:its own\n")
    assert run_job(*command, TORCH_RING_AS_HOROVOD="force", **path)[1] == "[0]<stdout>:0.28.1\n"
