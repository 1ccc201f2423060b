"""Processes that may join, and accepted objects: on one host, with and without a secret."""

import collections
import logging
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import namespaces
import numpy as np
import pytest
import torch
from pool import eventually, run

import torch_ring as hvd
from torch_ring.setup import connect as connecting
from torch_ring.setup.launchers import discover
from torch_ring.setup.network import listen_unix
from torch_ring.setup.socket_name import socket_name

NOBODY = 65534
PORT = "29513"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user, and namespaces")
on_hosts = [
    pytest.mark.netns,
    needs_root,
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` (iproute2)"),
]


class Own:
    """A class of a user's program."""


def lines_logged_by_init() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torch_ring").addHandler(handler)
    hvd.init()
    return lines


def run_on_two_hosts(fn, hosts, size=2, **env):
    """Run a function on ranks of two hosts, the first ones on the first host."""
    env |= {"MASTER_ADDR": f"{namespaces.NETWORK}.1", "MASTER_PORT": PORT}
    where = [hosts[rank * 2 // size] for rank in range(size)]
    return run(fn, size, initialized=False, transport="", env=env, namespaces=where)


# --- hosts


def share_objects() -> tuple[list[str], list[str]]:
    """Return the warnings of init(), and the result of sending an object of the program's class."""
    lines = lines_logged_by_init()
    plain = {"rank": hvd.rank(), "tensor": torch.arange(3), "array": np.ones(2), "deque": [1]}
    for root in range(hvd.size()):
        got = hvd.broadcast_object(plain, root)
        assert got["rank"] == root
        assert got["tensor"].tolist() == [0, 1, 2]
        assert got["array"].tolist() == [1, 1]
    many = hvd.allgather_object(collections.OrderedDict(rank=hvd.rank()), name="many")
    assert [each["rank"] for each in many] == list(range(hvd.size()))
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + hvd.rank()))
    if hvd.rank() == 0:
        model(torch.ones(3)).backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.state[model.bias]["step"] == 1
    texts = []
    for share in (hvd.broadcast_object, hvd.allgather_object):
        try:
            share(Own() if hvd.rank() == 0 else "text")
            texts.append("taken")
        except (pickle.UnpicklingError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))  # the job goes on
    hvd.shutdown()
    return lines, texts


@pytest.mark.usefixtures("hosts")
class TestHosts:
    pytestmark = on_hosts

    def test_without_a_secret_only_plain_data_are_taken_from_other_hosts(self, hosts):
        results = run_on_two_hosts(share_objects, hosts, 3)
        (lines, of_root), (silence, of_near), (_, of_far) = results
        assert len(lines) == 1
        assert "the hosts of this job have no secret" in lines[0]
        assert "Set TORCH_RING_SECRET to the same random text on all ranks" in lines[0]
        assert silence == []
        for text in of_far:
            assert text.startswith("UnpicklingError: rank 0, on another host, has sent ")
            assert "test_strangers.Own. Without a secret only plain data" in text
            assert "TORCH_RING_SECRET" in text
            assert "TORCH_RING_TRUST_NETWORK=1" in text
        told = "RuntimeError: rank 2 does not take an object: see its error"
        assert of_root == of_near == [told, told]

    @pytest.mark.parametrize("env", [{"SECRET": "a secret"}, {"TRUST_NETWORK": "1"}], ids=str)
    def test_with_a_secret_or_trust_all_objects_are_taken(self, hosts, env):
        env = {f"TORCH_RING_{name}": value for name, value in env.items()}
        for lines, texts in run_on_two_hosts(share_objects, hosts, **env):
            assert lines == []
            assert texts == ["taken", "taken"]

    def test_a_secret_of_a_file(self, hosts, tmp_path):
        path = tmp_path / "secret"
        path.write_text("hush\n")
        path.chmod(0o600)
        for lines, texts in run_on_two_hosts(
            share_objects, hosts, TORCH_RING_SECRET_FILE=str(path)
        ):
            assert lines == []
            assert texts == ["taken", "taken"]

    def test_hosts_with_different_secrets_say_so(self, hosts):
        for text in run_on_two_hosts(join_with_own_secret, hosts):
            assert "is TORCH_RING_SECRET the same on all ranks?" in text

    def test_copies_of_a_virtual_machine_use_tcp(self, hosts):
        for line, local_size in run_on_two_hosts(join_as_a_copy, hosts, 4):
            assert local_size == 2
            assert line == "" or "4 ranks on 2 hosts (2+2)" in line


def join_with_own_secret() -> str:
    os.environ["TORCH_RING_SECRET"] = "of rank " + os.environ["RANK"]
    with pytest.raises(hvd.RingError) as raised:
        hvd.init()
    return str(raised.value)


def claim_machine(machine: str) -> None:
    """Make this rank claim a machine."""
    make = connecting.PeerInfo
    connecting.PeerInfo = lambda **fields: make(**fields | {"machine": machine})


def join_as_a_copy() -> tuple[str, int]:
    """Join as on copies of one machine, whose boot id and namespace are the same."""
    os.environ.pop("LOCAL_WORLD_SIZE")  # or the launcher would reveal it
    os.environ.pop("LOCAL_RANK")
    os.environ.pop("GROUP_RANK")
    claim_machine("boot/1")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torch_ring").addHandler(handler)
    logging.getLogger("torch_ring").setLevel("INFO")
    hvd.init()
    assert hvd.allreduce(torch.ones(100_000), op=hvd.Sum).tolist() == [4.0] * 100_000
    local_size = hvd.local_size()
    hvd.shutdown()
    return "".join(lines), local_size


# --- users of one host


def join_beside_a_stranger(with_launcher: bool) -> tuple[list[int], list[str]]:
    """Join; in place of rank 1 a process of another user tries first, with all public knowledge."""
    if not with_launcher:  # the store's address shows that there is one host
        os.environ.pop("LOCAL_WORLD_SIZE")
    if os.environ["RANK"] == "1":
        "a".encode("idna")  # the stranger may not read Python's modules
        stranger = os.fork()
        if stranger == 0:
            try:
                os.setuid(NOBODY)
                claim_machine("elsewhere/1")
                os.environ["TORCH_RING_INIT_TIMEOUT"] = "4"
                hvd.init()
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(stranger, 0)
        assert os.waitstatus_to_exitcode(status) == 1, "it has joined"
    lines = lines_logged_by_init()
    users = hvd.allgather_object(os.getuid())
    assert [type(own).__name__ for own in hvd.allgather_object(Own())] == ["Own"] * 2
    hvd.shutdown()
    return users, lines


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("with_launcher", [True, False])
def test_one_host_is_closed_to_other_users(with_launcher):
    """This holds although they can reach the job's store, and there is no secret."""
    results = run(join_beside_a_stranger, 2, initialized=False, transport="", args=[with_launcher])
    assert results == [([0, 0], [])] * 2


def join_a_name_that_is_taken(directory: Path) -> str:
    """Join where a process of another user listens at the name of this host's socket."""
    is_first = os.environ["RANK"] == "0"
    taken, over = directory / "taken", directory / "over"
    ready, done = os.pipe(), os.pipe()
    if is_first:
        name = socket_name(replace(discover(), node=None))
        if os.fork() == 0:
            os.setuid(NOBODY)
            listener = listen_unix(name)
            os.write(ready[1], b"r")
            os.close(done[1])
            os.read(done[0], 1)
            listener.close()
            os._exit(0)
        os.read(ready[0], 1)
        taken.touch()
    assert eventually(taken.exists, 30)
    with pytest.raises(hvd.RingError) as raised:
        hvd.init()
    if is_first:
        assert eventually(over.exists, 30)
    over.touch()
    return str(raised.value)


@needs_root
def test_a_squatter_is_named_at_once(tmp_path):
    env = {"TORCH_RING_INIT_TIMEOUT": "100"}  # longer than the test may last
    for text in run(
        join_a_name_that_is_taken, 2, initialized=False, transport="", env=env, args=[tmp_path]
    ):
        assert f"in use by a process of user {NOBODY}" in text
