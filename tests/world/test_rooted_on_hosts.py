"""reduce, gather and scatter on several hosts: shared memory inside, a ring between them."""

import os
import shutil

import namespaces
import pytest
from pool import run
from rooted_checks import check_every_root

import torch_ring as hvd

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` (iproute2)"),
]


def check_all() -> None:
    hvd.init()
    check_every_root()
    hvd.shutdown()


def test_rooted_on_hosts(hosts):
    """Rank 1 is on no lane, as the second host has no second rank."""
    env = {"MASTER_ADDR": f"{namespaces.NETWORK}.1", "MASTER_PORT": "29514"}
    where = [hosts[host] for host in (0, 0, 1)]
    run(check_all, len(where), initialized=False, transport="", env=env, namespaces=where)
