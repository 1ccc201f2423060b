# SPDX-License-Identifier: Apache-2.0
"""dumps, loads_plain, ...: pickles of plain data, and readers that run no foreign code.

A pickle is a program: `pickle.loads` runs any code that its writer has put in. `loads_plain` takes
only the few instructions that plain data need, and calls only functions of an explicit list. These
functions check their arguments and run no code from them. So `dumps` pickles a tensor as a call of
a function of this module: torch's own read a storage with `torch.load`, and do not check that a
tensor lies within it.

A checkpoint may hold the same data: `torch.save` writes it with this module's `Pickler`, and
`torch.load` reads it with `plain_globals`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import datetime
import io
import math
import pathlib
import pickle
import re
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

with contextlib.suppress(ImportError):  # torch works without it, too
    import numpy as np

__all__ = ["Pickler", "PlainData", "dumps", "loads_plain", "plain_globals"]

_PROTOCOL = 4  # the reader knows the instructions of this one


def dumps(obj: Any) -> memoryview:
    """Return the pickle of an object. Raises the errors of `pickle.dumps`."""
    file = io.BytesIO()
    _TensorPickler(file, _PROTOCOL).dump(obj)
    return file.getbuffer()


def loads_plain(data: bytes | memoryview) -> Any:
    """Return the object of a pickle that `dumps` has written, if it is plain data.

    Plain data are None, numbers, texts, bytes and the containers of builtins and collections,
    namespaces, dates, times and paths, dense tensors, parameters, dtypes, devices and sizes of
    torch, arrays, scalars and dtypes of NumPy, and `PlainData`.

    Raises:
        pickle.UnpicklingError: the pickle has something else; names it.
    """
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # damaged data may cause any error
        raise pickle.UnpicklingError(
            f"something that is not plain data, or is damaged ({type(error).__name__})"
        ) from None


class PlainData:
    """Base of classes whose instances are plain data, too.

    A subclass defines __reduce__, which returns the class and its arguments; its constructor must
    check the arguments.
    """

    def __init_subclass__(cls) -> None:
        _CALLABLE[cls.__module__, cls.__qualname__] = cls


def plain_globals() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return the globals for torch.serialization.safe_globals, without those of torch itself.

    A checkpoint may call all of them, even those that a pickle between ranks may only name, such as
    `list`.
    """
    named = (_CALLABLE | _NAMED).items()
    return [
        (found, f"{module}.{name}")
        for (module, name), found in named
        if module.partition(".")[0] not in ("torch", "torch_ring")
    ]


class Pickler(pickle.Pickler):
    """Pickles arrays, namespaces, and containers that torch.load cannot fill as one call each."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the call that makes an object anew; NotImplemented leaves that to its class."""
        if type(obj) is collections.deque:
            return collections.deque, (list(obj), obj.maxlen)
        if type(obj) is collections.defaultdict:
            return collections.defaultdict, (obj.default_factory, dict(obj))
        if type(obj) is argparse.Namespace:
            return argparse.Namespace, (), vars(obj)
        return _reduced_array(obj) if _HAS_NUMPY else NotImplemented


class _TensorPickler(Pickler):
    """Pickles tensors, too; `torch.save` would write their data beside the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the call that makes an object anew; NotImplemented leaves that to its class."""
        return _reduced_tensor(obj) if type(obj) is Tensor else super().reducer_override(obj)


def _reduced_tensor(obj: Tensor) -> Any:
    """Return the call of `_tensor` for a dense tensor, and torch's own reduction of others."""
    function, arguments, *rest = obj.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
    if len(arguments) != _DENSE.get(function):
        return function, arguments, *rest
    storage = obj.untyped_storage()
    local = storage.cpu()  # type: ignore[no-untyped-call]
    data = ctypes.string_at(local.data_ptr(), local.nbytes())
    return _tensor, (data, str(storage.device), obj.dtype, *arguments[1:5])


# torch's functions that make a dense tensor, and the number of their arguments for a plain one: one
# that is conjugated, for example, has more.
_DENSE = {torch._utils._rebuild_tensor_v2: 6, torch._utils._rebuild_tensor_v3: 7}
_HAS_NUMPY = "numpy" in sys.modules


def _reduced_array(obj: Any) -> Any:
    """Return calls of NumPy's own names that set no state: NumPy would trust that state."""
    if type(obj) is np.ndarray and _is_plain(obj.dtype):
        order: Literal["C", "F"] = "F" if obj.flags.fnc else "C"
        return np.ndarray, (obj.shape, obj.dtype, bytearray(obj.tobytes(order)), 0, None, order)
    if isinstance(obj, np.dtype) and _is_plain(obj):
        return np.dtype, (obj.str,)
    return NotImplemented  # a scalar is a call with a dtype already


# --- functions that make plain data anew


def _require(is_plain: bool, found: str) -> None:
    if not is_plain:
        raise pickle.UnpicklingError(found)


def _array(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    data: bytearray,
    offset: int,
    strides: None,
    order: Any,
) -> np.ndarray[Any, Any]:
    _require(
        isinstance(dtype, np.dtype)
        and _are_sizes(shape)
        and type(data) is bytearray
        and math.prod(shape) * dtype.itemsize == len(data)
        and offset == 0
        and strides is None,
        "an array of another size than its data",
    )
    made: np.ndarray[Any, Any] = np.ndarray(shape, dtype, data, order=order)
    return made


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    return _array((), dtype, bytearray(data), 0, None, "C")[()]


