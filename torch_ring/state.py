# SPDX-License-Identifier: Apache-2.0
"""broadcast_parameters, broadcast_buffers, broadcast_optimizer_state: the root's values for all."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_ring import world
from torch_ring.collectives.broadcast import broadcast_, broadcast_async_
from torch_ring.collectives.compare import refuse_lazy, require_same
from torch_ring.collectives.objects import broadcast_object
from torch_ring.collectives.plain_pickle import PlainData
from torch_ring.world.process_set import ProcessSet, global_process_set

__all__ = [
    "broadcast_buffers",
    "broadcast_nested",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "copy_optimizer_state",
]

_AS_BYTES = frozenset({torch.bits8, torch.float4_e2m1fn_x2})  # broadcast() does not take them


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Tensor | tuple[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite tensors in place with the root's.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or a list of tensors of any
            dtype, with the same names on all ranks (in a list: in the same order). Values that are
            no tensors are left alone.
        root_rank: the global rank, even in a process set, whose values all ranks get.
        process_set: the ranks that take part, this one and the root among them; by default all.

    Raises:
        ValueError: `params` is neither a mapping nor a list of tensors.
        MismatchError: on all ranks: a tensor is missing on one of them, or has another shape or
            dtype there; the message names the first one.
    """
    pairs = params.items() if isinstance(params, Mapping) else _named(params)
    tensors = [(name, value) for name, value in pairs if isinstance(value, Tensor)]
    refuse_lazy(tensors)
    require_same(
        sorted(f"parameter '{name}' {value.dtype} {list(value.shape)}" for name, value in tensors),
        "the ranks have different parameters",
        process_set,
    )
    _broadcast_all(tensors, root_rank, process_set)


