# SPDX-License-Identifier: Apache-2.0
"""TORCH_RING_TLS: connections between hosts are encrypted; those that cannot be are refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dtype_checks import check_results
from groups import on_ring
from host_fixtures import run_on_hosts
from packets import needs_packets, packets
from pool import error_of, run
from process_set_use import check_process_set
from scripts import ROOT

import torch_ring as hvd
from torch_ring.world import current

SHAPES = [(3,), (30_011,)]  # inline, and in chunks
TLS = {"TORCH_RING_TLS": "1"}
MARK = 1.2345678e20  # in no other data


def everything() -> str:
    check_results(dtypes=[torch.float32], shapes=SHAPES)
    assert hvd.broadcast_object({"of": hvd.rank()}, 1) == {"of": 1}
    check_process_set(hvd.add_process_set([0, 2]), [0, 2])
    return current.world().summary


def test_collectives() -> None:
    env = TLS | {"TORCH_RING_CONNECTIONS": "3", "TORCH_RING_CHECKSUM": "1"}
    summaries = run(everything, 3, transport="tcp", env=env)
    assert summaries[0].startswith("3 ranks, by TCP, TLS 1.3 (")


def messages() -> None:
    rank = dist.get_rank()
    for count in (3, 100_000):
        sent, got = torch.full((count,), float(rank)), torch.empty(count)
        works = [dist.isend(sent, 1 - rank), dist.irecv(got, 1 - rank)]
        for work in works:
            work.wait()
        assert got.eq(1 - rank).all()
        dist.all_reduce(sent)
        assert sent.eq(1).all()


def test_groups_of_torch_distributed() -> None:
    on_ring(messages, 2, transport="tcp", env=TLS)


def reduce_marks(mark: float) -> None:
    for count in (2, 20_000):  # with the agreement, and by the ring
        hvd.allreduce(torch.full((count,), mark), op=hvd.Max)
    hvd.broadcast(torch.full((20_000,), mark), 0)


@needs_packets
@pytest.mark.parametrize("is_encrypted", [True, False])
def test_nobody_on_the_way_can_read(is_encrypted: bool) -> None:
    mark = MARK if is_encrypted else -MARK  # the two tests may run at once
    with packets() as seen:
        run(reduce_marks, 2, args=(mark,), transport="tcp", env=TLS if is_encrypted else None)
    assert (torch.full((2,), mark).numpy().tobytes() in b"".join(seen)) != is_encrypted


def join_with(settings: list[dict[str, str]]) -> tuple[str, str]:
    os.environ.update(settings[int(os.environ["RANK"])])
    return error_of(hvd.init)


@pytest.mark.parametrize(
    ("settings", "kind", "reason"),
    [
        ([TLS, {}], "MismatchError", "TORCH_RING_TLS"),
        (
            [{**TLS, "TORCH_RING_NETWORK": "ucx"}] * 2,
            "InvalidArgumentError",
            "UCX encrypts nothing; use tcp",
        ),
    ],
)
def test_refused(settings: list[dict[str, str]], kind: str, reason: str) -> None:
    outcomes = run(join_with, 2, args=(settings,), transport="tcp", initialized=False)
    for found, text in outcomes:
        assert found == kind, text
        assert reason in text


def test_declarations_of_openssl() -> None:
    check = Path(__file__).with_name("openssl_check.cc")
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'csrc'}", str(check)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "openssl/bio.h: No such file" in done.stderr:
        pytest.skip("OpenSSL's headers are not installed (Debian: libssl-dev)")
    assert done.returncode == 0, done.stderr


def reduce_on_hosts() -> tuple[str, str]:
    error = error_of(hvd.init)
    if error[0] == "nothing":
        total = hvd.allreduce(torch.full((300_000,), MARK), op=hvd.Sum)
        assert total.eq(3 * MARK).all()
        hvd.shutdown()
    return error


@pytest.mark.netns
@pytest.mark.parametrize("secret", ["of this job", ""])
def test_several_hosts_need_a_secret(hosts: list[str], secret: str) -> None:
    env = {**TLS, "TORCH_RING_SECRET": secret}
    outcomes = run_on_hosts(reduce_on_hosts, hosts, [0, 0, 1], env=env, initialized=False)
    for kind, text in outcomes:
        assert (kind == "nothing") == bool(secret), text
        assert secret or "TORCH_RING_TLS=1 needs a secret: set TORCH_RING_SECRET" in text
