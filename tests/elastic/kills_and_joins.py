"""One job in which ranks are killed, and others join, at random moments; prints its result.

    python tests/elastic/kills_and_joins.py DEATHS SEED SECONDS [hierarchy]

The processes are forked from this one, which has loaded torch: a new rank comes in milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from mortal_training import BATCHES, GLOBAL_BATCH, Samples, make, weights_of
from ports import free_port

import torch_ring as hvd
from torch_ring.membership.directory import Directory, ask_directory
from torch_ring.membership.member import key_of

SIZE = 4
SECRET = "of this test"
PAUSE_S = (0.0, 0.3)  # from a death, or an arrival, to the next
ALONE_S = 0.01  # between two polls
IN_LEVELS = sys.argv[4:] == ["hierarchy"]  # gradients inside hosts, DiLoCo between them


def fork(body: Callable[[], None], variables: Mapping[str, str]) -> int:
    """Fork a process that does `body` and ends with this one; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        os.environ.update(variables)
        body()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve_directory(write: int) -> None:
    """Serve as the launcher's directory, until this process is killed."""
    directory = Directory("127.0.0.1", key_of(SECRET))
    directory.expect({f"p{rank}": rank for rank in range(SIZE)})
    os.write(write, directory.address.encode())
    signal.pause()


def train(folder: Path) -> None:
    """Run as a rank; write the epochs, the weights and the loss of each batch at the end."""
    hvd.init()
    model, optimizer = make()
    host, one_of_each_host = hvd.hierarchy() if IN_LEVELS else (hvd.global_process_set, None)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=host)
    if one_of_each_host is not None:
        outer = {"lr": 1.0}
        optimizer = hvd.DiLoCo(
            optimizer, outer_options=outer, every=1, process_set=one_of_each_host
        )
    sampler = hvd.elastic.ElasticSampler(Samples())
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batches=0, losses=[])

    @hvd.elastic.run
    def go_on(state: hvd.elastic.TorchState) -> None:
        (folder / f"has-state-{os.getpid()}").touch()
        is_over = False
        while not is_over:
            loader = torch.utils.data.DataLoader(
                Samples(), GLOBAL_BATCH // hvd.size(), sampler=sampler
            )
            for index, batch in enumerate(loader):
                optimizer.zero_grad()
                loss = model(batch)
                loss.backward()
                losses = [*state.losses, hvd.allreduce(loss.detach(), name="loss").item()]
                optimizer.step()
                sampler.record_batch(index, len(batch))
                state.batches, state.losses = state.batches + 1, losses
                state.check_host_updates()
            sampler.set_epoch(state.epoch + 1)
            state.epoch += 1
            is_over = hvd.broadcast_object((folder / "stop").exists())

    go_on(state)
    ended = {"epochs": state.epoch, "batches": state.batches, "losses": state.losses}
    ended["weights"] = weights_of(model)
    (folder / f"ended-{os.getpid()}").write_text(json.dumps(ended))


def main() -> None:
    deaths, seed, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    deadline, chance = time.monotonic() + seconds, random.Random(seed)
    torch.set_num_threads(1)
    read, write = os.pipe()
    fork(lambda: serve_directory(write), {})
    address = os.read(read, 100).decode()
    common = {"TORCH_RING_SECRET": SECRET, "TORCH_RING_ELASTIC_DIRECTORY": address}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}
    common |= {"TORCH_RING_MAX_RANKS": str(SIZE), "WORLD_SIZE": str(SIZE)}
    common |= {"TORCH_RING_LOG_LEVEL": "error"}

    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        pids: dict[str, int] = {}

        def start(rank: int, **more: str) -> None:
            name = f"p{len(names)}"
            names.append(name)
            variables = {**common, "RANK": str(rank), "TORCH_RING_PROCESS": name, **more}
            pids[name] = fork(lambda: train(folder), variables)

        names: list[str] = []
        for rank in range(SIZE):
            start(rank)

        def members() -> list[str]:
            """Return the living processes of the last reported world."""
            told = [member.process for member in ask_directory(address, key_of(SECRET))]
            return [name for name in told if name in pids]

        def wait(is_so: Callable[[], bool], what: str) -> None:
            while not is_so():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{what}: not in time; {members()} of {list(pids)}")
                for name, pid in list(pids.items()):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended and (status or not (folder / "stop").exists()):
                        raise RuntimeError(f"process {name} has ended: {status}")
                    if ended:
                        del pids[name]
                time.sleep(ALONE_S)

        killed = joined = 0
        wait(lambda: len(members()) == SIZE, "the first world")
        while killed < deaths:
            if len(pids) < SIZE and chance.random() < 0.7:
                start(SIZE - 1, TORCH_RING_ELASTIC_NEWCOMER="1")
                joined += 1
            elif len(members()) > 1:
                victim = chance.choice(list(pids))
                # Without any rank that has the state, the state would be lost.
                others = [pids[name] for name in members() if name != victim]
                if any((folder / f"has-state-{pid}").exists() for pid in others):
                    pid = pids.pop(victim)
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    killed += 1
                    if len(pids) == 1:
                        start(SIZE - 1, TORCH_RING_ELASTIC_NEWCOMER="1")
                        joined += 1
            time.sleep(chance.uniform(*PAUSE_S))
            wait(lambda: len(members()) > 1, "a world of two")
        let_in = len(members())
        (folder / "stop").touch()
        wait(lambda: not pids or {*pids} & {*members()} == set(), "the end")
        for pid in pids.values():  # processes that had not joined before the end
            os.kill(pid, signal.SIGKILL)
        found = [json.loads(path.read_text()) for path in folder.glob("ended-*")]
        assert found, "no rank has reached the end"
        assert all(one == found[0] for one in found), found
        assert found[0]["batches"] == found[0]["epochs"] * BATCHES
        print(json.dumps({"killed": killed, "joined": joined, "let_in": let_in, **found[0]}))


if __name__ == "__main__":
    main()
