# SPDX-License-Identifier: Apache-2.0
"""The same training gives the same bits in every run, with any delays of its operations.

tests/cpp/same_bits_test.cc compares single collectives.
"""

import hashlib
import random
import time

import torch
from host_fixtures import on_hosts, run_on_hosts
from pool import run
from torch import Tensor, nn

import torch_ring as hvd

TRAININGS = 4
COUNTS = (20, 800, 3000, 12_000, 40_001, 150_000)  # inline or not, gathered or not, and longer


def numbers(count: int, seed: int) -> Tensor:
    """Return numbers of very different magnitudes: their sum depends on the order of additions."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(count, generator=generator) * 8 - 4
    return torch.randn(count, generator=generator) * 10**exponents


def weights_after_training() -> set[str]:
    """Return the digests of the weights after each of some equal trainings."""
    digests = set()
    for number in range(TRAININGS):
        chance = random.Random(100 * number + hvd.rank())
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 7))
        for parameter in model.parameters():
            parameter.register_hook(lambda _, chance=chance: time.sleep(chance.random() * 0.003))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
        )
        for step in range(4):
            batch = numbers(16 * 40, 10 * step + hvd.rank()).view(16, 40)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        bits = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
        digests.add(hashlib.sha256(bits).hexdigest())
    return digests


def test_every_run_has_the_same_bits():
    # Buckets that are sent during backward, and fused if they meet.
    env = {"TORCH_RING_BUCKET_BYTES": "50000"}
    found = run(weights_after_training, 3, env=env)
    assert len(set.union(*found)) == 1


OF_HOSTS = (0, 1, 0, 1)
UNEVEN = (3.69140625, -12.59375, 8.8125, 9.143352508544922e-05)  # their order changes the sum


def sums_of_16_bits() -> None:
    """An element's float32 sum is that of each host's ranks, then of the hosts, rounded once."""
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-10, 7, (4, max(COUNTS)), generator=generator)
    inputs = torch.randn(4, max(COUNTS), generator=generator) * torch.exp2(exponents)
    inputs[:, :20] = torch.tensor(UNEVEN)[:, None]
    for dtype in (torch.float16, torch.bfloat16):
        ranks = inputs.to(dtype)
        a, b, c, d = ranks.float()
        expected = ((a + c) + (b + d)).to(dtype)
        if dtype == torch.float16:
            assert (expected[:20] != (a + b + c + d).to(dtype)[:20]).all()
        for count in COUNTS:
            own = ranks[hvd.rank(), :count]
            assert torch.equal(hvd.allreduce(own, op=hvd.Sum), expected[:count])
            part = hvd.reducescatter(own, op=hvd.Sum)
            assert torch.equal(hvd.allgather(part), expected[:count])


class TestTwoHosts:
    pytestmark = on_hosts

    def test_every_run(self, hosts):
        env = {"TORCH_RING_BUCKET_BYTES": "50000"}
        found = run_on_hosts(weights_after_training, hosts, [0, 0, 1, 1], env=env)
        assert len(set.union(*found)) == 1

    def test_sums_of_16_bit_floats_are_added_host_by_host(self, hosts):
        run_on_hosts(sums_of_16_bits, hosts, OF_HOSTS)
