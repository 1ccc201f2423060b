# SPDX-License-Identifier: Apache-2.0
"""Two jobs of the same name on one host: at least one of them ends with an error."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from exchanges import new_name
from pool import eventually, run
from ports import free_port
from slow import slow

import torch_ring as hvd
from torch_ring.setup import socket_name
from torch_ring.setup.launchers import Identity, variables_of_launchers
from torch_ring.setup.network import Deadline, listen_unix
from torch_ring.setup.socket_name import listen_as_rank

PATIENCE_S = 40.0
BY_VARIABLES, BY_ARGUMENTS = "RANK and WORLD_SIZE", "init(rank=, size=)"


class Stage:
    """Files that tell a test's ranks, and its director, the others' progress."""

    def __init__(self, folder: Path, door: str, port: int) -> None:
        self.folder, self.door, self.port = folder, door, port

    def note(self, what: str, value: Any = None) -> None:
        draft = self.folder / f"draft-{os.getpid()}"
        draft.write_text(json.dumps(value))
        draft.rename(self.folder / what)

    def hear(self, what: str) -> Any:
        path = self.folder / what
        assert eventually(path.exists, PATIENCE_S), what
        return json.loads(path.read_text())

    def start(self, name: str) -> None:
        """Run as a rank ("A0": rank 0 of job A); report the jobs in its world, or its error."""
        job, rank = name[0], int(name[1])
        self.note(f"here-{name}")
        self.hear(f"go-{name}")
        try:
            if self.door == BY_VARIABLES:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
                hvd.init()
            else:
                hvd.init(rank=rank, size=2)
            mine = torch.tensor([ord(job)])
            self.note(f"said-{name}", "".join(map(chr, hvd.allgather(mine).tolist())))
        except hvd.RingError as error:
            self.note(f"said-{name}", str(error))
            return
        try:
            while not hvd.any_rank((self.folder / "over").exists()):
                time.sleep(0.01)
        except hvd.RingError as error:
            self.note(f"ended-{name}", str(error))
        hvd.shutdown()


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            work()
            status = 0
        os._exit(status)
    return pid


def script(stage: Stage, names: Sequence[str]) -> int:
    """Start a process that starts ranks, as a script does, and waits for them."""

    def start_all() -> None:
        for pid in [fork(lambda name=name: stage.start(name)) for name in names]:
            os.waitpid(pid, 0)

    return fork(start_all)


@contextlib.contextmanager
def scripts(folder: Path, door: str, *jobs: Sequence[str]):
    """Start scripts of some ranks each; yield the stage when all their processes exist."""
    for name in variables_of_launchers():
        del os.environ[name]
    stage = Stage(folder, door, free_port())
    pids = [script(stage, names) for names in jobs]
    for names in jobs:
        for name in names:
            stage.hear(f"here-{name}")
    yield stage
    stage.note("over")
    for pid in pids:
        os.waitpid(pid, 0)


def direct(director: Callable[..., Any], *args: Any, transport: str = "shm") -> Any:
    env = {"TORCH_RING_INIT_TIMEOUT": str(PATIENCE_S)}
    [found] = run(
        director, 1, args=args, transport=transport, env=env, initialized=False, kind="directors"
    )
    return found


def start_in_two_terminals(folder: Path, names: list[str]) -> list[str]:
    with scripts(folder, BY_VARIABLES, *([name] for name in names)) as stage:
        for name in reversed(names):
            stage.note(f"go-{name}")
        return [stage.hear(f"said-{name}") for name in names]


def test_two_terminals_with_one_rank_are_told_at_once(tmp_path):
    for text in direct(start_in_two_terminals, tmp_path, ["A0", "B0"]):
        assert text.startswith("two processes are rank 0 of 2, or another job has the same")


def mix_two_jobs(folder: Path, door: str, jobs: list[list[str]]) -> list[list[str]]:
    with scripts(folder, door, *jobs) as stage:
        stage.note("go-A0")
        stage.note("go-B1")
        mixed = [stage.hear("said-A0"), stage.hear("said-B1")]
        stage.note("go-B0")
        stage.note("go-A1")
        refused = [stage.hear("said-B0"), stage.hear("said-A1")]
        return [mixed, refused, [stage.hear("ended-A0"), stage.hear("ended-B1")]]


@pytest.mark.parametrize(
    ("door", "transport", "jobs"),
    [
        (BY_VARIABLES, "shm", [["A0", "A1"], ["B0", "B1"]]),
        slow(BY_ARGUMENTS, "tcp", [["A0", "B0", "A1", "B1"]]),  # of one parent
    ],
)
def test_two_jobs_of_one_name_never_mix_silently(tmp_path, door, transport, jobs):
    mixed, refused, ended = direct(mix_two_jobs, tmp_path, door, jobs, transport=transport)
    assert mixed == ["AB", "AB"]  # not detectable yet
    own = [rf"two processes are rank {rank} of 2: process \d+ is, too" for rank in range(2)]
    assert any(map(re.match, own, refused)), refused
    for rank, text in enumerate(refused):  # by its own name, or by that of the other
        of_other = f"init failed on rank {1 - rank}: {own[1 - rank]}"
        assert re.match(f"{own[rank]}|{of_other}", text), text
        assert "they may have mixed" in text
    for text in ended:
        assert "has come as the same rank. Two jobs of one name may have mixed" in text


@pytest.mark.parametrize(("is_new", "patience_s"), [(True, 2.0), (False, 0.0)])
def test_a_rank_is_taken_when_its_last_process_gives_it_up(monkeypatch, is_new, patience_s):
    monkeypatch.setattr(socket_name, "_LEAVING_S", patience_s)  # an earlier world may take any time
    name = new_name()
    last = listen_unix(f"{name}/0")
    identity, deadline = Identity(0, 2), Deadline(10)
    own = listen_as_rank(name, identity, deadline, lambda _: last.close(), is_new=is_new)
    with own as unix:
        assert unix.getsockname().decode() == f"{name}/0"


def init_in_a_child(folder: Path) -> list[Any]:
    stage = Stage(folder, "", 0)

    def child() -> None:
        stage.hear("go-child")
        try:
            hvd.init()
        except hvd.RingError as error:
            stage.note("said-child", str(error))

    pid = fork(child) if os.environ["RANK"] == "1" else 0
    hvd.init()
    stage.note("go-child")
    text = stage.hear("said-child")
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    if pid:
        os.waitpid(pid, 0)
    hvd.shutdown()
    return [text, total, pid and os.getpid()]


def test_a_child_of_a_rank_is_told_that_it_has_inherited_its_variables(tmp_path):
    (text, total, _), (_, _, holder) = run(init_in_a_child, 2, args=[tmp_path], initialized=False)
    assert text.startswith(f"rank 1 of 2 is process {holder}, which has started this one")
    assert "RANK, WORLD_SIZE and MASTER_PORT" in text
    assert total == 2.0
