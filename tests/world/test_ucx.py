# SPDX-License-Identifier: Apache-2.0
"""TORCH_RING_NETWORK=ucx: data travel between hosts over UCX (here over its tcp).

tests/cpp/ runs the connections and communicators over it, with checksums, too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from dtype_checks import check_results
from on_ranks import on_ranks
from pool import all_have_passed, error_of, run
from scripts import ROOT

import torch_ring as hvd
from torch_ring._C import arm_failpoints
from torch_ring.config import Config
from torch_ring.setup import connect, ucx
from torch_ring.world import current

SHAPES = [(3,), (30_011,)]  # inline, and in chunks
OVER_UCX = {"TORCH_RING_NETWORK": "ucx", "UCX_TLS": "tcp"}

OWN = ucx.own_ucx(Config.from_environment())
needs_ucx = pytest.mark.skipif(not OWN[:1].isdigit(), reason=OWN)


def reduce_and_gather() -> str:
    check_results(dtypes=[torch.float32], shapes=SHAPES)
    mine = torch.ones(1 << 21)  # megabytes for each rank
    assert hvd.allreduce(mine, op=hvd.Sum).eq(hvd.size()).all()
    return current.world().summary


@needs_ucx
def test_collectives():
    line, *others = run(reduce_and_gather, 3, transport="tcp", env=OVER_UCX)
    assert others == [line] * 2
    assert re.fullmatch(r"3 ranks, by UCX 1\.[\d.]+ \(tcp\) over 127\.0\.0\.1", line), line


def reduce_with_a_dying_rank() -> tuple[str, str, bool]:
    """The last rank dies when a part of its data has arrived."""
    last = hvd.size() - 1
    hvd.allreduce_(torch.ones(1 << 20), name="first")
    data = torch.ones(16 << 20)
    if hvd.rank() == last:
        arm_failpoints(f"data.received:{last - 1}:20:kill")
    kind, text = error_of(lambda: hvd.allreduce_(data, name="second"))
    data.fill_(2)
    time.sleep(0.5)  # nothing writes to it afterwards
    return kind, text, bool((data == 2).all())


@needs_ucx
def test_a_death_is_told():
    died = 2
    outcomes = run(reduce_with_a_dying_rank, 3, transport="tcp", env=OVER_UCX, may_die={died})
    for kind, text, is_own in outcomes[:-1]:
        assert kind == "PeerLostError", text
        assert f"rank {died}" in text, text
        assert is_own


@needs_ucx
@on_ranks(3, transport="tcp", env=OVER_UCX)
def test_nothing_is_left_to_send_when_a_collective_is_over(tmp_path: Path) -> None:
    """After the root's last call of torch_ring, the others still get all its data."""
    hvd.broadcast(torch.zeros(1 << 20), 0)
    data = torch.full((16 << 20,), float(hvd.rank()))
    hvd.broadcast_(data, 0)
    assert (data == 0).all()
    all_have_passed(tmp_path, hvd.size())


# --- the ranks that use it


def init_with(found: list[str]) -> tuple[str, str]:
    """Call init() with a made-up UCX on each rank; return its error, or the network in use."""
    mine = found[int(os.environ["RANK"])]
    with mock.patch.object(connect, "own_ucx", return_value=mine):
        try:
            hvd.init()
        except (hvd.InvalidArgumentError, hvd.RingError) as error:
            return type(error).__name__, str(error)
    return "", current.world().summary


NO_UCX = "UCX cannot be loaded: libucp.so.0: no such file"


@pytest.mark.parametrize(
    ("found", "trouble"),
    [
        (["1.22.0 tcp", NO_UCX], rf"needs UCX\. rank 1 \(.*\): {NO_UCX}"),
        (
            ["1.22.0 rc_mlx5 tcp", "1.21.0 rc_mlx5 tcp"],
            r"needs the same UCX on all ranks: rank 0 \(.*\) has 1\.22\.0, "
            r"rank 1 \(.*\) has 1\.21\.0",
        ),
    ],
)
def test_a_rank_with_another_ucx_or_none_is_named_on_all(found, trouble):
    env = OVER_UCX | {"TORCH_RING_INIT_TIMEOUT": "30"}
    outcomes = run(init_with, 2, args=[found], transport="tcp", env=env, initialized=False)
    for kind, text in outcomes:
        assert kind in ("InvalidArgumentError", "RingError"), text
        assert re.search(f"TORCH_RING_NETWORK=ucx {trouble}", text), text


