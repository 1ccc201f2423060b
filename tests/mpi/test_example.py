# SPDX-License-Identifier: Apache-2.0
"""An example under mpirun, which gives it no environment but MPI's."""

import os

import pytest
from mpi4py import MPI
from scripts import ROOT, run_script

SCRIPT = ROOT / "examples" / "function_approximation" / "train.py"


@pytest.mark.mpi(min_size=2)
def test_fits_a_function_and_goes_on(tmp_path, monkeypatch):
    folder = MPI.COMM_WORLD.bcast(str(tmp_path))
    monkeypatch.chdir(os.getcwd())  # the script is run in another folder
    first = MPI.COMM_WORLD.allgather(run_script(str(SCRIPT), ["--smoke"], folder))
    assert [run.code for run in first] == [None] * MPI.COMM_WORLD.size
    assert "loss" in first[0].output
    assert {run.output for run in first[1:]} == {""}
    resumed = MPI.COMM_WORLD.allgather(run_script(str(SCRIPT), ["--smoke", "--resume"], folder))
    assert [run.code for run in resumed] == [None] * MPI.COMM_WORLD.size
