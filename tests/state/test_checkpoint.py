"""Checkpoints: they come back on all ranks, are whole or the old one, and fail on all ranks."""

from __future__ import annotations

import os
import signal
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import pytest
import torch
from pool import run
from torch import nn

import torch_ring as hvd
from torch_ring.checkpoint import CheckpointError, load, save


def state_of_everything() -> dict[str, Any]:
    torch.manual_seed(3)
    dtypes = (torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.float64)
    return {
        "tensors": [torch.randn(3, 4).to(dtype) for dtype in dtypes],
        "layouts": (
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.ones(2).t(),
        ),
        "none": torch.empty(0, 3),
        "sparse": torch.eye(3).to_sparse(),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "ordered": OrderedDict(a=1, b=torch.tensor(2)),
        "counted": Counter("aab"),
        "module": nn.BatchNorm1d(2).state_dict(),  # with versions, as an attribute
        "numbers": {"epoch": 3, "lr": 0.1, "big": 1 << 70, "name": "x", "flags": [True, None]},
    }


def assert_equal(got: Any, want: Any) -> None:
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.layout, got.device.type) == (want.dtype, want.layout, "cpu")
        assert torch.equal(got.to_dense(), want.to_dense())
        if want.layout == torch.strided:
            assert got.stride() == want.stride()
    elif isinstance(want, dict):
        assert (type(got), list(got)) == (type(want), list(want))
        assert getattr(got, "_metadata", None) == getattr(want, "_metadata", None)
        for key in want:
            assert_equal(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert type(got) is type(want)
        for left, right in zip(got, want, strict=True):
            assert_equal(left, right)
    else:
        assert got == want


def text_of_error(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    return str(caught.value)


def save_and_load(folder: Path) -> list[str]:
    rank = hvd.rank()
    mine = folder / str(rank)  # as if each had a disk of its own: only rank 0's is used
    path = mine / "new" / "checkpoint.pt"
    state = state_of_everything()
    save(path, state if rank == 0 else None)
    assert path.exists() == (rank == 0)
    assert_equal(load(path), state)
    assert_equal(load(str(path), default=None), state)
    save(path, {"epoch": 4})
    assert load(path) == {"epoch": 4}
    assert [file.name for file in mine.rglob("*")] == (["new", path.name] if rank == 0 else [])

    assert load(mine / "missing.pt", default=7) == 7
    assert load(mine / "missing.pt", default=None) is None
    errors = [text_of_error(lambda: load(mine / "missing.pt"))]
    for damaged in (b"", b"no checkpoint", path.read_bytes()[:-100] if rank == 0 else b""):
        if rank == 0:
            (mine / "damaged.pt").write_bytes(damaged)
        errors += [text_of_error(lambda: load(mine / "damaged.pt", default=None))]
    if rank == 0:
        torch.save({"code": Path("x")}, mine / "code.pt")
    errors.append(text_of_error(lambda: load(mine / "code.pt")))
    errors.append(text_of_error(lambda: load(folder)))

    # A failed save leaves the old file.
    errors.append(
        text_of_error(lambda: save(path, {"cannot": text_of_error} if rank else {"f": lambda: 0}))
    )
    if rank == 0:
        (mine / "file").touch()
    errors.append(text_of_error(lambda: save(mine / "file" / "x.pt", {})))
    assert load(path) == {"epoch": 4}
    assert [file.name for file in mine.glob("new/*")] == ([path.name] if rank == 0 else [])
    assert hvd.allgather_object(errors) == [errors] * hvd.size()
    assert all(error.startswith("cannot ") and str(folder / "0") in error for error in errors[:5])
    assert "FileNotFoundError" in errors[0]
    assert "weights_only" in errors[4] or "Weights only" in errors[4]
    assert not any("\n" in error for error in errors)
    return errors


@pytest.mark.parametrize("size", [1, 3])
def test_checkpoints_come_back_on_all_ranks(size, tmp_path):
    for rank in range(size):
        (tmp_path / str(rank)).mkdir()
    assert len(run(save_and_load, size, args=(tmp_path,))[0]) == 8


def die_while_saving(path: Path) -> str:
    save(path, {"epoch": 1})

    def save_half(_state: object, file: IO[bytes]) -> None:
        file.write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    with patch("torch.save", save_half), pytest.raises(hvd.PeerLostError) as caught:
        save(path, {"epoch": 2})
    return str(caught.value)


def test_a_killed_job_leaves_the_previous_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    _, text = run(die_while_saving, 2, args=(path,), may_die={0})
    assert "rank 0" in text
    assert torch.load(path, weights_only=True) == {"epoch": 1}
    assert (tmp_path / "checkpoint.pt.unfinished").read_bytes() != path.read_bytes()


def save_in_a_set(folder: Path) -> None:
    pair = hvd.add_process_set([1, 2])
    if pair.included():
        path = folder / str(hvd.rank()) / "checkpoint.pt"
        save(path, {"rank": torch.tensor(hvd.rank())}, process_set=pair)
        assert load(path, process_set=pair) == {"rank": torch.tensor(1)}


def test_the_first_of_a_process_set_writes(tmp_path):
    run(save_in_a_set, 3, args=(tmp_path,))
    assert [path.name for path in tmp_path.glob("*")] == ["1"]
