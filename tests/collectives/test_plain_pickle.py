# SPDX-License-Identifier: Apache-2.0
"""Pickles of plain data: their contents, and the functions out of a stranger's reach."""

import argparse
import collections
import datetime
import os
import pathlib
import pickle
import random
import types

import numpy as np
import pytest
import torch

from torch_ring.collectives.plain_pickle import _reduced_tensor, dumps, loads_plain

PLAIN = {
    "numbers": [0, -5, 1 << 200, 0.5, float("inf"), 1 + 2j, True, None],
    "texts": ["", "é" * 70_000, b"", b"x" * 70_000, bytearray(b"abc")],
    "containers": [(), (1,), (1, 2, 3, 4), {1: {"a": [2]}}, {1, 2}, frozenset([3])],
    "collections": [
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, a=[1]),
        collections.deque([1, 2], maxlen=5),
        collections.Counter("aab"),
    ],
    "ranges": [range(3, 9, 2), slice(1, None, 2)],
    "times": [
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone(datetime.timedelta(hours=1))),
        *(datetime.date(2026, 1, 2), datetime.time(1, 2), datetime.timedelta(1, 2, 3)),
    ],
    "paths": [pathlib.Path("a") / "b", pathlib.Path("/")],
    "namespaces": [argparse.Namespace(lr=0.1, layers=[1, 2]), types.SimpleNamespace(a=1)],
    "torch": [torch.float8_e4m3fn, torch.bool, torch.Size([2, 3]), torch.device("cpu")],
    "dtypes": [np.dtype("f4"), np.dtype(">i8"), np.dtype("M8[ns]")],
    "scalars": [np.float32(0.1), np.int64(-3), np.bool_(True), np.complex64(1j), np.str_("é")],
}


READERS = pytest.mark.parametrize("read", [loads_plain, pickle.loads])


@READERS
@pytest.mark.parametrize("kind", PLAIN)
def test_plain_data(kind, read):
    got = read(dumps(PLAIN[kind]))
    assert got == PLAIN[kind]
    assert [type(value) for value in got] == [type(value) for value in PLAIN[kind]]


DTYPES = ["float32", "bfloat16", "complex64", "bool", "complex32", "uint16", "uint64"]
# torch can make tensors of some of these, but cannot compute with them.
DTYPES += ["uint1", "int4", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits16"]


@READERS
def test_tensors(read):
    for dtype in [getattr(torch, name) for name in DTYPES if hasattr(torch, name)]:
        base = torch.empty(4, 6, dtype=dtype)
        storage = base.untyped_storage()
        values = torch.arange(storage.nbytes()) % (2 if dtype == torch.bool else 256)
        storage.copy_(values.to(torch.uint8).untyped_storage())
        for tensor in (base, base.t(), base[1:3, ::2], base[0, 0], base[:0], base[:1].expand(5, 6)):
            got = read(dumps([tensor]))[0]
            assert (got.dtype, got.shape, got.stride()) == (dtype, tensor.shape, tensor.stride())
            assert got.storage_offset() == tensor.storage_offset()
            assert bytes(got.untyped_storage()) == bytes(storage)
        parameter = read(dumps(torch.nn.Parameter(base, requires_grad=False)))
        assert type(parameter) is torch.nn.Parameter
        assert parameter.dtype == dtype
    assert read(dumps(torch.ones(24))).resize_(100).numel() == 100


@READERS
def test_tensors_with_more_than_values(read):
    assert read(dumps(torch.ones(3, requires_grad=True))).requires_grad
    parameter = read(dumps(torch.nn.Parameter(torch.ones(3))))
    assert type(parameter) is torch.nn.Parameter
    meta = read(dumps(torch.empty(3, 4, dtype=torch.half, device="meta").t()))
    assert (meta.shape, meta.stride(), meta.dtype) == ((4, 3), (1, 4), torch.half)
    state = torch.nn.Linear(2, 3).state_dict()
    got = read(dumps(state))
    assert got._metadata == state._metadata
    assert all(torch.equal(got[name], state[name]) for name in state)


@READERS
def test_arrays(read):
    for code in ("f4", ">f8", "i1", "?", "c16", "S3", "U2", "M8[s]", "m8[ms]"):
        base = np.arange(24).astype("i8").astype(code).reshape(4, 6)
        one = base[0, :1].reshape(())
        for array in (base, np.asfortranarray(base), base[1:3, ::2], base[:0], one):
            got = read(dumps(array))
            assert np.array_equal(got, array)
            assert (got.dtype, got.shape) == (array.dtype, array.shape)
            assert got.flags.writeable
            assert got.flags.fnc == array.flags.fnc


class Own:
    """A class of a user's program."""


class Runs:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function, *arguments, state=None):
        self.call = (function, arguments, state)

    def __reduce__(self):
        return self.call


