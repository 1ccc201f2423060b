# SPDX-License-Identifier: Apache-2.0
"""broadcast_object and allgather_object: send any object of a rank to all ranks.

broadcast_checked_object compares the bytes that have arrived with those that were sent.

Where strangers may know the key of the world, only plain data are accepted from other hosts.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from torch_ring import world
from torch_ring.collectives.allgather import allgather
from torch_ring.collectives.broadcast import broadcast_
from torch_ring.collectives.compare import Thing, find_damage
from torch_ring.collectives.plain_pickle import dumps, loads_plain
from torch_ring.errors import StateDamagedError
from torch_ring.world.process_set import ProcessSet, engine_of, global_process_set

__all__ = ["allgather_object", "broadcast_checked_object", "broadcast_object"]


ObjectT = TypeVar("ObjectT")


def broadcast_object(
    obj: ObjectT,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> ObjectT:
    """Return the root's object on every rank.

    Args:
        obj: any object that pickle takes, or cloudpickle if it is installed, which takes lambdas
            and local classes; read on the root only.
        root_rank: the global rank, even in a process set, whose object all ranks get.
        name: matches the operation between the ranks; None: a running number.
        process_set: the ranks that take part, this one and the root among them; by default all.

    Returns:
        `obj` itself on the root, a copy elsewhere.

    Raises:
        Exception: the root cannot pickle `obj`: pickle's error there, a RuntimeError elsewhere.
        pickle.UnpicklingError: `obj` is not only plain data, the root is on another host, and the
            hosts have no secret (see TORCH_RING_SECRET). A RuntimeError on the root's host.
    """
    return _broadcast(obj, root_rank, name, process_set, is_checked=False)


def broadcast_checked_object(
    obj: ObjectT,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> ObjectT:
    """Return the root's object on every rank, as `broadcast_object`, after a check of its bytes.

    Additional cost: a digest of the pickle on each rank, and an allgather of 32 bytes a rank.

    Raises:
        StateDamagedError: on all ranks: a rank has received other bytes than were sent.
        Exception: as `broadcast_object`.
    """
    return _broadcast(obj, root_rank, name, process_set, is_checked=True)


def _broadcast(
    obj: ObjectT, root_rank: int, name: str | None, process_set: ProcessSet, *, is_checked: bool
) -> ObjectT:
    is_root = world.rank() == root_rank
    payload, failure = _pickled(obj) if is_root else (_NOTHING, None)
    size = torch.tensor([payload.numel()], device="cpu")
    broadcast_(size, root_rank, name and f"{name}.size", process_set)
    _require_pickled([root_rank], size, failure)
    if not is_root:
        payload = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    broadcast_(payload, root_rank, name, process_set)
    if is_checked:  # before pickle reads it
        _require_undamaged(payload, root_rank, name, process_set)
    received = _unpickled({} if is_root else {root_rank: payload}, name, process_set)
    return obj if is_root else cast("ObjectT", received[root_rank])


def allgather_object(
    obj: ObjectT, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[ObjectT]:
    """Return the objects of all ranks of the set.

    Args:
        obj: any object that pickle takes, or cloudpickle if it is installed; the ranks' may differ.
        name: matches the operation between the ranks; None: a running number.
        process_set: the ranks that take part, this one among them; by default all.

    Returns:
        A list with an object for each rank, in the order of ranks.

    Raises:
        Exception: a rank cannot pickle its object: pickle's error there, a RuntimeError on others.
        pickle.UnpicklingError: an object from another host is not only plain data, and the hosts
            have no secret (see TORCH_RING_SECRET). A RuntimeError on ranks that could take all.
    """
    payload, failure = _pickled(obj)
    size = torch.tensor([payload.numel()], device="cpu")
    sizes = allgather(size, name and f"{name}.size", process_set)
    ranks = process_set.ranks or []
    _require_pickled(ranks, sizes, failure)
    gathered = allgather(payload, name, process_set)
    parts = torch.split(gathered, sizes.tolist())
    return list(_unpickled(dict(zip(ranks, parts, strict=True)), name, process_set).values())


# Sent after a failure: a real pickle is never empty.
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _pickled(obj: Any) -> tuple[Tensor, Exception | None]:
    """Return the pickle of `obj`, or `_NOTHING` and the error: the other ranks wait for either."""
    try:
        data = _dumps(obj)
    except Exception as failure:
        return _NOTHING, failure
    return torch.frombuffer(data, dtype=torch.uint8), None


def _dumps(obj: Any) -> memoryview:
    try:
        return dumps(obj)
    except (pickle.PicklingError, AttributeError, TypeError):
        if find_spec("cloudpickle") is None:
            raise
    import cloudpickle  # type: ignore[import-untyped, unused-ignore]  # optional; slower than pickle

    return memoryview(bytearray(cloudpickle.dumps(obj)))


def _require_pickled(ranks: Sequence[int], sizes: Tensor, failure: Exception | None) -> None:
    """Raise on every rank if one of `ranks` could not pickle its object."""
    if failure is not None:
        raise failure
    failed = [rank for rank, size in zip(ranks, sizes.tolist(), strict=True) if size == 0]
    if failed:
        raise RuntimeError(f"rank {failed[0]} cannot pickle its object: see its error")


def _require_undamaged(
    payload: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> None:
    engine, key = engine_of(process_set), f"{name}.digest" if name else ""
    damage = find_damage(root_rank, [Thing("payload", payload)], engine, key)
    if damage is not None:
        raise StateDamagedError(
            f"rank {world.rank()}: {name or 'an object'} of rank {root_rank} ({len(payload)} bytes "
            f"here) has not arrived as it was sent on {damage.others_in_words}"
        )


def _unpickled(
    payloads: Mapping[int, Tensor], name: str | None, process_set: ProcessSet
) -> dict[int, Any]:
    """Return the objects that ranks have sent, by rank.

    Where some objects are read as plain data only, the ranks tell one another whether they could
    read all: otherwise a rank that refuses one would fall out of step.
    """
    here, host_of = world.current.world(), world.current.world().host_of
    ranks = process_set.ranks or []
    if not here.is_guarded or len({host_of[rank] for rank in ranks}) == 1:
        # A connected process has proved that it knows a secret, or belongs to this user.
        return {rank: pickle.loads(data.numpy().data) for rank, data in payloads.items()}
    objects: dict[int, Any] = {}
    refusal: Exception | None = None
    for rank, data in payloads.items():
        try:
            is_near = host_of[rank] == host_of[here.rank]
            read = pickle.loads if is_near else loads_plain
            objects[rank] = read(data.numpy().data)
        except pickle.UnpicklingError as error:
            refusal = refusal or (error if is_near else _refusal(rank, error))
        except Exception as error:
            refusal = refusal or error
    own = torch.tensor([int(refusal is not None)], device="cpu")
    refused = allgather(own, name and f"{name}.read", process_set)
    if refusal is not None:
        raise refusal
    for rank, has_refused in zip(ranks, refused.tolist(), strict=True):
        if has_refused:
            raise RuntimeError(f"rank {rank} does not take an object: see its error")
    return objects


def _refusal(rank: int, error: pickle.UnpicklingError) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(
        f"rank {rank}, on another host, has sent {error}. Without a secret only plain data "
        "(numbers, texts, containers, tensors, arrays) are taken from other hosts, since a pickle "
        "can run code. Set TORCH_RING_SECRET to the same random text on all ranks, or "
        "TORCH_RING_TRUST_NETWORK=1 if nobody else can reach the hosts"
    )
