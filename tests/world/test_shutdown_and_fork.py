"""What a world leaves behind, in its process and in those that it forks: nothing that disturbs."""

import os
import signal
import threading
import time

import pytest
import torch
from pool import error_of, eventually, run

import torch_ring as hvd

both_transports = pytest.mark.parametrize("transport", ["shm", "tcp"])


def starts_over() -> None:
    fds = len(os.listdir("/proc/self/fd"))
    for i in range(20):
        hvd.init()
        assert hvd.allreduce(torch.full((3,), float(i))).tolist() == [float(i)] * 3
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        # A thread that was joined may be listed until the kernel has buried it.
        assert eventually(lambda: len(os.listdir("/proc/self/task")) <= threads_at_rest())
    assert len(os.listdir("/proc/self/fd")) <= fds + 4  # the store's client
    assert not [name for name in os.listdir("/dev/shm") if "torch_ring" in name]


def threads_at_rest() -> int:
    """Return how many threads this process may have without a world: torch's store has some."""
    return 1 + sum("tcpstore" in name.lower() or name != "python" for name in thread_names())


def thread_names() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read().strip())
    return names


@both_transports
def test_init_and_shutdown_many_times(transport):
    run(starts_over, 2, transport=transport, initialized=False)


def forks_a_worker() -> None:
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
        # The worker lives on; that its parent has died must be noticed all the same.
        threading.Timer(20, os.kill, (pid, signal.SIGKILL)).start()
        with open(os.environ["WORKER_PID"], "w") as file:
            file.write(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(3))
    begin = time.monotonic()
    kind, text = error_of(lambda: hvd.allreduce(torch.ones(3)))
    assert kind == "PeerLostError", text
    assert "rank 1 (pid " in text, text
    assert time.monotonic() - begin < 5


@both_transports
def test_a_forked_worker_does_not_hide_a_death(transport, tmp_path):
    path = tmp_path / "worker"
    run(
        forks_a_worker,
        2,
        transport=transport,
        env={"WORKER_PID": str(path)},
        may_die={1},
    )
    assert path.exists()  # the worker, a process of the rank's group, was ended with it


class Shard(torch.utils.data.IterableDataset):
    """Numbers of which each worker of each rank has its part: it asks there who it is."""

    def __iter__(self):
        assert hvd.is_initialized()
        worker = torch.utils.data.get_worker_info()
        part = hvd.rank() * worker.num_workers + worker.id
        yield from torch.arange(32.0)[part :: hvd.size() * worker.num_workers]


def loads_data() -> None:
    for _ in range(2):
        loader = torch.utils.data.DataLoader(
            Shard(), batch_size=8, num_workers=2, multiprocessing_context="fork"
        )
        total = sum(float(batch.sum()) for batch in loader)
        assert hvd.allreduce(torch.tensor([total]), op=hvd.Sum).item() == sum(range(32))


def test_data_loader_workers_know_the_rank_and_are_harmless():
    run(loads_data, 2)
