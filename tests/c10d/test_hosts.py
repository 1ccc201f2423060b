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
from torch.distributed.fsdp import fully_shard

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


def train_a_shard() -> list[float]:
    """Return the weights after a step of FSDP2."""
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(4, 3))
    model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.weight.full_tensor().flatten().tolist()


def in_groups(backend: str) -> tuple[float, float, float, list[float]]:
    dist.init_process_group(backend)
    try:
        hvd.init()  # over the store of the default group
        assert hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item() == 3.0
        hvd.shutdown()
        swapped = dist.new_group([1, 0], backend="ring")  # not a part of that world: it has its own
        third = dist.new_group([0, 2], backend="ring")
        of_all = dist.new_group(backend="ring")
        sums = [sum_of_ranks(of_all)]
        sums.append(sum_of_ranks(swapped) if dist.get_rank() < 2 else 3.0)
        sums.append(sum_of_ranks(third) if dist.get_rank() != 1 else 4.0)
        return *sums, train_a_shard() if backend == "ring" else []
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["ring", slow("gloo")])
def test_groups_between_hosts(hosts, backend):
    """The namespaces have no default route: only the store's route leads to the other ranks."""
    env = {"MASTER_ADDR": f"{namespaces.NETWORK}.1", "MASTER_PORT": "29519"}
    env |= {"GLOO_SOCKET_IFNAME": "eth0", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    where = [hosts[host] for host in (0, 0, 1)]
    results = run(
        in_groups,
        len(where),
        args=(backend,),
        initialized=False,
        transport="",
        env=env,
        namespaces=where,
    )
    assert [each[:3] for each in results] == [(6.0, 3.0, 4.0)] * 3
    assert results[0][3] == results[1][3] == results[2][3]
    assert bool(results[0][3]) == (backend == "ring")
