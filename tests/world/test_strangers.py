# SPDX-License-Identifier: Apache-2.0
"""Accepted objects, with and without a secret.

tests/setup/test_host_strangers.py has processes of other users on one host.
"""

import collections
import os
import pickle

import numpy as np
import pytest
import torch
from host_fixtures import on_hosts, run_on_hosts
from logs import logged

import torch_ring as hvd
from torch_ring.setup import connect as connecting

QUIET = {"TORCH_RING_LOG_LEVEL": "warning"}


class Own:
    """A class of a user's program."""


def warnings_of_init() -> list[str]:
    """Return the log of init(), without the line about the variable of tests/mutants."""
    with logged() as lines:
        hvd.init()
    return [line for line in lines if "TORCH_RING_MUTANT" not in line]


# --- hosts


def share_objects() -> tuple[list[str], list[str]]:
    """Return the warnings of init(), and the result of sending an object of the program's class."""
    lines = warnings_of_init()
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


class TestHosts:
    pytestmark = on_hosts

    def test_without_a_secret_only_plain_data_are_taken_from_other_hosts(self, hosts):
        results = run_on_hosts(share_objects, hosts, [0, 0, 1], env=QUIET, initialized=False)
        (lines, of_root), (silence, of_near), (_, of_far) = results
        assert len(lines) == 1
        assert "the hosts of this job have no secret" in lines[0]
        assert "Set TORCH_RING_SECRET, the same on all ranks" in lines[0]
        assert silence == []
        for text in of_far:
            assert text.startswith("UnpicklingError: rank 0, on another host, has sent ")
            assert "test_strangers.Own. Without a secret only plain data" in text
            assert "TORCH_RING_SECRET" in text
            assert "TORCH_RING_TRUST_NETWORK=1" in text
        told = "RuntimeError: rank 2 does not take an object: see its error"
        assert of_root == of_near == [told, told]

    @pytest.mark.parametrize("how", ["SECRET_FILE", "TRUST_NETWORK"])
    def test_with_a_secret_or_trust_all_objects_are_taken(self, hosts, how, tmp_path):
        path = tmp_path / "secret"
        path.write_text("hush\n")
        path.chmod(0o600)
        value = {"SECRET_FILE": str(path), "TRUST_NETWORK": "1"}[how]
        env = QUIET | {f"TORCH_RING_{how}": value}
        for lines, texts in run_on_hosts(share_objects, hosts, [0, 1], env=env, initialized=False):
            assert lines == []
            assert texts == ["taken", "taken"]

    def test_copies_of_a_virtual_machine_use_tcp(self, hosts):
        layout = [0, 0, 1, 1]
        for line, local_size in run_on_hosts(join_as_a_copy, hosts, layout, initialized=False):
            assert local_size == 2
            assert line == "" or "4 ranks on 2 hosts (2+2)" in line


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
    with logged() as lines:
        hvd.init()
    assert hvd.allreduce(torch.ones(100_000), op=hvd.Sum).tolist() == [4.0] * 100_000
    local_size = hvd.local_size()
    hvd.shutdown()
    return "".join(lines), local_size
