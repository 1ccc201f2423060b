# SPDX-License-Identifier: Apache-2.0
"""Lightning, Accelerate, the Trainer, DeepSpeed, Ray Train, Spark, torchdata, torchft."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from scripts import ROOT

EXAMPLES = ROOT / "examples" / "integrations"
DEADLINE_S = 900  # a hang, not a slow machine: Ray starts a dozen processes
LEAVING_S = 30
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# The packages that each example needs, and its launcher: four start their own workers. Those whose
# start takes a minute are for `make test-weekly`.
PROGRAMS = {
    "lightning_ddp.py": (("lightning",), ()),
    "accelerate_train.py": (("accelerate",), TORCHRUN),
    "trainer.py": (("accelerate", "transformers"), TORCHRUN),
    "stateful_loader.py": (("torchdata",), TORCHRUN),
}
WEEKLY = {
    "torchft_train.py": (("torchft", "opentelemetry"), ()),
    "deepspeed_zero1.py": (("deepspeed",), TORCHRUN),
    "spark_train.py": (("pyspark",), ()),
    "ray_train.py": (("ray", "pandas", "pyarrow", "pydantic", "tensorboardX"), ()),
}
LINE = re.compile(r"rank (\d) of 2 on (\w+): loss (\S+) to (\S+), weights (\w{16})")


def processes_of(folder: str) -> Iterator[int]:
    """Yield the processes whose environment names a folder: a program's descendants."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # it has ended, or belongs to another user
            continue
        if folder.encode() in environment:
            yield int(entry.name)


def is_rays_cleaner(process: int) -> bool:
    """Return whether this is Ray Train's detached actor, which may outlive its job, or is gone."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return True
    return command.startswith(b"ray::PlacementGroupCleaner")


def run_to_the_end(*command: str, **variables: str) -> str:
    """Return a program's output; fail, and kill its processes, if it is late or leaves any."""
    # Not tmp_path: the names of Ray's sockets allow only a short folder.
    with tempfile.TemporaryDirectory(prefix="ring") as folder:
        environment = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": folder,
            "RAY_TMPDIR": folder,
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "200",
            # By default Ray kills a process that is not there after 60 s, and starts another one:
            # on a busy machine the import of torch may take longer.
            "RAY_worker_register_timeout_seconds": "300",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # ends workers when others use the memory
            "HF_HUB_OFFLINE": "1",
            "TORCH_EXTENSIONS_DIR": folder,  # no lock of a run that was killed
        }
        output = Path(folder) / "output"
        try:
            with output.open("w") as file:
                ended = subprocess.run(
                    [sys.executable, *command],
                    cwd=folder,
                    env=os.environ | environment | variables,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=DEADLINE_S,
                    check=False,
                )
            text = output.read_text()
            assert ended.returncode == 0, text
            deadline = time.monotonic() + LEAVING_S
            while left := [each for each in processes_of(folder) if not is_rays_cleaner(each)]:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            assert not left, text
        finally:
            for process in processes_of(folder):
                os.kill(process, signal.SIGKILL)
    return text


def test_every_example_is_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == PROGRAMS.keys() | WEEKLY.keys()


def skip_without(packages: Sequence[str]) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install '.[integrations]'")
    if "pyspark" in packages and shutil.which("java") is None:
        pytest.skip("Java is not installed (Debian: default-jre-headless)")


@pytest.mark.slow
@pytest.mark.launcher
@pytest.mark.parametrize(
    "name", [*PROGRAMS, *(pytest.param(each, marks=pytest.mark.weekly) for each in WEEKLY)]
)
def test_two_ranks_train_on_ring(name: str) -> None:
    packages, launcher = {**PROGRAMS, **WEEKLY}[name]
    skip_without(packages)
    output = run_to_the_end(*launcher, str(EXAMPLES / name))
    found = sorted(set(LINE.findall(output)))  # a set: Ray prints lines of workers more than once
    assert [line[:2] for line in found] == [("0", "ring"), ("1", "ring")], output
    for _, _, first, last, _ in found:
        assert 0 < float(last) < float(first) / 4, output
    assert found[0][4] == found[1][4], output


@pytest.mark.weekly
@pytest.mark.launcher
def test_accelerates_own_script() -> None:
    """It compares training to that of one process."""
    skip_without(["accelerate"])
    on_cpus = {"TORCH_RING_AS_GLOO": "1", "ACCELERATE_USE_CPU": "1"}
    script = "accelerate.test_utils.scripts.test_script"
    output = run_to_the_end(*TORCHRUN, "--module", script, **on_cpus)
    assert "torch.distributed uses torch_ring where a program asks for gloo" in output
