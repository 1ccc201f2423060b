# SPDX-License-Identifier: Apache-2.0
"""Process sets that cannot be made.

Deaths of members are in test_failures.py, and in tests/elastic/test_kills.py while a set is made.
"""

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from on_ranks import on_ranks
from pool import error_of, eventually, run
from process_set_use import (
    check_process_set,
    sum_of_ranks,
)
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.world import process_set_table


@on_both_transports
@on_ranks(3)
def test_different_process_sets_are_refused(transport) -> None:
    rank, size = hvd.rank(), hvd.size()
    kept = hvd.add_process_set([0])
    for fn in (
        lambda: hvd.add_process_set([rank % 2, 2]),
        lambda: hvd.remove_process_set(kept) if rank else hvd.add_process_set([1]),
        lambda: hvd.remove_process_set(kept if rank else hvd.ProcessSet([1])),
    ):
        kind, text = error_of(fn)
        assert kind == "MismatchError", text
        assert "rank 0: " in text
        assert "; rank 1: " in text
    assert hvd._basics._get_process_set_ids_and_ranks() == {0: list(range(size)), 1: [0]}
    check_process_set(hvd.add_process_set([0, 2]), [0, 2])
    hvd.shutdown()
    for process_sets in ([[0, 1 + rank % 2]], [[0]] if rank else None):
        kind, text = error_of(lambda: hvd.init(process_sets=process_sets))  # noqa: B023
        assert (kind, "process_sets must be the same" in text) == ("MismatchError", True)
    for wrong in ("static", [[0], [0]], [[0, size]], [list(range(size))], [[]]):
        kind, _ = error_of(lambda: hvd.init(process_sets=wrong))  # noqa: B023
        assert kind == "InvalidArgumentError"
    hvd.init()


@on_both_transports
@on_ranks(4)
def test_a_member_whose_engine_cannot_be_made(transport) -> None:
    broken = 0
    everyone = [*range(hvd.size())]
    pair, late = hvd.add_process_set([0, 1]), hvd.add_process_set([0, 1, 2])
    make = process_set_table.make_engine

    def fails(*args: Any) -> Any:
        raise hvd.RingError("no memory left")

    if hvd.rank() == broken:
        process_set_table.make_engine = fails
    for _ in range(2):
        for each in (pair, late):
            if each.included():
                kind, text = error_of(lambda: sum_of_ranks(each))  # noqa: B023
                own = hvd.rank() == broken
                assert kind == ("RingError" if own else "PeerLostError"), text
                assert own or f"rank {broken} (" in text, text
                assert "no memory left" in text
        process_set_table.make_engine = make
    check_process_set(hvd.global_process_set, everyone)
    for each in (pair, late):
        hvd.remove_process_set(each)
        hvd.add_process_set(each)
        check_process_set(each, each.ranks or [])


def interrupt_once_it_waits(thread: int, came: Path, number: int) -> None:
    """Send this process a signal while a thread waits for the other ranks in an exchange."""
    while True:
        frame: Any = sys._current_frames()[thread]
        while frame is not None:
            if frame.f_code.co_name == "_result":
                signal.pthread_kill(thread, number)
                return came.touch()
            frame = frame.f_back
        time.sleep(0.001)


def interrupt_a_rank(who: int, mark: str, number: int) -> None:
    """The others come after the exchange of one rank has been interrupted."""
    came = Path(mark)

    for turn, change in enumerate((hvd.add_process_set, hvd.remove_process_set)):
        hvd.barrier()
        came.unlink(missing_ok=True)
        hvd.barrier()
        if hvd.rank() == who:
            before = signal.signal(number, signal.default_int_handler)
            arguments = (threading.get_ident(), came, number)
            sender = threading.Thread(target=interrupt_once_it_waits, args=arguments, daemon=True)
            sender.start()
            with pytest.raises(KeyboardInterrupt):
                change(hvd.ProcessSet([0, 1]))
            sender.join()
            signal.signal(number, before)
        else:
            assert eventually(came.exists, 20.0)
            change(hvd.ProcessSet([0, 1]))
        assert hvd.ProcessSet([0, 1]).process_set_id == (1 if turn == 0 else None)
        if turn == 0:
            check_process_set(hvd.ProcessSet([0, 1]), [0, 1])
    check_process_set(hvd.add_process_set([0, 1]), [0, 1])


@pytest.mark.parametrize(
    ("who", "number", "transport"),
    [(0, signal.SIGINT, "shm"), (2, signal.SIGUSR1, "tcp")],
)
def test_an_interrupt_while_a_set_is_added_or_removed(who, number, transport, tmp_path):
    arguments = (who, str(tmp_path / "interrupted"), int(number))
    run(interrupt_a_rank, 3, args=arguments, transport=transport)