def _named(params: Iterable[Tensor | tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    if isinstance(params, (Tensor, torch.nn.Module)) or not isinstance(params, Iterable):
        kind = type(params).__name__
        raise ValueError(
            f"broadcast_parameters takes model.state_dict() or a list of tensors, not {kind}"
            + (": use broadcast_optimizer_state()" if hasattr(params, "param_groups") else "")
        )
    for index, param in enumerate(params):
        if not isinstance(param, (Tensor, tuple)):
            kind = type(param).__name__
            raise ValueError(
                f"broadcast_parameters overwrites tensors, and item {index} of the list is "
                f"{kind}: use broadcast_object() for other values"
            )
        yield param if isinstance(param, tuple) else (str(index), param)


def _broadcast_all(
    named: Iterable[tuple[str, Tensor]], root_rank: int, process_set: ProcessSet
) -> None:
    handles = [
        broadcast_async_(_sendable(tensor), root_rank, f"parameter.{name}", process_set)
        for name, tensor in named
    ]
    for handle in handles:
        handle.wait()


def _sendable(tensor: Tensor) -> Tensor:
    """Return a view of the same memory in a dtype that can be sent."""
    tensor = tensor.detach()
    return tensor.view(torch.uint8) if tensor.dtype in _AS_BYTES else tensor


def broadcast_buffers(
    model: torch.nn.Module,
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite the buffers of a model in place with the root's, by one broadcast.

    Buffers are a model's tensors besides its parameters, such as the running statistics of batch
    normalisation. Each rank computes its own buffers, and an optimizer reduces only gradients. So
    call this function before all ranks evaluate or keep the same model.

    Args:
        model: any module, the same on all ranks. Buffers of any dtype count, those that
            ``state_dict()`` leaves out (``persistent=False``) included.
        root_rank: the global rank, even in a process set, whose values all ranks get.
        process_set: the ranks that take part, this one and the root among them; by default all.

    Raises:
        MismatchError: on all ranks: the name, dtype or shape of a buffer differs between ranks; the
            message names the first one.
        InvalidArgumentError: `root_rank` or this rank is not in the process set.
    """
    named = dict(model.named_buffers())
    refuse_lazy(named.items())
    require_same(
        [f"buffer '{name}' {buffer.dtype} {list(buffer.shape)}" for name, buffer in named.items()],
        "the ranks have different models",
        process_set,
    )
    by_device: dict[torch.device, list[Tensor]] = {}
    for buffer in named.values():
        by_device.setdefault(buffer.device, []).append(buffer.detach())
    for buffers in by_device.values():  # usually one
        parts = [buffer.reshape(-1).view(torch.uint8) for buffer in buffers]
        packed = torch.cat(parts)
        broadcast_(packed, root_rank, "buffers", process_set)
        if world.rank() == root_rank:
            continue
        received = torch.split(packed, [part.numel() for part in parts])
        for buffer, part in zip(buffers, received, strict=True):
            value = part.clone().view(buffer.dtype).view(buffer.shape)  # clone: aligned
            # An expanded buffer has one element in many places: write it once.
            once = tuple(slice(1) if stride == 0 else slice(None) for stride in buffer.stride())
            buffer[once].copy_(value[once])


@dataclass(frozen=True)
class _Sent(PlainData):
    """The placeholder of a tensor in a pickled structure."""

    index: int
    like: Tensor  # on the meta device: shape, strides and dtype
    on_cpu: bool

    def __reduce__(self) -> tuple[type[_Sent], tuple[int, Tensor, bool]]:
        return _Sent, (self.index, self.like, self.on_cpu)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank's optimizer the state and the hyper-parameters of the root's.

    The other ranks need no state beforehand, and no step is taken to make one. Hyper-parameters
    keep their Python types, tensors their dtypes. As in Horovod, every parameter that requires a
    gradient has one afterwards: zeros if it had none; ``zero_grad()`` removes them. With
    ``LocalSGD`` or ``DiLoCo`` the agreed parameters, the outer optimizer and the place in the round
    are the root's, too; if the root takes part in no agreement, the others begin a round.

    Args:
        optimizer: wrapped or not, with the same parameters on all ranks.
        root_rank: the global rank, even in a process set, whose state all ranks get.
        model: ignored, None or not; Horovod's function has this argument.
        process_set: the ranks that take part, this one and the root among them; by default all.

    Raises:
        TypeError: `optimizer` is no optimizer.
        MismatchError: the parameter groups are not the same on all ranks.
    """

    def send(packed: Any) -> Any:
        return broadcast_object(packed, root_rank, None, process_set)

    copy_optimizer_state(optimizer, root_rank, process_set, send)
    rounds = getattr(optimizer, "_rounds", None)  # of LocalSGD or DiLoCo
    if rounds is not None:  # the root loads its own, too, so that all begin a pending mean anew
        rounds.load(broadcast_nested(rounds.state(), root_rank, process_set))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def copy_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    process_set: ProcessSet,
    send: Callable[[Any], Any],
) -> None:
    """As `broadcast_optimizer_state`, but send objects other than tensors by `send`.

    Args:
        optimizer: as there.
        root_rank: as there.
        process_set: as there.
        send: takes an object, and returns the root's object on all ranks.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            "broadcast_optimizer_state takes the optimizer itself, not "
            f"{type(optimizer).__name__}"
            + (": use broadcast_parameters()" if isinstance(optimizer, torch.nn.Module) else "")
        )
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    require_same(
        [
            f"parameter {index} of group {number}: {list(parameter.shape)}"
            for number, group in enumerate(groups)
            for index, parameter in enumerate(group["params"])
        ],
        "the ranks have different optimizers",
        process_set,
    )
    replaced = getattr(optimizer, "_replaced_state", contextlib.nullcontext)  # of a sharded one
    with replaced(root_rank):
        if world.rank() == root_rank:
            tensors: list[Tensor] = []
            packed = _pack(_contents(optimizer, parameters), tensors)
            send(packed)
            _broadcast_all(_numbered(tensors), root_rank, process_set)
            return
        packed = send(None)
        received: dict[int, Tensor] = {}
        state = {
            (parameters[key] if isinstance(key, int) else key): _unpack(
                value, _device(parameters[key : key + 1] if isinstance(key, int) else ()), received
            )
            for key, value in packed["state"].items()
        }
        hyper = [
            _unpack(values, _device(group["params"]), received)
            for values, group in zip(packed["param_groups"], groups, strict=True)
        ]
        numbered = _numbered(received[index] for index in range(len(received)))
        _broadcast_all(numbered, root_rank, process_set)
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, values in zip(groups, hyper, strict=True):
            for key in group.keys() - values.keys() - {"params"}:
                del group[key]
            group.update(values)


def broadcast_nested(
    value: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's nested structure of tensors, such as a checkpoint, on every rank.

    Tensors are sent as they are; `broadcast_object` would pickle them.

    Args:
        value: dicts, lists and tuples of tensors and of picklable objects; read on the root only.
        root_rank: the global rank, even in a process set, whose value all ranks get.
        process_set: the ranks that take part; this one and the root must be among them.

    Returns:
        `value` itself on the root; elsewhere a copy, with its tensors on the CPU.

    Raises:
        Exception: the root cannot pickle an object, as in `broadcast_object`.
    """
    if world.rank() == root_rank:
        tensors: list[Tensor] = []
        broadcast_object(_pack(value, tensors), root_rank, None, process_set)
        _broadcast_all(_numbered(tensors), root_rank, process_set)
        return value
    received: dict[int, Tensor] = {}
    packed = broadcast_object(None, root_rank, None, process_set)
    copy = _unpack(packed, torch.device("cpu"), received)
    numbered = _numbered(received[index] for index in range(len(received)))
    _broadcast_all(numbered, root_rank, process_set)
    return copy


def _contents(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Return the state and the hyper-parameters, with indices in place of parameters."""
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    return {
        "state": {
            index_of[id(key)] if isinstance(key, Tensor) else key: value
            for key, value in optimizer.state.items()
        },
        "param_groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
    }


def _device(parameters: Sequence[Tensor]) -> torch.device:
    """Return the device of `parameters`; the CPU if there are none."""
    return parameters[0].device if parameters else torch.device("cpu")


def _numbered(tensors: Iterable[Tensor]) -> Iterable[tuple[str, Tensor]]:
    return ((f"optimizer.{index}", tensor) for index, tensor in enumerate(tensors))


def _with(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return `items` in a dict of `value`'s class and attributes: state_dict() has `_metadata`."""
    if type(value) is dict:
        return items
    same = copy.copy(value)
    for key, item in items.items():
        same[key] = item
    return same


def _pack(value: Any, tensors: list[Tensor]) -> Any:
    """Move the tensors of a nested structure into `tensors`; return the rest."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        tensors.append(value)
        on_cpu = value.device.type == "cpu"
        return _Sent(len(tensors) - 1, torch.empty_like(value, device="meta"), on_cpu)
    if isinstance(value, dict):
        return _with(value, {key: _pack(item, tensors) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_pack(item, tensors) for item in value)
    return value


def _unpack(value: Any, device: torch.device, received: dict[int, Tensor]) -> Any:
    """Undo `_pack` with new tensors, on `device` if the root's was not on the CPU."""
    if isinstance(value, _Sent):
        home = torch.device("cpu") if value.on_cpu else device
        received[value.index] = torch.empty_like(value.like, device=home)
        return received[value.index]
    if isinstance(value, dict):
        return _with(value, {key: _unpack(item, device, received) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_unpack(item, device, received) for item in value)
    return value
