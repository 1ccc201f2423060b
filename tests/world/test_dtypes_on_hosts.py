"""Integer averages and all dtypes on several hosts: shared memory inside, a ring between them."""

import os
import shutil

import namespaces
import pytest
from dtype_checks import check_complex, check_integer_averages, check_moves
from pool import run

import torch_ring as hvd

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` (iproute2)"),
]


def check_all() -> None:
    hvd.init()
    check_integer_averages()
    check_complex()
    check_moves()
    hvd.shutdown()


def test_dtypes_on_hosts(hosts):
    env = {"MASTER_ADDR": f"{namespaces.NETWORK}.1", "MASTER_PORT": "29512"}
    where = [hosts[host] for host in (0, 0, 1, 1)]
    run(check_all, len(where), initialized=False, transport="", env=env, namespaces=where)
