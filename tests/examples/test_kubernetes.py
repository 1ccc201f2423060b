# SPDX-License-Identifier: Apache-2.0
"""Manifests of Kubernetes, and a script for Slurm: their command lines and settings are valid."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from scripts import ROOT
from torch.distributed.run import parse_args as torchrun_options

from torch_ring.config import SETTINGS, Config
from torch_ring.run.growth import standby_command
from torch_ring.run.options import parse_options

yaml = pytest.importorskip("yaml")

FOLDER = ROOT / "examples" / "kubernetes"
FILES = [*sorted(FOLDER.glob("*.yaml")), ROOT / "examples" / "elastic" / "kubernetes.yaml"]


def objects_of(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pods_of(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the specs of pods in a manifest."""
    for value in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(value, dict) and "containers" in value:
            yield value
        elif isinstance(value, (dict, list)):
            yield from pods_of(value)


def manifest(file: str, kind: str) -> dict[str, Any]:
    (found,) = (each for each in objects_of(FOLDER / file) if each["kind"] == kind)
    return found


RUNTIME_POD = next(pods_of(manifest("trainjob.yaml", "TrainingRuntime")))
TRAINER = manifest("trainjob.yaml", "TrainJob")["spec"]["trainer"]
JOBSET_POD = next(pods_of(manifest("jobset.yaml", "JobSet")))
LAUNCHER, WORKER = pods_of(manifest("mpijob.yaml", "MPIJob"))
PODS = [RUNTIME_POD, JOBSET_POD, LAUNCHER, WORKER]


def test_the_secret_and_the_volume_are_those_that_the_page_makes() -> None:
    page = (FOLDER / "README.md").read_text()
    (name, key) = re.findall(r"create secret generic (\S+) --from-file=(\w+)=", page)[0]
    for pod in (RUNTIME_POD, JOBSET_POD):
        (variable,) = pod["containers"][0]["env"]
        assert variable["name"] == "TORCH_RING_SECRET"
        assert variable["valueFrom"]["secretKeyRef"] == {"name": name, "key": key}
    (claim,) = objects_of(FOLDER / "checkpoints.yaml")
    for pod in PODS:
        claims = [
            each["persistentVolumeClaim"] for each in pod["volumes"] if "emptyDir" not in each
        ]
        assert claims == [{"claimName": claim["metadata"]["name"]}]
    for file in re.findall(r"kubectl \w+ -f (\S+)", page):
        assert (FOLDER / file).exists()


def test_every_setting_exists() -> None:
    names = {setting.variable for setting in SETTINGS}
    used = {*re.findall(r"\bTORCH_RING_\w+", "".join(path.read_text() for path in FILES))}
    assert {"TORCH_RING_SECRET"} <= used <= names


# --- the command lines


