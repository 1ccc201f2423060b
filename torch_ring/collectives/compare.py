# SPDX-License-Identifier: Apache-2.0
"""Comparison of the ranks' values: digest, gather, first difference, text.

Each rank describes its values as lines. The ranks gather a digest of their lines, and the lines
only if the digests differ (`gather_lines_if_different`); `find_difference` names the first line
that differs. All comparisons are built on this: of models and optimizers (`verify_consistency`), of
settings and descriptions (`require_same`), of a state that was sent (`find_damage`), and of weights
during backward passes (optimizer/weight_comparison).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_ring._C import Engine, all_sent
from torch_ring.errors import InvalidArgumentError, MismatchError
from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet, engine_of, global_process_set

__all__ = [
    "Difference",
    "Line",
    "Thing",
    "describe_difference",
    "digests_of",
    "find_damage",
    "find_difference",
    "gather_lines",
    "gather_lines_if_different",
    "hyper_parameters_of",
    "refuse_lazy",
    "require_consistent",
    "require_same",
    "require_same_lines",
    "start_lines",
    "summary_of",
    "things_of",
    "verify_consistency",
    "verify_step",
]

_ROW_WORDS = 512  # of 8 bytes
_ROW_BYTES = 8 * _ROW_WORDS
_PIECE_BYTES = 1 << 20  # summed at a time on the CPU: fits into a cache
_DEVICE_PIECE_BYTES = 1 << 30  # on other devices
_ODD = -7046029254386353131  # the fraction of the golden ratio, as the bits of an int64


def digests_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return a digest of each tensor's bits, int64 on the CPU.

    Tensors that differ by chance have different digests, except for one pair in about 2**60. NaNs
    are compared by their bits, too. A tensor whose bits cannot be read (on the meta device, a
    wrapper around other tensors, neither dense nor sparse COO) counts as the same everywhere.

    Cost: one pass over the tensors, one wait for each device, and a copy of each tensor that is not
    contiguous, one at a time.
    """
    return start_digests(tensors)()


