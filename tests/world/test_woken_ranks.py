"""A rank is stopped in the middle of a collective, and wakes up after the others gave up."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pool import error_of, eventually, run
from slow import slow

import torch_ring as hvd
from torch_ring._C import arm_failpoints

COUNT = 1 << 20
STOP = "shared.reduce:1:1:stop"


def outlive(wakes: Path, reduce: Callable[[], object], shared: list[torch.Tensor]) -> bool:
    """Reduce, which stops rank 1 before it writes its half; return whether rank 0 has kept its."""
    pids = hvd.allgather_object(os.getpid())
    hvd.barrier()
    if hvd.rank() == 1:
        arm_failpoints(STOP)
        error_of(reduce)
        arm_failpoints("")
        wakes.touch()
        return False
    kind, text = error_of(reduce)
    assert kind == "TimeoutError", text
    kept = [values.clone() for values in shared]
    # Rank 0 has written its half, in the memory where rank 1 will write the other.
    assert any(values.unique().numel() == 2 for values in kept)
    os.kill(pids[1], signal.SIGCONT)
    assert eventually(wakes.exists, 20.0)
    assert all(map(torch.equal, shared, kept))
    for values in shared:
        values.fill_(3)  # the program goes on with them
        assert (values == 3).all()
    return True


def keep_a_tensor(wakes: Path) -> bool:
    values = hvd.empty_shared(COUNT).fill_(1)
    return outlive(wakes, lambda: hvd.allreduce_(values, op=hvd.Sum, name="x"), [values])


def keep_gradients(wakes: Path) -> bool:
    model = torch.nn.Linear(512, 512, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvd.Sum
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(1, 512)).sum().backward()

    for _ in range(3):
        step()
    gradient = model.weight.grad
    assert gradient is not None
    assert (gradient == 2).all()
    return outlive(wakes, step, [gradient])


@pytest.mark.parametrize("keep", [keep_gradients, slow(keep_a_tensor)])
def test_a_woken_rank_does_not_write_to_tensors_that_others_keep(keep, tmp_path):
    env = {"TORCH_RING_TIMEOUT": "4"}  # a slow start on a loaded machine does not count as late
    kept, _ = run(keep, 2, args=[tmp_path / "woken"], env=env, may_die={1})
    assert kept  # rank 1 may not have ended yet