@needs_ucx
@pytest.mark.parametrize(
    ("found", "network"),
    [
        ([f"{OWN.split()[0]} rc_mlx5 tcp"] * 2, rf"UCX {OWN.split()[0]} \(rc_mlx5, tcp\)"),
        ([f"{OWN.split()[0]} rc_mlx5 tcp", f"{OWN.split()[0]} tcp"], "TCP"),
        ([OWN, NO_UCX], "TCP"),
    ],
)
def test_auto_takes_ucx_where_all_ranks_have_rdma(found, network):
    env = OVER_UCX | {"TORCH_RING_NETWORK": "auto"}
    outcomes = run(init_with, 2, args=[found], transport="tcp", env=env, initialized=False)
    for kind, text in outcomes:
        assert kind == "", text
        assert re.fullmatch(rf"2 ranks, by {network} over 127\.0\.0\.1", text), text


def test_one_host_needs_no_ucx():
    outcomes = run(init_with, 2, args=[[NO_UCX] * 2], env=OVER_UCX, initialized=False)
    assert outcomes == [("", "2 ranks on one host, by shared memory")] * 2


@needs_ucx
def test_a_network_that_leads_nowhere_is_named():
    env = OVER_UCX | {"UCX_TLS": "self"}
    outcomes = run(error_of, 2, args=[hvd.init], transport="tcp", env=env, initialized=False)
    for _, text in outcomes:
        assert "has no transport to other hosts (UCX_TLS, UCX_NET_DEVICES)" in text, text


def test_what_is_no_ucx_is_refused(tmp_path):
    path = tmp_path / "libucp.so.0"
    path.write_text("text")
    why = r"UCX cannot be loaded: |.* this process has another UCX, /.*libucp\.so"
    assert re.match(why, ucx.own_ucx(Config(ucx_library=str(path))))


def own_ucx_with(monkeypatch, tmp_path, devices=(), interface="", **environment) -> dict[str, str]:
    """Return the variables that own_ucx() sets for UCX."""
    for device in devices:
        (tmp_path / device).mkdir()
    monkeypatch.setattr(ucx, "_RDMA_DEVICES", tmp_path)
    monkeypatch.setattr(ucx, "ucx_found", lambda _: ("1.22.0", "/libucp.so.0", ["tcp"]))
    without = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")}
    with mock.patch.dict(os.environ, without | environment, clear=True):
        assert ucx.own_ucx(Config(interface=interface)) == "1.22.0 tcp"
        return {k: v for k, v in os.environ.items() if k.startswith("UCX_")}


def test_variables_that_ucx_reads(monkeypatch, tmp_path):
    usual = {"UCX_HANDLE_ERRORS": "none", "UCX_LOG_FILE": "stderr", "UCX_TCP_KEEPIDLE": "inf"}
    assert own_ucx_with(monkeypatch, tmp_path) == usual
    own = {"UCX_LOG_FILE": "/tmp/log", "UCX_NET_DEVICES": "all"}
    assert own_ucx_with(monkeypatch, tmp_path, interface="lo", **own) == usual | own
    devices = {"UCX_NET_DEVICES": "lo"}
    assert own_ucx_with(monkeypatch, tmp_path, interface="lo,127.0.0.1") == usual | devices
    assert own_ucx_with(monkeypatch, tmp_path, ["mlx5_0"], interface="lo") == usual


def test_ucx_without_memory_events_is_refused(monkeypatch):
    monkeypatch.setenv("UCX_MEM_EVENTS", "n")
    assert "UCX crashes when an exchange fails" in ucx.own_ucx(Config())


# --- other tests, over it


@needs_ucx
@pytest.mark.weekly
@pytest.mark.parametrize(
    ("few", "more"),
    [
        ("tests/world/test_several_hosts.py -k set", "tests/world/test_several_hosts.py"),
        ("tests/elastic/test_kills.py -k tcp",
         "tests/elastic/test_kills.py"),
    ],
)  # fmt: skip
def test_other_tests_pass_over_ucx(few: str, more: str, tmp_path: Path, full: bool) -> None:
    """tests/cpp runs the communicators between hosts over UCX; these tests add Python's half."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    command += [] if full else ["-m", "not slow"]
    ended = subprocess.run(
        [*command, *(more if full else few).split(), f"--basetemp={tmp_path / 'tests'}"],
        cwd=ROOT,
        env=os.environ | OVER_UCX,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=1200,
    )
    assert ended.returncode == 0, ended.stdout[-8000:]
    assert re.search(r"UCX 1\.[\d.]+ \(tcp\)", ended.stdout)  # init() logs it
