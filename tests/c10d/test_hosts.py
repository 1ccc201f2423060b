# SPDX-License-Identifier: Apache-2.0
"""The backend ring between hosts: groups of torch.distributed find the address of their store."""

import os
import shutil

import namespaces
import pytest
import torch
import torch.distributed as dist
from pool import run
from slow import slow

import torch_ring as hvd

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` (iproute2)"),
]


def sum_of_ranks(group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def in_groups(backend: str) -> tuple[float, float, float]:
    dist.init_process_group(backend)
    try:
        hvd.init()  # over the store of the default group
        assert hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item() == 3.0
        hvd.shutdown()
        swapped = dist.new_group([1, 0], backend="ring")  # not a part of that world: it has its own
        third = dist.new_group([0, 2], backend="ring")
        of_all = sum_of_ranks(dist.new_group(backend="ring"))
        of_two = sum_of_ranks(swapped) if dist.get_rank() < 2 else 3.0
        return of_all, of_two, sum_of_ranks(third) if dist.get_rank() != 1 else 4.0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["ring", slow("gloo")])
def test_groups_between_hosts(hosts, backend):
    """The namespaces have no default route: only the store's route leads to the other ranks."""
    env = {"MASTER_ADDR": f"{namespaces.NETWORK}.1", "MASTER_PORT": "29519"}
    env |= {"GLOO_SOCKET_IFNAME": "eth0", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    options = {"initialized": False, "transport": "", "env": env}
    where = [hosts[host] for host in (0, 0, 1)]
    results = run(in_groups, len(where), args=(backend,), namespaces=where, **options)
    assert results == [(6.0, 3.0, 4.0)] * 3
