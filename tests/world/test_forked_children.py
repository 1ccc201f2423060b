"""Forked children know their parent's rank, and disturb neither it nor the other ranks."""

import json
import os
import signal
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from pool import all_have_passed, error_of, run
from process_set_use import check_process_set
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.setup import connect


def fork_a_child() -> None:
    pair = hvd.add_process_set([0, 1])
    expected = facts_of(pair)
    child = os.fork()
    if child == 0:
        try:
            check_child(pair, expected)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    check_process_set(pair, [0, 1])


def facts_of(pair: hvd.ProcessSet) -> list[object]:
    ranks = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size(), hvd.is_homogeneous()
    member = pair.included() and pair.rank()
    sets = hvd._basics._get_process_set_ids_and_ranks()
    return [*ranks, pair.process_set_id, pair.ranks, member, hvd.global_process_set.ranks, sets]


def check_child(pair: hvd.ProcessSet, expected: list[object]) -> None:
    """A worker of a DataLoader shards its data by its parent's rank, even within a set."""
    hvd.init()  # there is a world
    assert facts_of(pair) == expected
    for operation in (
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.broadcast_object(1, root_rank=0),
        lambda: hvd.add_process_set([1, 2]),
        lambda: hvd.remove_process_set(pair),
        hvd.join,
        hvd.barrier,
    ):
        with pytest.raises(hvd.NotInitializedError, match=f"forked from rank {expected[0]}"):
            operation()
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert pair.process_set_id is None
    with pytest.raises(hvd.NotInitializedError, match="call init"):
        hvd.rank()


@on_both_transports
def test_a_forked_child_can_ask_but_not_communicate(transport):
    run(fork_a_child, 3, transport=transport)


def fork_a_worker_and_die() -> None:
    def work(queue) -> None:
        queue.put((hvd.rank(), os.getpid()))
        time.sleep(60)

    if hvd.rank() == 1:
        import multiprocessing

        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=work, args=(queue,), daemon=True)
        child.start()
        rank, pid = queue.get()
        assert rank == 1
        hvd.allreduce(torch.ones(3))
        all_have_passed(Path(os.environ["WORKER_PID"]).with_name("passed"), hvd.size())
        # The worker lives on; the other rank must still notice the death of its parent.
        threading.Timer(20, os.kill, (pid, signal.SIGKILL)).start()
        with open(os.environ["WORKER_PID"], "w") as file:
            file.write(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(3))
    all_have_passed(Path(os.environ["WORKER_PID"]).with_name("passed"), hvd.size())
    kind, text = error_of(lambda: hvd.allreduce(torch.ones(3)))
    assert kind == "PeerLostError", text
    assert "rank 1 (pid " in text, text
    assert "died: its connection closed" in text, text


@on_both_transports
def test_a_forked_worker_does_not_hide_a_death(transport, tmp_path):
    path = tmp_path / "worker"
    run(
        fork_a_worker_and_die,
        2,
        transport=transport,
        env={"WORKER_PID": str(path)},
        may_die={1},
    )
    assert path.exists()  # the worker, in the rank's process group, ended with it


def open_sockets() -> set[str]:
    """Return the sockets and the shared memory that this process has open."""
    with os.scandir("/proc/self/fd") as listing:
        names = {os.readlink(entry.path) for entry in listing}
    return {name for name in names if name.startswith(("socket:", "/memfd:torch_ring"))}


def fork_while_joining(stage: str) -> None:
    """Another thread forks, as a program's data loader may, while this one is in init()."""
    before = open_sockets()
    held: list[set[str]] = []

    def fork() -> None:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, json.dumps(list(open_sockets() - before)).encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as report:
            held.append(set(json.load(report)))
        assert os.waitpid(child, 0)[1] == 0

    go_on = getattr(connect, stage)

    def fork_first(*arguments: object) -> object:
        assert open_sockets() - before, "there is nothing to inherit"
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        return go_on(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connect, stage, fork_first)
        hvd.init()
    assert held == [set()]
    assert hvd.allreduce(torch.ones(1000), op=hvd.Sum).eq(hvd.size()).all()
    hvd.shutdown()


@on_both_transports
@pytest.mark.parametrize("stage", ["_share_memory", "_wait_for_neighbours"])
def test_a_child_that_is_forked_during_init_holds_nothing(transport, stage):
    run(fork_while_joining, 3, args=(stage,), transport=transport, initialized=False)


class Shard(torch.utils.data.IterableDataset):
    """Numbers, a part of them for each worker of each rank: the worker asks for its rank."""

    def __iter__(self):
        assert hvd.is_initialized()
        worker = torch.utils.data.get_worker_info()
        part = hvd.rank() * worker.num_workers + worker.id
        yield from torch.arange(32.0)[part :: hvd.size() * worker.num_workers]


def load_data() -> None:
    for _ in range(2):
        loader = torch.utils.data.DataLoader(
            Shard(), batch_size=8, num_workers=2, multiprocessing_context="fork"
        )
        total = sum(float(batch.sum()) for batch in loader)
        assert hvd.allreduce(torch.tensor([total]), op=hvd.Sum).item() == sum(range(32))


def test_data_loader_workers_know_the_rank():
    run(load_data, 2)
