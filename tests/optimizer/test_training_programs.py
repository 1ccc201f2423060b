"""Random training programs: every rank gets the results of one process on the whole batch.

`--full` runs thousands of them, TRAINING_PROGRAM=17 the one with that seed, and shows it if it
fails.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pool
import pytest
import torch
from program_runs import told
from slow import slow
from training_programs import Player, make_program

import torch_ring as hvd

PROGRAMS, ALL_PROGRAMS = 20, 4000
ALONE = os.environ.get("TRAINING_PROGRAM")
A_PROGRAM_S = 2.0  # average on a slow machine


def check(seed: int) -> None:
    """Play a program on this rank, and compare its observations with those of one process."""
    program = make_program(seed, hvd.size())
    wanted = dict(Player(program, None).play())
    for where, seen in Player(program, hvd.rank()).play():
        for index, (found, right) in enumerate(zip(seen, wanted[where], strict=True)):
            assert (found is None) == (right is None), (where, index, found, right)
            if found is not None:
                torch.testing.assert_close(
                    found,
                    right,
                    rtol=1e-10,
                    atol=1e-10,
                    msg=lambda text, w=where, i=index: f"{w}, tensor {i}: {text}",
                )


def check_all(seeds: Sequence[int], reports: str) -> None:
    for seed in seeds:
        with told(str(make_program(seed, hvd.size())), Path(reports)):
            check(seed)


def run_all(seeds: Sequence[int], size: int, transport: str, reports: Path) -> None:
    """Check programs; a failure shows each rank's program, even after a hang."""
    deadline_s = pool.DEADLINE_S + A_PROGRAM_S * len(seeds)
    args = (seeds, str(reports))
    try:
        pool.run(check_all, size, args=args, transport=transport, deadline_s=deadline_s)
    except pool.RanksFailed as failure:
        texts = [f"--- {path.name} was at ---\n{path.read_text()}" for path in reports.iterdir()]
        raise pool.RanksFailed("\n".join([str(failure), *texts])) from None


@pytest.mark.parametrize(
    ("transport", "size", "part"),
    [slow("shm", 2, 0), ("tcp", 3, 1)],
)
def test_weights_and_gradients(transport, size, part, full, tmp_path):
    count = ALL_PROGRAMS if full else 2 * PROGRAMS
    seeds = [int(ALONE)] if ALONE else range(part, count, 2)
    run_all(seeds, size, transport, tmp_path)
