# SPDX-License-Identifier: Apache-2.0
"""Random collectives by both APIs, in several groups and lives of one store.

All ranks draw the same program from its seed: lives of a store, overlapping groups, operations.
Each rank draws its own polls and waits. `--full` runs many programs, RANDOM_COLLECTIVES=17 the one
with that seed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from group_operations import GROUPS_OPERATIONS, SETS_OPERATIONS, Draw, Group, Pending

import torch_ring as hvd
from tests.support.groups import IS_TORCH_2_14, TIMEOUT_S, default_group
from tests.support.pool import RanksFailed, run
from tests.support.slow import slow

PROGRAMS, ALL_PROGRAMS = 3, 300
ALONE = os.environ.get("RANDOM_COLLECTIVES")
OPERATIONS = 25  # of a life


class Program:
    """One rank's run of a program."""

    def __init__(self, seed: int, rank: int, size: int) -> None:
        self.common, self.own = random.Random(seed), random.Random(f"{seed} {rank}")
        self.rank, self.size = rank, size
        self.at = "the beginning"
        self.number = 0
        self.groups: list[Group] = []
        self.sets: list[Group] = []

    def run(self) -> None:
        for life in range(self.common.randint(1, 3)):
            self.at = f"life {life}"
            with default_group():
                self.live(life)

    def live(self, life: int) -> None:
        has_horovod = self.common.random() < 0.6
        world = list(range(self.size))
        self.groups = [Group(world, dist.group.WORLD, self.rank)]
        self.sets = []
        for _ in range(self.common.randint(0, 3)):
            self.make_group()
        if has_horovod:
            hvd.init()
            self.sets = [Group(world, hvd.global_process_set, self.rank)]
            if self.size > 2:
                self.make_set()
        for step in range(OPERATIONS):
            self.at = f"life {life}, step {step}"
            self.step()
            self.ask()
        for group in (*self.groups, *self.sets):
            self.drain(group)
        if has_horovod:
            hvd.shutdown()

    # --- groups

    def subset(self) -> list[int]:
        return sorted(self.common.sample(range(self.size), self.common.randint(1, self.size)))

    def make_group(self) -> None:
        ranks, options = self.subset(), {}
        if IS_TORCH_2_14 and self.common.random() < 0.3:
            self.common.shuffle(ranks)
            options["sort_ranks"] = False
        handle = dist.new_group(ranks, timeout=timedelta(seconds=TIMEOUT_S), **options)
        mine = ranks.index(self.rank) if self.rank in ranks else -1
        self.groups.append(Group(ranks, handle, mine))

    def make_set(self) -> None:
        ranks = self.subset()[: self.size - 1]
        process_set = hvd.add_process_set(ranks)
        mine = ranks.index(self.rank) if self.rank in ranks else -1
        self.sets.append(Group(ranks, process_set, mine))

    def step(self) -> None:
        if len(self.groups) > 1 and self.common.random() < 0.08:
            group = self.groups.pop(self.common.randrange(1, len(self.groups)))
            self.drain(group)
            if group.rank >= 0:
                dist.destroy_process_group(group.handle)
        elif self.common.random() < 0.08:
            self.make_group()
        elif self.sets and self.common.random() < 0.35:
            self.operate(self.common.choice(self.sets), self.common.choice(SETS_OPERATIONS))
        else:
            self.operate(self.common.choice(self.groups), self.common.choice(GROUPS_OPERATIONS))

    def operate(self, group: Group, begin: Callable[[Draw, Group], list[Pending]]) -> None:
        self.number += 1
        draw = Draw(self.common.getrandbits(32), self.number, self.own)
        if group.rank < 0:
            return
        self.at += f": {begin.__name__} in {group.ranks}"
        for pending in begin(draw, group):
            if draw.is_async:
                group.pending.append(pending)
            else:
                pending.wait()
                pending.check()

    # --- waiting

    def ask(self) -> None:
        """Poll for, or wait for, some operations; each rank chooses by itself."""
        for group in (*self.groups, *self.sets):
            while group.pending and self.own.random() < 0.4:
                pending = self.own.choice(group.pending)
                if self.own.random() < 0.5:
                    if pending.done():
                        self.end(group, pending)
                else:
                    self.end(group, pending)

    def drain(self, group: Group) -> None:
        while group.pending:
            self.end(group, self.own.choice(group.pending))

    def end(self, group: Group, pending: Pending) -> None:
        group.pending.remove(pending)
        pending.wait()
        try:
            pending.check()
        except AssertionError as error:
            raise AssertionError(f"{pending.what} in {group.ranks}: {error}") from error


def run_program(seed: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    program = Program(seed, rank, size)
    try:
        program.run()
    except Exception as error:
        raise AssertionError(f"{program.at}: {error}") from error


@pytest.mark.parametrize(
    ("transport", "size"), [("shm", 2), ("tcp", 3), slow("shm", 4), slow("tcp", 2)]
)
def test_random_collectives(transport: str, size: int, full: bool) -> None:
    first = 1000 * size + (500 if transport == "tcp" else 0)
    seeds = range(first, first + (ALL_PROGRAMS if full else PROGRAMS))
    for seed in [int(ALONE)] if ALONE else seeds:
        try:
            run(
                run_program,
                size,
                args=(seed,),
                transport=transport,
                initialized=False,
                kind="c10d and hvd",
            )
        except RanksFailed as failure:
            raise RanksFailed(
                f"RANDOM_COLLECTIVES={seed} with {size} ranks over {transport}: {failure}"
            ) from None
