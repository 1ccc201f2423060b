"""The state of compressors, in a resumed run and after a skipped step."""

from typing import Any

import pytest
import torch
from pool import run
from torch import nn
from torch.optim import SGD
from training import assert_same_on_all_ranks, joined_batches, loss_of, make_model, part, train
from training_compressors import COMPRESSORS

import torch_ring as hvd


def check_resumed_run(name: str) -> None:
    batches = [part(batch) for batch in joined_batches(steps=6)]

    def start(model: nn.Module, compressor: Any) -> torch.optim.Optimizer:
        return hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            compression=compressor,
        )

    whole, begun, forgetful = make_model(), make_model(), make_model()
    train(whole, start(whole, COMPRESSORS[name]()), batches)
    compressor = COMPRESSORS[name]()
    train(begun, start(begun, compressor), batches[:3])
    saved = compressor.state_dict()
    assert saved["0.weight"]["error"].any()
    ended, resumed = make_model(), COMPRESSORS[name]()
    for model, state in ((ended, saved), (forgetful, {})):
        model.load_state_dict(begun.state_dict())
        resumed = COMPRESSORS[name]()
        resumed.load_state_dict(state)
        train(model, start(model, resumed), batches[3:])
    for left, right in zip(whole.parameters(), ended.parameters(), strict=True):
        assert torch.equal(left, right)
    assert not torch.equal(whole[0].weight, forgetful[0].weight)


def skip_a_step(name: str) -> None:
    """A step that GradScaler skips on all ranks leaves the state unchanged."""
    model = make_model()
    compressor = COMPRESSORS[name]()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), compression=compressor)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, batch in enumerate(joined_batches(steps=4)):
        optimizer.zero_grad()
        before = compressor.state_dict()
        overflow = torch.inf if step == 2 and hvd.rank() == 1 else 1.0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scaler.scale(loss_of(model, part(batch)) * overflow).backward()
        scaler.step(optimizer)
        scaler.update()
        is_unchanged = all(
            torch.equal(compressor.states[parameter][key], value)
            for parameter, state in before.items()
            for key, value in state.items()
        )
        assert is_unchanged == (step in (0, 2)), "before the first step there is no state"
    assert scaler.get_scale() == 512.0
    assert all(p.isfinite().all() for p in model.parameters())
    assert_same_on_all_ranks(*model.parameters())


@pytest.mark.parametrize("name", ["int8", "powersgd", "topk"])
@pytest.mark.parametrize("check", [check_resumed_run, skip_a_step])
def test_the_state(check, name):
    run(check, 2, args=(name,))
