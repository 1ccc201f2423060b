# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer with op=Adasum: local steps, combined."""

from __future__ import annotations

import copy

import pytest
import torch
from on_ranks import on_ranks
from torch import nn
from training import assert_same_on_all_ranks

import torch_ring as hvd


@pytest.mark.parametrize(("transport", "size", "fp16"), [("shm", 4, False), ("tcp", 2, True)])
@on_ranks()
def test_the_changes_of_local_steps_are_combined(transport, size, fp16: bool) -> None:
    """Each rank's own step changes the weights; the changes are combined."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    model[0].bias.requires_grad_(False)
    twin = copy.deepcopy(model)
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(
        plain,
        compression=hvd.Compression.fp16 if fp16 else hvd.Compression.none,
        op=hvd.Adasum,
        backward_passes_per_step=2,
    )
    local = torch.optim.Adam(twin.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(hvd.rank())
    for step in range(3):
        start = copy.deepcopy(model)
        optimizer.zero_grad()
        local.zero_grad()
        for part in torch.randn(2, 4, 5, generator=generator):  # two passes, which add up
            model(part).square().mean().backward()
            twin(part).square().mean().backward()
        optimizer.synchronize()  # nothing
        optimizer.step()
        scheduler.step()
        local.param_groups[0]["lr"] = 0.01 * 0.5**step
        local.step()
        for after, before, own in zip(
            *map(nn.Module.parameters, (model, start, twin)), strict=True
        ):
            if not after.requires_grad:
                assert torch.equal(after, before)
                continue
            change = hvd.allreduce(own.detach() - before.detach(), op=hvd.Adasum)
            tolerance = 2e-3 * 0.02 if fp16 else 1e-6
            torch.testing.assert_close(after, before + change, rtol=1e-5, atol=tolerance)
        twin.load_state_dict(model.state_dict())
    assert_same_on_all_ranks(*model.parameters())
    with pytest.raises(AssertionError, match="Adasum"), optimizer.skip_synchronize():
        pass


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_what_adasum_cannot_do_is_refused(size) -> None:
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
