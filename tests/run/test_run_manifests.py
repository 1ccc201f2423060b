"""The manifests of examples/elastic: their command lines are valid for the launchers."""

from __future__ import annotations

import subprocess

import pytest
from scripts import ROOT

from torch_ring.config import Config
from torch_ring.run.growth import standby_command
from torch_ring.run.options import GrowthSettings, parse_options

FOLDER = ROOT / "examples" / "elastic"


def test_the_command_of_the_kubernetes_job():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    program, *arguments = launcher["command"]
    assert program == "torch_ring_run"
    options = parse_options(arguments, {}, program)
    script = "/etc/mpi/discover_hosts.sh"
    assert options.growth == GrowthSettings(2, 8, script, 1, None, (10.0, 300.0), 1)
    assert standby_command(options.command)[-1] == "train.py"
    assert options.growth.least <= replicas["Worker"]["replicas"] <= options.growth.most


def test_the_slurm_script(tmp_path):
    """With a stand-in for srun, which prints its arguments."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$@"\nenv | grep ^TORCH_RING_\n')
    srun.chmod(0o755)
    script = FOLDER / "slurm.sbatch"
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
