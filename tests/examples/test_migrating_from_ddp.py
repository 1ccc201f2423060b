"""docs/migrating-from-ddp.md: its program ends as with DDP, and its claims about DDP hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from pool import run as run_ranks
from ports import free_port
from scripts import ROOT, run
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import torch_ring as hvd


def programs() -> tuple[str, str]:
    """Return the guide's program with DDP and with torch_ring."""
    guide = (ROOT / "docs" / "migrating-from-ddp.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", guide, re.DOTALL)
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "@@"))]
    before, after = (
        "".join(f"{line[1:]}\n" for line in lines if not line.startswith(other)) for other in "+-"
    )
    return before, after


def rendezvous_of_gloo() -> dict[str, str]:
    return {"MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def test_the_program_ends_with_the_same_weights(tmp_path: Path) -> None:
    outputs, models = [], []
    for name, text in zip(("before", "after"), programs(), strict=True):
        folder = tmp_path / name
        folder.mkdir()
        script = folder / "train.py"
        script.write_text(text)
        env = rendezvous_of_gloo() if name == "before" else {}
        first, second = run(script, folder=folder, env=env)
        assert (first.code, second.code, second.output) == (None, None, "")
        outputs.append([float(loss) for loss in re.findall(r"loss (\S+)", first.output)])
        models.append(torch.load(folder / "model.pt"))
    assert len(outputs[0]) == 3
    assert outputs[0][-1] < outputs[0][0] / 2
    assert outputs[0] == pytest.approx(outputs[1], rel=1e-4)
    torch.testing.assert_close(models[1], models[0], rtol=1e-4, atol=1e-6)


class Branches(nn.Module):
    """Uses one of two layers, and never the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.layers[branch](x)


def beside_ddp(port: int) -> dict[str, torch.Tensor]:
    """Accumulate over three passes, on branches that differ between the ranks; clip; step."""
    rank = hvd.rank()
    store = torch.distributed.TCPStore("127.0.0.1", port, 2, rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    theirs, ours = Branches(), Branches()
    ours.load_state_dict(theirs.state_dict())
    ddp = DistributedDataParallel(theirs, find_unused_parameters=True)
    theirs_optimizer = SGD(ddp.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(SGD(ours.parameters(), lr=0.1), ours.named_parameters())
    generator = torch.Generator().manual_seed(rank)
    for step in range(2):
        passes = [torch.randn(3, 4, generator=generator) for _ in range(3)]
        for index, x in enumerate(passes):
            branch = (rank + step) % 2
            if index < 2:
                with ddp.no_sync():
                    ddp(x, branch).square().mean().backward()
                with optimizer.no_sync():
                    ours(x, branch).square().mean().backward()
            else:
                ddp(x, branch).square().mean().backward()
                ours(x, branch).square().mean().backward()
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), name
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad, msg=name)
        for model, stepping in ((ours, optimizer), (theirs, theirs_optimizer)):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            stepping.step()
            stepping.zero_grad()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    torch.distributed.destroy_process_group()
    return ddp.state_dict()


def test_no_sync_and_unused_parameters_beside_ddp() -> None:
    saved, _ = run_ranks(beside_ddp, 2, args=(free_port(),), kind="ddp")
    assert all(name.startswith("module.") for name in saved)
    consume_prefix_in_state_dict_if_present(saved, "module.")
    Branches().load_state_dict(saved)