def command_line(command: list[str], folder: Path, **variables: str) -> list[str]:
    """Return the program call of a pod's command, with the image's files and volume in `folder`."""
    for program in ("torchrun", "torch_ring_run"):
        stand_in = folder / program
        stand_in.write_text('#!/bin/sh\npwd\nbasename $0\nprintf "%s\\n" "$@"\n')
        stand_in.chmod(0o755)
    (folder / "examples").symlink_to(ROOT / "examples")
    program, option, script = command
    script = script.replace("/workspace", str(folder)).replace("/checkpoints", str(folder))
    ended = subprocess.run(
        [program, option, script],
        cwd=folder,
        env={"PATH": f"{folder}:/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stderr == ""
    return ended.stdout.splitlines()


def require_mnist(script: str, arguments: list[str], folder: Path, resumes: bool) -> None:
    """Check the program in the example's folder and its options."""
    example = ROOT / "examples" / "mnist"
    assert (example / script).exists()
    sys.path.insert(0, str(example))
    try:
        with mock.patch("sys.argv", [script, *arguments]):
            import options  # type: ignore[import-not-found]

            parsed = options.parse_args()
    finally:
        sys.path.remove(str(example))
        sys.modules.pop("options", None)
    assert parsed.dataset == "digits"  # nothing is downloaded
    assert parsed.checkpoint == folder / "mnist.pt"
    assert parsed.resume is resumes


RESUMES = pytest.mark.parametrize("resumes", [False, True], ids=["first", "resumed"])


@RESUMES
@pytest.mark.parametrize("file", ["trainjob.yaml", "jobset.yaml"])
def test_torchrun_starts_the_ranks(file, resumes, tmp_path, monkeypatch) -> None:
    if resumes:
        (tmp_path / "mnist.pt").touch()
    if file == "trainjob.yaml":
        assert (TRAINER["numNodes"], TRAINER["numProcPerNode"]) == (2, 2)
        place, *line = command_line(TRAINER["command"], tmp_path)
        # Trainer's: see EnforceMLPolicy of its plugin for torch.
        monkeypatch.setenv("PET_NNODES", "2")
        monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
        monkeypatch.setenv("PET_NODE_RANK", "1")
        monkeypatch.setenv("PET_MASTER_ADDR", "mnist-node-0-0.mnist")
        monkeypatch.setenv("PET_MASTER_PORT", "29500")
    else:
        jobset = manifest(file, "JobSet")
        (job,) = jobset["spec"]["replicatedJobs"]
        pods = job["template"]["spec"]
        counts = (pods["completions"], pods["parallelism"], pods["completionMode"])
        assert counts == (2, 2, "Indexed")
        assert (jobset["metadata"]["name"], job["name"], job["replicas"]) == ("mnist", "node", 1)
        command = JOBSET_POD["containers"][0]["command"]
        _, *line = command_line(command, tmp_path, JOB_COMPLETION_INDEX="1")
        place = JOBSET_POD["containers"][0]["workingDir"].replace("/workspace", str(tmp_path))
    assert line[0] == "torchrun"
    options = torchrun_options(line[1:])
    assert (options.nnodes, options.nproc_per_node, int(options.node_rank)) == ("2", "2", 1)
    assert (options.master_addr, int(options.master_port)) == ("mnist-node-0-0.mnist", 29500)
    assert place == str(tmp_path / "examples" / "mnist")
    require_mnist(options.training_script, options.training_script_args, tmp_path, resumes)


@RESUMES
def test_our_launcher_starts_the_ranks(resumes, tmp_path) -> None:
    if resumes:
        (tmp_path / "mnist.pt").touch()
    (launcher,) = LAUNCHER["containers"]
    _, *line = command_line(launcher["command"], tmp_path)
    assert line[0] == "torch_ring_run"
    options = parse_options(line[1:], line[0])
    python, script, *arguments = options.command
    assert python == "python"
    assert launcher["workingDir"] == "/workspace/examples/mnist"
    require_mnist(script, arguments, tmp_path, resumes)
    # The operator writes a hostfile, which the launcher finds.
    assert (options.hosts, options.hostfile, options.num_proc) == (None, None, None)


ELASTIC = ROOT / "examples" / "elastic"


def test_the_command_of_the_kubernetes_job():
    job = yaml.safe_load((ELASTIC / "kubernetes.yaml").read_text())
    (launcher,) = pods_of(job["spec"]["mpiReplicaSpecs"]["Launcher"])
    program, *arguments = launcher["containers"][0]["command"]
    assert program == "torch_ring_run"
    options = parse_options(arguments, program)
    assert options.host_discovery_script == "/etc/mpi/discover_hosts.sh"
    assert (options.min_num_proc, options.max_num_proc, options.slots) == (2, 8, 1)
    assert (options.reset_limit, options.cooldown_range, options.standby) == (None, (10, 300), 1)
    assert standby_command(options.command)[-1] == "train.py"


def test_the_slurm_script(tmp_path):
    """With a stand-in for srun, which prints its arguments."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$@"\nenv | grep ^TORCH_RING_\n')
    srun.chmod(0o755)
    script = ELASTIC / "slurm.sbatch"
    ended = subprocess.run(
        ["bash", str(script)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    command, *variables = ended.stdout.splitlines()
    assert command == "--kill-on-bad-exit=0 --no-kill --wait=0 python train.py"
    config = Config.from_environment(dict(line.split("=", 1) for line in variables))
    assert (len(config.secret), config.min_ranks) == (64, 2)
    assert "#SBATCH --no-kill\n" in script.read_text()
