# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: all ranks get them back, saves are atomic, and errors reach all ranks."""

from __future__ import annotations

import argparse
import datetime
import os
import random
import signal
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from pool import run
from torch import nn

import torch_ring as hvd
from torch_ring.checkpoint import CheckpointError, load, save
from torch_ring.collectives import plain_pickle


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
        "numpy": {
            "best": np.float64(0.5),
            "scalars": [np.int64(-3), np.bool_(True), np.float16(2), np.datetime64(7, "s")],
            np.int64(3): "a key",
            "arrays": [
                np.arange(6).reshape(2, 3),
                np.asfortranarray(np.ones((2, 3), "f4")),
                np.empty((0, 2)),
                np.array(["a", "bc"]),
                np.array(True),
            ],
            "dtype": np.dtype("f4"),
            "rng": np.random.RandomState(1).get_state(),
            "rng as a dict": np.random.RandomState(1).get_state(legacy=False),
            "generator": np.random.default_rng(1).bit_generator.state,
        },
        "python": {
            "rng": random.Random(1).getstate(),
            "args": argparse.Namespace(lr=0.1, folder=Path("logs"), layers=[1, 2]),
            "simple": types.SimpleNamespace(a=1),
            "path": Path("a") / "b",
            "when": datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
            "there": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
            "day": datetime.date(2026, 1, 2),
            "took": datetime.timedelta(seconds=5),
            "losses": defaultdict(list, train=[1.0, 2.0]),
            "last": deque([1.0, torch.ones(2)], maxlen=5),
            "sets": [{1, 2}, frozenset([3])],
            "ranges": [range(3), slice(1, None), 1 + 2j, b"bytes", bytearray(b"more")],
        },
        "torch": [torch.get_rng_state(), torch.float16, torch.Size([2]), torch.device("cpu")],
    }


def form(value: Any) -> Any:
    """Return types, layouts and values of a nested structure, to be compared by `==`."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout == torch.strided else None
        return value.dtype, value.layout, value.device, strides, value.to_dense().tolist()
    if isinstance(value, dict):
        metadata = getattr(value, "_metadata", None)  # of a state_dict()
        return type(value), metadata, [(key, form(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), getattr(value, "maxlen", None), [form(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.dtype, value.flags.fnc, value.flags.writeable, value.shape, value.tobytes()
    return type(value), value


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
    assert form(load(path)) == form(state)
    assert form(load(str(path), default=None)) == form(state)
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
        torch.save({"code": Fraction(1, 2)}, mine / "code.pt")
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


def test_checkpoints_come_back_on_all_ranks(tmp_path):
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
    assert len(run(save_and_load, 3, args=(tmp_path,))[0]) == 8


class Own:
    """A class of a user's program; pickle takes it."""


class OwnDict(dict[str, int]):
    """Another one."""


class Twice(torch.Tensor):
    """A tensor with a class of its own."""


@on_ranks(2)
def test_a_file_that_was_saved_can_be_loaded(tmp_path: Path) -> None:
    """save() refuses a value that load() would refuse, on all ranks, and names its place."""
    path = tmp_path / "checkpoint.pt"
    save(path, {"epoch": 1})
    cases = [
        ({"a": {"b": [1, Own()]}}, "state['a']['b'][1] is test_checkpoint.Own"),
        ({"a": 1, Own(): 2}, "is test_checkpoint.Own"),
        (Own(), "state is test_checkpoint.Own"),
        ({"f": lambda: 0}, "state['f'] is builtins.function"),
        ({"x": OwnDict(a=1)}, "state['x'] is test_checkpoint.OwnDict"),
        ({"x": (Fraction(1, 2),)}, "state['x'][0] is fractions.Fraction"),
        ({"x": torch.ones(2).as_subclass(Twice)}, "state['x'] is test_checkpoint.Twice"),
        ({"x": np.array([Own()], dtype=object)}, "state['x'] is numpy.ndarray"),
        ({"x": argparse.Namespace(own=Own())}, "state['x'] is argparse.Namespace"),
    ]
    for state, place in cases:
        error = text_of_error(lambda state=state: save(path, state if hvd.rank() == 0 else None))
        assert hvd.allgather_object(error) == [error] * hvd.size()
        assert error.startswith(f"cannot save the checkpoint {path}: TypeError: "), error
        assert f"{place}, which no checkpoint takes: save numbers, texts or tensors" in error, error
    assert load(path) == {"epoch": 1}
    assert os.listdir(path.parent) == [path.name]
    hvd.barrier()  # before rank 0 writes the next one beside it
    with torch.serialization.safe_globals([Own]):
        save(path, {"own": Own()})
        assert type(load(path)["own"]) is Own


def test_a_checkpoint_runs_no_code_of_its_file(tmp_path):
    """load() replaces NumPy's functions, which trust their arguments, by its own."""

    class Forged:
        def __reduce__(self) -> Any:
            return np.dtype, ("O",)

    class TooLarge:
        def __reduce__(self) -> Any:
            return np.ndarray, ((1 << 40,), np.dtype("f8"), bytearray(8), 0, None, "C")

    def check() -> None:
        for number, forged in enumerate((Forged(), TooLarge())):
            path = tmp_path / str(number)
            torch.save(forged, path, pickle_module=plain_pickle)
            assert "UnpicklingError" in text_of_error(lambda path=path: load(path))

    hvd.init()
    try:
        check()
    finally:
        hvd.shutdown()


def die_while_saving(path: Path) -> str:
    save(path, {"epoch": 1})

    def save_half(_state: object, file: IO[bytes], **_more: object) -> None:
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
