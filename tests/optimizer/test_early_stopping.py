# SPDX-License-Identifier: Apache-2.0
"""any_rank(), by which ranks stop together."""

from __future__ import annotations

import torch
from pool import run
from worlds import on_both_transports

import torch_ring as hvd


def ask() -> list[bool]:
    one, size = hvd.rank() == 1, hvd.size()
    found = [
        hvd.any_rank(False),
        hvd.any_rank(one),
        hvd.any_rank(torch.tensor([one])),
        hvd.any_rank(hvd.rank() < size),
        not hvd.any_rank(not one),
    ]
    pair = hvd.add_process_set([0, size - 1])
    if pair.included():
        found += [hvd.any_rank(hvd.rank() == size - 1, pair), hvd.any_rank(False, pair)]
    else:
        found += [True, False]
    hvd.remove_process_set(pair)
    if hvd.rank() == 1:  # it no longer votes
        hvd.join()
    else:
        found += [hvd.any_rank(False), hvd.any_rank(hvd.rank() == 0)]
        hvd.join()
    return found


@on_both_transports
def test_any_rank(transport):
    expected = [False, True, True, True, False, True, False]
    first, second, third = run(ask, 3, transport=transport)
    assert first == third == [*expected, False, True]
    assert second == expected
