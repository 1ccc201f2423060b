# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer with op=Adasum: local steps, combined."""

from __future__ import annotations

import copy

import pytest
import torch
from pool import run
from torch import Tensor, nn
from training import assert_same_on_all_ranks

import torch_ring as hvd


def adaptive_sum(a: Tensor, b: Tensor) -> Tensor:
    ab, aa, bb = ((x.double() * y.double()).sum() for x, y in ((a, b), (a, a), (b, b)))
    of_a, of_b = (1 - ab / (2 * norm) if norm else 1.0 for norm in (aa, bb))
    return (of_a * a + of_b * b).to(a.dtype)


def tree_sum(changes: list[Tensor]) -> Tensor:
    while len(changes) > 1:
        changes = [adaptive_sum(*changes[i : i + 2]) for i in range(0, len(changes), 2)]
    return changes[0]


def compare_with_local_steps(fp16: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    model[0].bias.requires_grad_(False)
    twins = [copy.deepcopy(model) for _ in range(size)]
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(
        plain,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if fp16 else hvd.Compression.none,
        op=hvd.Adasum,
        backward_passes_per_step=2,
    )
    assert isinstance(optimizer, torch.optim.Adam)
    locals_ = [torch.optim.Adam(twin.parameters(), lr=0.01) for twin in twins]
    for step in range(3):
        data = torch.randn(size, 2, 4, 5, generator=torch.Generator().manual_seed(step))
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.zero_grad()
        for part in data[rank]:  # two passes, which add up on this rank
            model(part).square().mean().backward()
        optimizer.synchronize()  # nothing
        optimizer.step()
        scheduler.step()
        for twin, local, parts in zip(twins, locals_, data, strict=True):
            local.zero_grad()
            for part in parts:
                twin(part).square().mean().backward()
            local.param_groups[0]["lr"] = 0.01 * 0.5**step
            local.step()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                assert torch.equal(parameter, start[name])
                continue
            changes = [dict(twin.named_parameters())[name] - start[name] for twin in twins]
            want = start[name] + tree_sum(changes)
            tolerance = 2e-3 * 0.02 if fp16 else 1e-6
            torch.testing.assert_close(parameter, want, rtol=1e-5, atol=tolerance)
        for twin in twins:
            twin.load_state_dict(model.state_dict())
    assert_same_on_all_ranks(*model.parameters())
    with pytest.raises(AssertionError, match="Adasum"), optimizer.skip_synchronize():
        pass


@pytest.mark.parametrize(
    ("transport", "size", "fp16"), [("tcp", 2, False), ("shm", 4, False), ("shm", 2, True)]
)
def test_the_changes_of_local_steps_are_combined(transport, size, fp16):
    run(compare_with_local_steps, size, transport=transport, args=[fp16])


def check_refusals() -> None:
    model = nn.Linear(2, 1)

    def wrap(**kwargs: object) -> None:
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum, **kwargs
        )

    if hvd.size() == 3:
        with pytest.raises(ValueError, match="power of two of ranks, not 3"):
            wrap()
        return
    with pytest.raises(ValueError, match="predivide"):
        wrap(gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="with a state"):
        wrap(compression=hvd.Compression.int8())
    model = nn.Linear(2, 1 + hvd.rank())
    with pytest.raises(hvd.MismatchError, match="different optimizers"):
        wrap()


@pytest.mark.parametrize("size", [2, 3])
def test_what_adasum_cannot_do_is_refused(size):
    run(check_refusals, size)
