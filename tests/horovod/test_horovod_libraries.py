# SPDX-License-Identifier: Apache-2.0
"""open_clip and ignite, which import horovod.torch themselves, or insist on gloo."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import os
import re
import sys
import tarfile
from pathlib import Path

import pytest
from launcher_commands import output_of, start_program
from scripts import ROOT

PROGRAMS = Path(__file__).parent / "programs"
PYTHON = (sys.executable, "-m", "torch_ring.horovod")
TINY_CLIP = {
    "model_cfg": {
        "embed_dim": 16,
        "vision_cfg": {
            "image_size": 32,
            "patch_size": 16,
            "width": 32,
            "layers": 1,
            "head_width": 16,
        },
        "text_cfg": {
            "context_length": 16,
            "vocab_size": 49408,
            "width": 32,
            "heads": 2,
            "layers": 1,
        },
    },
    "preprocess_cfg": {},
}
# Of ignite's own tests of a backend: how Python is started, their files, which of them, and how
# many pass with ignite 0.5.5, daily and with --full. Tests that cannot have their backend skip.
IGNITES = {
    "horovod": (  # but for one that wants an error's text to begin with "Horovod"
        PYTHON,
        ("comp_models/test_horovod.py", "utils/test_horovod.py", "test_launcher.py"),
        "(hvd or horovod) and not create_no_dist",
        # Each starts four ranks several times.
        " and (dist_1 or model_spawn or all_reduce or all_gather or launch)",
        (5, 18),
    ),
    "gloo": (  # but for those that depend on a file of another test, or on there being no Slurm
        PYTHON[:1],
        ("comp_models/test_native.py", "utils/test_native.py"),
        "gloo and not create_dist and not FILE and not launch",
        "",
        (18, 18),
    ),
}
pytestmark = [pytest.mark.weekly, pytest.mark.launcher]


def require(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install '.[integrations]'")


def run_program(*command: str, jobs: int = 1, **variables: str) -> str:
    """Return the output of a program, which must succeed on CPUs and without the internet."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(ROOT))))
    variables = {"PYTHONPATH": path, **variables}
    environment = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **variables}
    process = start_program(list(command), **environment)
    output = output_of(process, jobs)
    assert process.returncode == 0, output
    return output


def write_shards(folder: Path, shards: int) -> str:
    """Write pictures with texts into `shards` files; return the pattern of their names."""
    from PIL import Image

    for shard in range(shards):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for index in range(16):
                picture = io.BytesIO()
                Image.new("RGB", (32, 32), (index * 16, shard * 99, 128)).save(picture, "PNG")
                text = f"picture {index} of {shard}".encode()
                for suffix, data in (("png", picture.getvalue()), ("txt", text)):
                    member = tarfile.TarInfo(f"{index:02}.{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return str(folder / f"{{0..{shards - 1}}}.tar")


@pytest.mark.parametrize("data", ["webdataset", "synthetic"])
def test_open_clip_trains(data: str, tmp_path: Path) -> None:
    require("open_clip_train", "webdataset", "pandas")
    (tmp_path / "open_clip_config.json").write_text(json.dumps(TINY_CLIP))
    options = (
        *("--horovod", "--dataset-type", data, "--train-num-samples", "32", "--batch-size", "4"),
        *("--model", f"local-dir:{tmp_path}", "--device", "cpu", "--precision", "fp32"),
        *("--local-loss", "--gather-with-grad", "--workers", "1", "--epochs", "3"),
        *("--lr", "1e-2", "--warmup", "1", "--log-every-n-steps", "1"),
        *("--logs", str(tmp_path), "--name", "clip"),
    )
    launch = (sys.executable, "-m", "torch_ring.run", "-np", "2")
    variables = {"TORCH_RING_CHECK_EVERY": "1"}  # the ranks' weights are equal after each step
    if data == "webdataset":
        program = (sys.executable, "-m", "open_clip_train.main")
        options += ("--train-data", write_shards(tmp_path, 2))
        variables["TORCH_RING_AS_HOROVOD"] = "1"
    else:
        program = (*PYTHON, str(PROGRAMS / "synthetic_clip.py"))
    output = run_program(*launch, *program, *options, **variables)
    assert "Running in horovod mode" in output, output
    assert "total 2" in output, output
    losses = [float(loss) for loss in re.findall(r" Loss: (\S+) ", output)]
    assert len(losses) == 3 * 32 // (2 * 4), output
    if data == "webdataset":
        assert losses[-1] < losses[0], losses
    else:  # ln(8): eight equal pairs, four of each rank, which allgather has brought together
        assert set(losses) == {2.0794}, losses
    assert (tmp_path / "clip" / "checkpoints" / "epoch_3.pt").exists()


def test_ignite_trains() -> None:
    require("ignite")
    output = run_program(*PYTHON, str(PROGRAMS / "ignite_training.py"), "2")
    for rank in range(2):
        assert f"rank {rank} of 2 on horovod: trained" in output, output


@pytest.mark.parametrize("backend", IGNITES)
def test_ignites_own_tests(backend: str, full: bool, tmp_path: Path) -> None:
    """The tests of one backend, from the source archive on PyPI."""
    require("ignite")
    version = importlib.metadata.version("pytorch-ignite")
    name = f"pytorch_ignite-{version}"
    archive = ROOT / "build" / "sources" / f"{name}.tar.gz"
    if not archive.exists():
        pytest.skip(f"there is no {archive}: make test-weekly puts it there")
    with tarfile.open(archive) as sources:
        parts = (f"{name}/tests/", f"{name}/pyproject.toml")  # in place of the installed ignite
        members = [each for each in sources.getmembers() if each.name.startswith(parts)]
        sources.extractall(tmp_path, members)
    launcher = tmp_path / "horovodrun"  # one of the tests starts it
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torch_ring.run "$@"\n')
    launcher.chmod(0o755)
    python, files, chosen, daily, least = IGNITES[backend]
    output = run_program(
        *(*python, "-m", "pytest", "-q", "-o", "addopts=", "-k", chosen + daily * (not full)),
        *("-c", str(tmp_path / name / "pyproject.toml")),
        *(str(tmp_path / name / "tests" / "ignite" / "distributed" / each) for each in files),
        jobs=20,
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        TORCH_RING_AS_GLOO="1",
    )
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None, output
    assert int(passed[1]) >= least[full], output
