# SPDX-License-Identifier: Apache-2.0
"""Ranks that are cut off end when the others go on without them.

tests/elastic/test_kills.py has a rank that is stopped for a time.
"""

from __future__ import annotations

import pool
import pytest
from host_fixtures import hosts_or_skip
from namespaces import Host

import torch_ring as hvd

HEARTBEAT = {"TORCH_RING_HEARTBEAT_TIMEOUT": "2"}


def end_of(train: object, state: hvd.elastic.ObjectState) -> str:
    kind, text = pool.error_of(lambda: train(state))  # type: ignore[operator]
    return f"{hvd.rank()} of {hvd.size()}" if kind == "nothing" else f"{kind}: {text}"


def cut_off(host: Host) -> tuple[str, int]:
    """Cut a host off in step 3; return this rank's end, and the steps that it has taken."""
    name, size, state = hvd.rank(), hvd.size(), hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        for state.step in range(state.step, 6):
            if (name, hvd.size(), state.step) == (0, size, 3):
                host.cut_off()
            hvd.barrier()

    return end_of(train, state), state.step


@pytest.mark.slow
@pytest.mark.netns
def test_the_side_with_most_ranks_goes_on_and_the_other_ends() -> None:
    """Without rank 0. tests/elastic/test_regroup.py has two halves."""
    with hosts_or_skip(2) as (first, second):
        alone, *others = pool.run(
            cut_off,
            3,
            args=(second,),
            transport="",
            env={"MASTER_ADDR": first.address, **HEARTBEAT},
            namespaces=[first.namespace, second.namespace, second.namespace],
        )
    assert others == [("0 of 2", 5), ("1 of 2", 5)]
    end, step = alone
    assert end.startswith("LeftOutError: ")
    assert "may live, and continue: these ranks end" in end
    assert step in (3, 4)  # the last messages of the others may have come before the cut