class Inherited(np.ndarray):
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Own(), "test_plain_pickle.Own"),
        (Runs(os.system, "false"), "posix.system"),
        (Runs(getattr, "a", "b"), "builtins.getattr"),
        (Runs(torch.load, "file"), "torch.serialization.load"),
        (Runs(torch.storage._load_from_bytes, b""), "torch.storage._load_from_bytes"),
        (Runs(torch._tensor._rebuild_from_type_v2, print, int, (), {}), "_rebuild_from_type_v2"),
        (Runs(torch._utils._rebuild_tensor_v2, 1, 0, (1,), (1,), False, {}), "_rebuild_tensor_v2"),
        (Runs(torch._utils._rebuild_parameter, 1, True, {}), "a parameter that is none"),
        (Runs(torch._utils._rebuild_parameter, torch.ones(1), True, {1: list}), "a parameter"),
        (np.array([Own()], dtype=object), "_reconstruct"),
        (np.zeros(2, dtype="i4,f8"), "_reconstruct"),
        (np.zeros(2).view(Inherited), "_reconstruct"),
        (torch.ones(2).to_sparse(), "_rebuild_sparse_tensor"),
        ([Runs(collections.OrderedDict, state={"keys": 1})], "attributes of an object that has no"),
        (Runs(torch.Size, (1,), state={"a": 1}), "attributes of an object that has none"),
        (Runs(types.SimpleNamespace, state={"__class__": 1}), "attributes of an object that has"),
        (Runs(bytearray, 1 << 40), "a bytearray that is none"),
    ],
)
def test_what_is_not_plain_is_named(value, named):
    with pytest.raises(pickle.UnpicklingError, match=named):
        loads_plain(dumps(value))


WRONG_FIELDS = [
    *[("offset", 1), ("offset", -1), ("size", (4,)), ("size", (1 << 61,)), ("size", (3, 3))],
    *[("size", (1.5,)), ("stride", (2,)), ("stride", (-1,)), ("requires_grad", "yes")],
    *[("data", b"123"), ("data", "twelve bytes"), ("data", torch.ones(3))],
    *[("device", torch.float64), ("dtype", "float32"), ("dtype", torch.float64)],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint32])
def test_tensors_that_are_wrong(dtype):
    function, arguments = _reduced_tensor(torch.tensor([1, 2, 3], dtype=dtype))
    names = ("data", "device", "dtype", "offset", "size", "stride", "requires_grad")
    right = dict(zip(names, arguments, strict=True))
    assert loads_plain(dumps(Runs(function, *right.values()))).tolist() == [1, 2, 3]
    for name, value in WRONG_FIELDS:
        written = dumps(Runs(function, *(right | {name: value}).values()))
        with pytest.raises(pickle.UnpicklingError):
            loads_plain(written)


def test_a_call_of_what_was_not_named_and_setting_attributes_of_functions():
    name = b"\x8c\x0bcollections\x8c\x07Counter\x93"  # STACK_GLOBAL
    good = b"\x80\x04" + name + b")R."
    assert loads_plain(good) == collections.Counter()
    for text in (
        b"\x80\x04" + b"\x8c\x01a)R.",  # calls a text
        b"\x80\x04" + b"\x8c\x08builtins\x8c\x04list\x93)R.",  # is only named
        b"\x80\x04" + name + b"N}\x8c\x06updateK\x01s\x86b.",  # BUILD of a class
        b"\x80\x04" + name + b")\x81.",  # NEWOBJ
        b"\x80\x04" + name + b"\x8c\x01aK\x01s.",  # SETITEM of a class
        b"\x80\x04)(K\x01e.",  # APPENDS to a tuple
        # APPEND to a namespace, whose attribute `append` is str
        b"\x80\x04\x8c\x05types\x8c\x0fSimpleNamespace\x93)R}\x8c\x06append"
        b"\x8c\x08builtins\x8c\x03str\x93sbK\x01a.",
        b"\x80\x04cos\nsystem\n.",  # GLOBAL
        b"\x80\x04(S'false'\nios\nsystem\n.",  # INST
        b"\x80\x04\x82\x01.",  # EXT1
        b"\x80\x04X\x01\x00\x00\x00aQ.",  # BINPERSID
    ):
        with pytest.raises(pickle.UnpicklingError):
            loads_plain(text)


def test_damaged_pickles_are_refused_and_nothing_else():
    """After any change, the result is plain data or an UnpicklingError."""
    dice, kinds = random.Random(1), set()
    good = bytes(dumps({**PLAIN, "tensor": torch.ones(3), "array": np.arange(3), "own": Own}))
    good = good.replace("é".encode() * 70_000, b"").replace(b"x" * 70_000, b"")
    small = bytes(dumps([1, "a", (2.5, {3}), torch.ones(2), np.float64(1), {"a": [1, 2]}]))
    for case in range(4000):
        data = bytearray(small if case % 2 else good)
        for _ in range(dice.randrange(1, 5)):
            at = dice.randrange(len(data))
            if dice.random() < 0.5:
                data[at] = dice.randrange(256)
            else:
                data[at : at + dice.randrange(3)] = dice.randbytes(dice.randrange(3))
        try:
            kinds.add(type(loads_plain(bytes(data))))
        except pickle.UnpicklingError as error:
            kinds.add(type(error))
    assert pickle.UnpicklingError in kinds
    assert list in kinds