def start_digests(tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Start to compute `digests_of`; return a function that waits for the digests.

    The host waits for no device before that. The digests are of the tensors' present values, even
    if the current streams overwrite them later.
    """
    readable: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if _is_readable(tensor):
            readable.setdefault(tensor.device, []).append(index)
    started: list[tuple[list[int], Tensor, torch.Event | None]] = []
    with torch.no_grad():
        for device, indices in readable.items():
            order, found = _digests_on(device, indices, tensors)
            host = found.to("cpu", non_blocking=True)
            copied = None if device.type == "cpu" else torch.Event(device=device)
            if copied is not None:
                copied.record()
            started.append((order, host, copied))

    def finish() -> Tensor:
        digests = torch.zeros(len(tensors), dtype=torch.int64, device="cpu")
        for order, host, copied in started:
            if copied is not None:
                copied.synchronize()
            digests[order] = host
        return digests

    return finish


def _digests_on(
    device: torch.device, indices: Sequence[int], tensors: Sequence[Tensor]
) -> tuple[list[int], Tensor]:
    """Return the digests, on the device, and the tensors' indices in the same order."""
    small: dict[torch.dtype, list[int]] = {}
    large: list[int] = []
    for index in indices:
        tensor = tensors[index]
        (small.setdefault(tensor.dtype, []) if _is_small(tensor) else large).append(index)
    parts = [_parts_of(tensors[index].detach()) for index in large]
    rows = max((part.nbytes // _ROW_BYTES for group in parts for part in group), default=0)
    factors = torch.arange(1, rows + 2 * _ROW_WORDS + 1, device=device) * _ODD | 1
    found = [_digest(first, factors) for first, *_ in parts]
    for position, (_, *more) in enumerate(parts):
        for part in more:
            found[position] = 3 * found[position] + _digest(part, factors)
    order = [*large, *(index for group in small.values() for index in group)]
    joint = [_joint_digests([tensors[i].detach() for i in g], factors) for g in small.values()]
    return order, torch.cat([*(digest.view(1) for digest in found), *joint])


def _is_small(tensor: Tensor) -> bool:
    """Return whether to read a tensor together with others: each operator costs microseconds."""
    return (
        tensor.layout == torch.strided
        and tensor.nbytes < _ROW_BYTES
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _joint_digests(tensors: Sequence[Tensor], factors: Tensor) -> Tensor:
    """Return the `_digest` of each of several tensors of one dtype, all shorter than a row."""
    size = tensors[0].element_size()
    flat = [tensor.reshape(-1) for tensor in tensors]
    if size == 1:  # torch.cat does not take all dtypes of one byte
        flat = [tensor.view(torch.uint8) for tensor in flat]
    octets = [tensor.numel() * size for tensor in flat]
    if any(count % 8 for count in octets):  # align each tensor to a word
        zeros = flat[0].new_zeros(8)
        gaps = [zeros[: -count % 8 // size] for count in octets]
        flat = [part for pair in zip(flat, gaps, strict=True) for part in pair]
    words = torch.cat(flat).view(torch.uint8).view(torch.int64)
    counts = torch.tensor([(count + 7) // 8 for count in octets], device="cpu")
    ends = counts.cumsum(0)
    places = torch.arange(len(words), device="cpu") - torch.repeat_interleave(ends - counts, counts)
    mixed = words * _ODD
    sums = ((mixed ^ (mixed >> 32)) * factors[places.to(words.device)]).cumsum(0)
    last = sums[ends.to(words.device) - 1]
    return torch.diff(last, prepend=last.new_zeros(1))


def _is_readable(tensor: Tensor) -> bool:
    return (
        tensor.layout in (torch.strided, torch.sparse_coo)
        and tensor.numel() > 0
        and tensor.device.type != "meta"
        and not tensor.is_nested
        and not is_traceable_wrapper_subclass(tensor)
    )


def _parts_of(tensor: Tensor) -> list[Tensor]:
    """Return dense tensors with all bits of `tensor`."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor.int_repr() if tensor.is_quantized else tensor]


def _digest(tensor: Tensor, factors: Tensor) -> Tensor:
    """Return a number made of the sums of rows of 4 KiB, and of columns of words of 8 bytes.

    If two words change places, the sum of a row, of a column or both change. Each sum is mixed, so
    that its highest bits count as the others do, and multiplied by an odd factor for its place.
    """
    octets = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if octets.data_ptr() % 8 or octets.storage_offset() % 8:
        octets = octets.clone()  # aligned to words of 8 bytes
    whole = octets.numel() - octets.numel() % _ROW_BYTES
    # The words after the last whole row, if any.
    sums = [pad(octets[whole:], (0, -octets.numel() % 8)).view(torch.int64)]
    if whole:
        at_once = _PIECE_BYTES if octets.device.type == "cpu" else _DEVICE_PIECE_BYTES
        rows = octets[:whole].view(torch.int64).view(-1, _ROW_WORDS)
        pieces = torch.split(rows, at_once // _ROW_BYTES)
        sums += [piece.sum(1) for piece in pieces]
        sums.append(torch.stack([piece.sum(0) for piece in pieces]).sum(0))
    mixed = torch.cat(sums) * _ODD
    return ((mixed ^ (mixed >> 32)) * factors[: len(mixed)]).sum()


Line = list[Any]
"""A `Thing` as ranks compare it: name, description, digest of a tensor's bits (else None)."""

_MOST_RANKS_NAMED = 4
_SUMMARY_BYTES = 32


def verify_consistency(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Check that all ranks have the same parameters, buffers and optimizer state, bit for bit.

    A collective of the process set. It reads each tensor once, on its device, and sends 32 bytes a
    rank; more only if the ranks differ. ``TORCH_RING_CHECK_EVERY=N`` does the same for the
    parameters and the state of a ``DistributedOptimizer`` in every N-th of its steps.

    Some values may rightly differ between ranks: buffers such as the running statistics of batch
    normalisation (call :func:`broadcast_buffers` first), and the state of an optimizer with
    ``op=Adasum``. Tensors without readable values (on the meta device, or in a wrapper such as a
    DTensor) are compared by shape and dtype.

    Args:
        model: any module, its tensors of any dtype, on any device.
        optimizer: wrapped or not; None: only the model is compared. Its state may have tensors,
            numbers and texts in lists and dicts; other objects are left out.
        process_set: the ranks to compare, this one among them; by default all.

    Raises:
        MismatchError: on every rank, if a name, shape, dtype or value differs; names the first one,
            and the ranks that differ. No data has moved, the job may go on.
        InvalidArgumentError: `model` is no module, or `optimizer` no optimizer.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(
            f"verify_consistency takes a torch.nn.Module, not {type(model).__name__}"
        )
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise InvalidArgumentError(
            "verify_consistency takes the optimizer itself, or None, not "
            f"{type(optimizer).__name__}"
        )
    refuse_lazy([*model.named_parameters(), *model.named_buffers()])
    names: dict[Tensor, str] = {
        parameter: name for name, parameter in reversed([*model.named_parameters()])
    }
    things = [Thing(f"parameter '{name}'", value) for name, value in model.named_parameters()]
    things += [Thing(f"buffer '{name}'", value) for name, value in model.named_buffers()]
    if optimizer is not None:
        things += things_of(optimizer, names)
    require_consistent(start_lines(things)(), process_set)


def verify_step(
    every: int,
    step: int,
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    process_set: ProcessSet,
    *,
    with_state: bool = True,
) -> None:
    """Check a wrapped optimizer, in every `every`-th step; 0: never.

    A collective of the ranks that have not joined.

    Args:
        every: TORCH_RING_CHECK_EVERY, the same on all ranks.
        step: the number of steps, the same on all ranks.
        optimizer: the optimizer.
        names: the names of its parameters.
        process_set: the ranks that train together.
        with_state: whether the optimizer's state must be the same on all ranks.

    Raises:
        MismatchError: as `verify_consistency`.
    """
    if not every or step % every:
        return
    things = [Thing(f"parameter '{name}'", parameter) for parameter, name in names.items()]
    if with_state:
        things += things_of(optimizer, names)
    require_consistent(start_lines(things)(), process_set, f"after step {step}: ")


def require_same(
    lines: Sequence[str], complaint: str, process_set: ProcessSet = global_process_set
) -> None:
    """Check that all ranks of the set give the same lines. Cost: an allgather of 32 bytes a rank.

    Args:
        lines: a description of this rank's state.
        complaint: the beginning of the error message, before the first difference.
        process_set: the ranks that take part; this one must be among them.

    Raises:
        MismatchError: on every rank, if a line differs; names the first difference.
    """
    own = [[str(index), line, None] for index, line in enumerate(lines)]
    _, every = gather_lines_if_different(own, engine_of(process_set), joinable=False)
    texts = {rank: [line[1] for line in each] for rank, each in every.items()}
    require_same_lines(texts, complaint)


def require_same_lines(
    every: Mapping[int, Sequence[str]], complaint: str, advice: str = "", *, absent: str = "nothing"
) -> None:
    """Check that ranks have given the same lines.

    Args:
        every: the lines of each rank.
        complaint: the beginning of the error message, before the first difference.
        advice: its end.
        absent: the text for a line that a rank has not given.

    Raises:
        MismatchError: a line differs.
    """
    most = max(map(len, every.values()), default=0)
    padded = {rank: [*lines, *[absent] * (most - len(lines))] for rank, lines in every.items()}
    numbered = {
        rank: [[str(index), line, None] for index, line in enumerate(lines)]
        for rank, lines in padded.items()
    }
    found = find_difference(numbered, min(every, default=None))
    if found is not None:
        raise MismatchError(
            f"{complaint}: rank {found.same[0]}: {found.usual}; rank {found.others[0]}: "
            f"{found.found}{advice}"
        )


def find_damage(
    root: int, things: Sequence[Thing] | None, engine: Engine, name: str = ""
) -> Difference | None:
    """Compare the ranks' copies with the root's originals. Collective.

    Cost: one pass over the tensors, on their device, and 32 bytes a rank; more only if ranks
    differ.

    Args:
        root: the rank whose things the others have copied.
        things: this rank's things; None: it takes part, but is not compared.
        engine: the engine of the ranks.
        name: matches the operation between the ranks; empty: a running number.

    Returns:
        The first thing that has not arrived as it was sent, and the ranks that have it wrong; the
        same on all ranks. None if everything has arrived.
    """
    lines = None if things is None else start_lines(things)()
    _, every = gather_lines_if_different(lines, engine, name)
    return find_difference(every, root)


def refuse_lazy(named: Iterable[tuple[str, Any]]) -> None:
    """Raise ValueError for a parameter or buffer of a lazy module that has no shape yet."""
    for name, value in named:
        if is_lazy(value):
            raise InvalidArgumentError(
                f"'{name}' belongs to a lazy module (as LazyLinear) and has no shape yet: run one "
                "forward pass first, on all ranks"
            )


class Thing(NamedTuple):
    """A value that should be the same on all ranks.

    Attributes:
        name: its name in messages; unique on a rank.
        value: a tensor, a number, a text or None.
    """

    name: str
    value: Any

    def describe(self) -> str:
        """Return the description to compare: a tensor's dtype and shape, or the value."""
        value = self.value
        if not isinstance(value, Tensor):
            return repr(value)
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def things_of(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Iterator[Thing]:
    """Yield the hyper-parameters and the state of an optimizer, in the order of its parameters.

    A state that is divided among the ranks (``shard_state=True``) is left out.
    """
    yield from hyper_parameters_of(optimizer)
    if getattr(optimizer, "_has_divided_state", False):
        return
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            name = names.get(parameter, f"{number}.{index}")
            for key, value in optimizer.state.get(parameter, {}).items():
                yield from _leaves(f"state '{key}' of '{name}'", value)


def hyper_parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Thing]:
    """Yield the hyper-parameters of an optimizer.

    A CPU tensor of one element becomes a number, so that messages show its value.
    """
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                for name, leaf in _leaves(f"'{key}' of group {number}", value):
                    is_readable = isinstance(leaf, Tensor) and leaf.device.type == "cpu"
                    has_value = is_readable and leaf.numel() == 1
                    yield Thing(name, leaf.item() if has_value else leaf)


def _leaves(name: str, value: Any) -> Iterator[Thing]:
    if isinstance(value, (Tensor, bool, int, float, complex, str)) or value is None:
        yield Thing(name, value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}, {key!r}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(f"{name}, {index}", item)


def require_consistent(lines: Sequence[Line], process_set: ProcessSet, when: str = "") -> None:
    """Raise MismatchError on all ranks that have not joined, if their lines differ. Collective."""
    _, every = gather_lines_if_different(lines, engine_of(process_set))
    found = find_difference(every)
    if found is not None:
        raise MismatchError(
            f"rank {current.rank()}: {when}the ranks are not consistent: "
            f"{describe_difference(found)}. {_remedy(found.names[0], found.same[0])}"
        )


def start_lines(things: Sequence[Thing]) -> Callable[[], list[Line]]:
    """Start to read things as they are now; return a function that waits for their lines."""
    described = [(thing.name, thing.describe()) for thing in things]
    is_tensor = [isinstance(thing.value, Tensor) for thing in things]
    wait = start_digests([thing.value for thing in things if isinstance(thing.value, Tensor)])

    def lines() -> list[Line]:
        digests = iter(wait().tolist())
        return [
            [name, description, next(digests) if has_bits else None]
            for (name, description), has_bits in zip(described, is_tensor, strict=True)
        ]

    return lines


def summary_of(lines: Sequence[Line], size: int) -> bytes:
    """Return a digest of all lines, `size` bytes long."""
    return hashlib.blake2b(json.dumps(lines).encode(), digest_size=size).digest()


def gather_lines_if_different(
    lines: Sequence[Line] | None, engine: Engine, name: str = "", *, joinable: bool = True
) -> tuple[int, dict[int, list[Line]]]:
    """Return the number of ranks with lines, and the lines by rank if they differ. Collective.

    Args:
        lines: this rank's lines; None: it takes part without lines.
        engine: the engine of the ranks.
        name: matches the operation between the ranks; empty: a running number.
        joinable: whether ranks that have joined are left out; otherwise none may have joined.
    """
    own = b"" if lines is None else summary_of(lines, _SUMMARY_BYTES)
    gathered = _gather(own, engine, name, joinable=joinable)
    if all_sent(b"".join(gathered), own or gathered[0]):
        return len(gathered), {}
    return len(gathered), gather_lines(lines, engine, name, joinable=joinable)


def gather_lines(
    lines: Sequence[Line] | None, engine: Engine, name: str = "", *, joinable: bool = True
) -> dict[int, list[Line]]:
    """Return the lines of all ranks that have some, by rank, as `gather_lines_if_different`."""
    own = b"" if lines is None else json.dumps([current.rank(), lines]).encode()
    return dict(map(json.loads, _gather(own, engine, name, joinable=joinable)))


def _gather(own: bytes, engine: Engine, name: str, *, joinable: bool) -> list[bytes]:
    """Return the bytes of the ranks that have not joined, without empty ones."""
    payload = torch.frombuffer(bytearray(own or b"\0"), dtype=torch.uint8)[: len(own)]
    work = engine.submit("allgather", payload, None, name, True, joinable=joinable)
    parts = torch.split(work.wait(), work.received_splits())
    return [bytes(part.numpy()) for part in parts if len(part)]


class Difference(NamedTuple):
    """The things that differ between ranks; all but `names` is about the first of them.

    Attributes:
        names: the names of all things that differ.
        compared: the number of things compared.
        others: the ranks that differ from the usual value.
        same: the ranks with the usual value.
        found: the value on the first of `others`, in words.
        usual: the usual value, in words.
    """

    names: list[str]
    compared: int
    others: list[int]
    same: list[int]
    found: str
    usual: str

    @property
    def others_in_words(self) -> str:
        """The ranks in `others`, as messages name them."""
        return _ranks(self.others)


def find_difference(
    every: Mapping[int, Sequence[Line]], reference: int | None = None
) -> Difference | None:
    """Return the difference between the ranks' lines; None: they are equal.

    The order of a rank's lines does not matter. The usual value is that of the rank `reference`;
    None: that of most ranks.
    """
    by_name = {
        rank: {name: tuple(found) for name, *found in lines} for rank, lines in every.items()
    }
    names = dict.fromkeys(name for things in by_name.values() for name in things)
    differing = [
        name for name in names if len({things.get(name) for things in by_name.values()}) > 1
    ]
    if not differing:
        return None
    first = {rank: things.get(differing[0]) for rank, things in by_name.items()}
    most = Counter(first.values()).most_common(1)[0][0]  # a tie: that of the lowest rank
    usual = most if reference is None else first[reference]
    others = [rank for rank, found in first.items() if found != usual]
    same = [rank for rank, found in first.items() if found == usual]
    found = _found(first[others[0]])
    return Difference(differing, len(names), others, same, found, _found(usual))


def describe_difference(difference: Difference) -> str:
    """Return the difference in the words of the error messages."""
    names, compared, others, same, found, usual = difference
    return (
        f"{names[0]} on {_ranks(others)} ({found}) is not that on {_ranks(same)} ({usual}): "
        f"{len(names)} of {compared} tensors and settings differ"
    )


def _found(found: tuple[str, int | None] | None) -> str:
    if found is None:
        return "there is none"
    description, digest = found
    return description if digest is None else f"{description}, digest {digest % 2**64:016x}"


def _ranks(ranks: Sequence[int]) -> str:
    more = len(ranks) - _MOST_RANKS_NAMED
    named = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
    return f"rank{'s' if len(ranks) > 1 else ''} {named}" + (
        f" and {more} more" if more > 0 else ""
    )


def _remedy(name: str, root: int) -> str:
    kind = name.partition(" ")[0]
    if kind == "parameter":
        call = "broadcast_parameters(model.state_dict()"
    elif kind == "buffer":
        call = "broadcast_buffers(model"
    else:
        call = "broadcast_optimizer_state(optimizer"
    return (
        f"{call}, root_rank={root}) makes them the same; if they were, look for what one rank "
        "alone does to them"
    )