def _dtype(code: str) -> np.dtype[Any]:
    is_plain = re.fullmatch(r"[<>|=][biufcSUmM]\d{1,9}(\[\d{0,9}\w{1,3}\])?", code) is not None
    _require(is_plain, "a dtype that is none of plain values")
    return np.dtype(code)


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufcSUmM" and dtype.names is None


def _tensor(
    data: bytes,
    device: str,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Tensor:
    """Return a tensor after a check that it lies within its storage: torch does not check that."""
    _require(
        type(data) is bytes
        and type(device) is str
        and isinstance(dtype, torch.dtype)
        and _are_sizes((offset, *size, *stride)),
        "a tensor that is none",
    )
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    is_within = 0 in size or (last + 1) * dtype.itemsize <= len(data)
    _require(is_within, "a tensor beyond its storage")
    content = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    ctypes.memmove(content.data_ptr(), data, len(data))
    storage = content.to(device).untyped_storage()
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, size, stride)
    tensor.requires_grad = requires_grad
    return tensor


def _meta_tensor(
    dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> Tensor:
    return torch.empty_strided(
        size, stride, dtype=dtype, device="meta", requires_grad=requires_grad
    )


def _parameter(data: Tensor, requires_grad: bool, hooks: object) -> torch.nn.Parameter:
    _require(type(data) is Tensor and not hooks, "a parameter that is none")
    return torch.nn.Parameter(data, requires_grad)


def _bytearray(data: bytes = b"") -> bytearray:
    _require(type(data) is bytes, "a bytearray that is none")
    return bytearray(data)


def _are_sizes(numbers: tuple[int, ...]) -> bool:
    return all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)


# --- the reader

_Names = dict[tuple[str, str], Any]


def _by_name(*kinds: type) -> _Names:
    return {(kind.__module__, kind.__qualname__): kind for kind in kinds}


# (module, name) -> the function to call; functions of this module replace torch's and NumPy's.
_CALLABLE: _Names = {
    **_by_name(complex, range, slice),
    **_by_name(collections.Counter, collections.OrderedDict),
    **_by_name(collections.defaultdict, collections.deque),
    **_by_name(datetime.date, datetime.datetime, datetime.time),
    **_by_name(datetime.timedelta, datetime.timezone),
    **_by_name(argparse.Namespace, types.SimpleNamespace, torch.Size, torch.device),
    ("builtins", "bytearray"): _bytearray,
    ("numpy", "dtype"): _dtype,
    ("numpy", "ndarray"): _array,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy.core.multiarray", "scalar"): _scalar,  # before NumPy 2
    ("pathlib", "PosixPath"): pathlib.PosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PosixPath,  # of Python 3.13
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _meta_tensor,
    (__name__, "_tensor"): _tensor,
}
# Names that a pickle may use but not call: values, and factories of a defaultdict.
_NAMED: _Names = {
    **_by_name(bool, int, float, str, bytes, list, tuple, dict, set, frozenset),
    **{("torch", name): v for name, v in vars(torch).items() if isinstance(v, torch.dtype)},
}
# fmt: off
_INSTRUCTIONS = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
    pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4, pickle.BINFLOAT,
    pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8,
    pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8,
    pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.EMPTY_DICT, pickle.EMPTY_SET,
    pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.FROZENSET,
    pickle.BINGET, pickle.LONG_BINGET, pickle.MEMOIZE, pickle.STACK_GLOBAL,
)
# fmt: on


def _into(code: bytes, at: int | None) -> Callable[[Any], None]:
    """Return an instruction that adds items to a container; `at`: its place, None: at the mark."""
    run = pickle._Unpickler.dispatch[code[0]]

    def add(reader: Any) -> None:
        target = reader.metastack[-1][-1] if at is None else reader.stack[at]
        is_container = isinstance(target, list | dict | set)
        _require(is_container, "items of an object that is no container")
        run(reader)

    return add


class _PlainUnpickler(pickle._Unpickler):
    """The standard library's reader with fewer instructions; it refuses all others."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code[0]: pickle._Unpickler.dispatch[code[0]] for code in _INSTRUCTIONS
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return the object of a name that a pickle may use."""
        found = _CALLABLE.get((module, name), _NAMED.get((module, name)))
        if found is None:
            raise pickle.UnpicklingError(ascii(f"{module}.{name}")[1:100].rstrip("'"))
        return found

    def call(self) -> None:
        """REDUCE: replace a function and its arguments by its result."""
        arguments, function = self.stack.pop(), self.stack[-1]
        is_known = type(arguments) is tuple and any(f is function for f in _CALLABLE.values())
        _require(is_known, "a call of an object that is no function of plain data")
        self.stack[-1] = function(*arguments)

    def set_attributes(self) -> None:
        """BUILD: set the attributes of a namespace, or the metadata of a state_dict()."""
        state, instance = self.stack.pop(), self.stack[-1]
        names = list(state) if type(state) is dict else [None]
        if isinstance(instance, argparse.Namespace | types.SimpleNamespace):
            allowed = all(type(name) is str and not name.startswith("__") for name in names)
        else:
            allowed = type(instance) is collections.OrderedDict and names == ["_metadata"]
        _require(allowed, "attributes of an object that has none")
        vars(instance).update(state)

    dispatch |= {
        pickle.APPEND[0]: _into(pickle.APPEND, -2),
        pickle.APPENDS[0]: _into(pickle.APPENDS, None),
        pickle.SETITEM[0]: _into(pickle.SETITEM, -3),
        pickle.SETITEMS[0]: _into(pickle.SETITEMS, None),
        pickle.ADDITEMS[0]: _into(pickle.ADDITEMS, None),
        pickle.REDUCE[0]: call,
        pickle.BUILD[0]: set_attributes,
    }
