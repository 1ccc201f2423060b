"""BackwardReport: a rank's message at the end of a backward pass, and its byte layout."""

from __future__ import annotations

import gc
import logging
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor

from torch_ring._C import Engine, Worst
from torch_ring.collectives.compare import refuse_lazy
from torch_ring.errors import MismatchError, PeerLostError, RingError
from torch_ring.optimizer.buckets import Bucket

__all__ = [
    "BackwardReport",
    "GradientReport",
    "end_if_given_up",
    "explained",
    "require_same_steps",
    "require_usable",
    "warn_of_ddp",
    "warn_of_one_graph",
]

# The flags of a report.
_ACCUMULATING, _HAS_DIGEST, _INCOMPLETE, _STEPPING, _AGAIN, _ON_BASE = 1, 2, 4, 8, 16, 32
_NOT_FINITE = 64
_DIGEST_BYTES = 8

_NEARLY_ALL = 0.9  # of the gradients: a head outside of the graph does not matter


class NotFinite(NamedTuple):
    """A gradient of one rank with a number that is not finite, or too large to be sent.

    Attributes:
        parameter: the index of the parameter.
        rank: the rank in the world.
        worst: the worst of the gradient's numbers.
        on_base: whether it contains an averaged gradient, which may be the cause.
    """

    parameter: int
    rank: int
    worst: Worst
    on_base: bool


@dataclass(frozen=True)
class GradientReport:
    """The gradients of one optimizer on one rank.

    Attributes:
        optimizer: the index of the optimizer, the same on all ranks.
        due: the parameters to reduce now, as a bitmap (bit i is parameter i).
        sparse: those of them whose gradient is sparse here.
        accumulating: whether there are gradients that will be reduced later in this step.
        order: parameters in the order in which their gradients became ready; empty if the ranks
            know it already.
        digest: an 8-byte digest of the weights; empty if the ranks have compared them.
        incomplete: whether there are parameters that are not due, and were not reduced since the
            step began: the program may set their gradients before it steps.
        stepping: whether the optimizer is about to step; then all its gradients are due.
        again: whether gradients came after their buckets had been sent: the ranks agree once more
            as soon as `due` is reduced.
        on_base: whether some accumulating gradients were added to averaged ones.
        not_finite: the non-finite gradients among `due`, if the ranks check them.
    """

    optimizer: int
    due: int
    sparse: int = 0
    accumulating: bool = False
    order: tuple[int, ...] = ()
    digest: bytes = b""
    incomplete: bool = False
    stepping: bool = False
    again: bool = False
    on_base: bool = False
    not_finite: tuple[NotFinite, ...] = ()


@dataclass(frozen=True)
class BackwardReport:
    """One rank's message to the others at the end of a backward pass.

    Attributes:
        steps: the total number of steps of its optimizers.
        gradients: the report of each optimizer that has gradients.
        gave_up: whether the pass before failed on this rank, and its program has gone on: these
            gradients are of its next one.
    """

    steps: int
    gradients: tuple[GradientReport, ...] = ()
    gave_up: bool = False

    # Sizes in bytes or elements; little-endian, no padding.
    _HEADER = struct.Struct("<IQI?")  # bytes in all, steps, optimizers, gave_up
    # optimizer, flags, bytes of due and of sparse, elements of order
    _REPORT = struct.Struct("<IBIII")
    _COUNT = struct.Struct("<I")  # number of non-finite gradients
    _GRADIENT = struct.Struct("<IIB?")

    @property
    def is_of_step(self) -> bool:
        """Whether the rank is about to step, rather than at the end of a pass."""
        return any(report.stepping for report in self.gradients)

    @property
    def agrees_again(self) -> bool:
        """Whether another agreement follows at once."""
        return any(report.again for report in self.gradients)

    @property
    def due(self) -> dict[int, int]:
        """The parameters to reduce now, by optimizer; optimizers without any are left out."""
        return {report.optimizer: report.due for report in self.gradients if report.due}

    def encode(self) -> bytes:
        """Return the bytes that `decode_all` decodes."""
        body = bytearray()
        for report in self.gradients:
            due, sparse = _encode_bitmap(report.due), _encode_bitmap(report.sparse)
            flags = _ACCUMULATING * report.accumulating | _HAS_DIGEST * bool(report.digest)
            flags |= _INCOMPLETE * report.incomplete | _STEPPING * report.stepping
            flags |= _AGAIN * report.again | _ON_BASE * report.on_base
            flags |= _NOT_FINITE * bool(report.not_finite)
            body += self._REPORT.pack(
                report.optimizer, flags, len(due), len(sparse), len(report.order)
            )
            body += due + sparse + struct.pack(f"<{len(report.order)}I", *report.order)
            body += report.digest
            if report.not_finite:
                body += self._COUNT.pack(len(report.not_finite))
            for parameter, rank, worst, on_base in report.not_finite:
                body += self._GRADIENT.pack(parameter, rank, worst.value, on_base)
        total = self._HEADER.size + len(body)
        header = self._HEADER.pack(total, self.steps, len(self.gradients), self.gave_up)
        return header + bytes(body)

    @classmethod
    def decode_all(cls, data: memoryview) -> Iterator[BackwardReport]:
        """Yield the reports of all ranks, which follow one another in `data`."""
        while data:
            report, data = cls.decode(data)
            yield report

    @classmethod
    def decode(cls, data: memoryview) -> tuple[BackwardReport, memoryview]:
        """Return the first report in `data`, and the rest of `data`."""
        total, steps, count, gave_up = cls._HEADER.unpack_from(data)
        reports = cls._decode_reports(data[cls._HEADER.size : total], count)
        return cls(steps, tuple(reports), gave_up), data[total:]

    @classmethod
    def _decode_reports(cls, data: memoryview, count: int) -> Iterator[GradientReport]:
        for _ in range(count):
            optimizer, flags, due_bytes, sparse_bytes, order_count = cls._REPORT.unpack_from(data)
            data = data[cls._REPORT.size :]
            due, data = data[:due_bytes], data[due_bytes:]
            sparse, data = data[:sparse_bytes], data[sparse_bytes:]
            order = struct.unpack_from(f"<{order_count}I", data)
            data = data[4 * order_count :]
            digest_bytes = _DIGEST_BYTES if flags & _HAS_DIGEST else 0
            digest, data = bytes(data[:digest_bytes]), data[digest_bytes:]
            not_finite: list[NotFinite] = []
            if flags & _NOT_FINITE:
                (count_here,) = cls._COUNT.unpack_from(data)
                end = cls._COUNT.size + count_here * cls._GRADIENT.size
                for each in cls._GRADIENT.iter_unpack(data[cls._COUNT.size : end]):
                    parameter, rank, worst, on_base = each
                    not_finite.append(NotFinite(parameter, rank, Worst(worst), on_base))
                data = data[end:]
            yield GradientReport(
                optimizer,
                _decode_bitmap(due),
                _decode_bitmap(sparse),
                bool(flags & _ACCUMULATING),
                order,
                digest,
                bool(flags & _INCOMPLETE),
                bool(flags & _STEPPING),
                bool(flags & _AGAIN),
                bool(flags & _ON_BASE),
                tuple(not_finite),
            )


def _encode_bitmap(bitmap: int) -> bytes:
    return bitmap.to_bytes((bitmap.bit_length() + 7) // 8, "little")


def _decode_bitmap(data: memoryview) -> int:
    return int.from_bytes(data, "little")


_log = logging.getLogger("torch_ring")


def warn_of_ddp(parameters: Iterable[Tensor]) -> None:
    """Warn if DistributedDataParallel averages the gradients of some parameters, too.

    Parameters do not refer to DDP, so this searches all objects of the process, if
    torch.distributed has several ranks.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if torch.distributed.get_world_size() == 1:
        return
    own = set(map(id, parameters))
    shared = {id(parameter) for parameter in _of_ddp()} & own
    if shared:
        _log.warning(
            "DistributedDataParallel averages the gradients of %d of the %d parameters of this "
            "DistributedOptimizer, too: they travel twice. Train the model itself (`ddp.module`), "
            "or do not wrap the optimizer",
            len(shared),
            len(own),
        )


def warn_of_one_graph(buckets: Sequence[Bucket], together: Iterable[int]) -> None:
    """Warn if one graph of torch.compile computes the gradients of several buckets, so none early.

    Args:
        buckets: those that can be sent during backward.
        together: the parameters whose gradients the graph computes.
    """
    own = set(together)
    numel = sum(slot.numel for bucket in buckets for slot in bucket.slots)
    filled = [[slot for slot in bucket.slots if slot.parameter in own] for bucket in buckets]
    filled = [slots for slots in filled if slots]
    computed = sum(slot.numel for slots in filled for slot in slots)
    if len(filled) > 1 and computed >= _NEARLY_ALL * numel:
        _log.warning(
            "torch.compile has made one graph of the whole model: the first of %d buckets of "
            "gradients is sent when backward() has computed the last. Compile the parts of the "
            "model, so that they travel meanwhile: `for block in model.layers: block.compile()` "
            "(docs/gpu.md)",
            len(filled),
        )


def _of_ddp() -> Iterator[Tensor]:
    """Yield the parameters of all living DistributedDataParallel modules of several ranks."""
    from torch.nn.parallel import DistributedDataParallel

    for found in gc.get_objects():
        if not issubclass(type(found), DistributedDataParallel):
            continue
        group = getattr(found, "process_group", None)  # missing if the constructor has failed
        if group is not None and group.size() > 1:
            yield from found.parameters()


def require_usable(names: Iterable[tuple[str, Tensor]]) -> None:
    """Check that every parameter has a shape and is whole on this rank.

    Raises:
        ValueError: for a parameter of a lazy module, or one of which FSDP or tensor parallelism
            gives each rank a part.
    """
    for name, parameter in names:
        refuse_lazy([(name, parameter)])
        is_dtensor = hasattr(parameter, "device_mesh") and hasattr(parameter, "placements")
        if is_dtensor or getattr(parameter, "_fsdp_flattened", False):
            kind = "a DTensor" if is_dtensor else "a parameter of FullyShardedDataParallel"
            raise ValueError(
                f"'{name}' is {kind}: this rank has only a part of it, and torch reduces its "
                "gradient already. Do not wrap its optimizer, or do not shard the model"
            )


def culprit(name: str, found: Sequence[NotFinite], others: int, step: int) -> str:
    """Return the text of an error that names a non-finite gradient.

    Args:
        name: the name of its parameter.
        found: the parameter's non-finite gradients, of one or several ranks; not empty.
        others: the number of other parameters with such gradients.
        step: the step, counted from 1.
    """
    worst = max((each.worst for each in found), key=lambda worst: worst.value)
    ranks = sorted({each.rank for each in found if each.worst == worst})
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"
    who += f" and {len(ranks) - 8} others" if len(ranks) > 8 else ""
    has = {
        Worst.nan: "has a NaN",
        Worst.infinite: "has an infinity",
        Worst.large: "has a number too large for float16, in which it is sent",
    }[worst]
    rest = ""
    if others:
        plural = "s" if others > 1 else ""
        rest = f" ({others} other parameter{plural} also; this one's gradient comes first)"
    return (
        f"{who}: the gradient of '{name}' {has}, step {step}{rest}. No rank has stepped: call "
        "zero_grad() to go on without this batch. To find the operation, run backward() under "
        "torch.autograd.set_detect_anomaly(True)"
    )


_REMEDY = (
    "has it fewer batches, or has it stopped early? Give all ranks equally many (drop_last=True in "
    "the sampler and the loader, or equal shards), or let a rank that has no more call join(); let "
    "all ranks stop together, as any_rank() lets them"
)
_REMEDY_IN_ANOTHER_COLLECTIVE = (
    "If it has as many, look for a collective that only some ranks call, as under "
    "`if rank() == 0:`: all ranks must call it"
)


def explained(error: RingError, purpose: str, done: str) -> RingError | None:
    """Return an error of the same type with the likely cause; None if there is nothing to add.

    Args:
        error: the error of an operation in which the ranks agree on their gradients.
        purpose: the beginning of the text, unless the world had failed before the operation began.
        done: the passes or steps that all ranks have done before.
    """
    text = str(error)
    if type(error) is RingError:  # concerns the set, not the ranks: after shutdown(), for example
        return None
    if purpose not in text:
        rank = purpose.partition(": ")[0]
        text = f"{purpose}: {text.removeprefix(f'{rank}: ')}"
    if "this world has ended" not in text:  # if it has, another operation's error says why
        text += _hint(error, done)
    return type(error)(text) if text != str(error) else None


def require_same_steps(steps: Sequence[int], size: int) -> None:
    """Check that ranks are in the same step.

    Args:
        steps: the number of optimizer steps of each rank that has not joined.
        size: the number of all ranks.

    Raises:
        MismatchError: they are in different steps; names two ranks.
    """
    who = "rank" if len(steps) == size else "of the ranks that have not joined, number"
    for rank, other in enumerate(steps):
        if other != steps[0]:
            raise MismatchError(
                f"the ranks are in different steps: {who} 0 has taken {steps[0]} optimizer "
                f"steps, {who} {rank} {other}. Every rank must call step() equally often, and "
                "backward() equally often between two steps (a rank without data may leave "
                "it out). If an exception like KeyboardInterrupt was caught on a rank, it may "
                "have left a step out, and its weights differ: call shutdown() and init(), and "
                "go on from a checkpoint"
            )


def end_if_given_up(
    ranks: Sequence[BackwardReport], failure: str, engine: Engine, name: str
) -> None:
    """End the job if some ranks have given up the pass that these reports would end.

    If all have, their next passes belong together, and take its place.

    Args:
        ranks: the reports of all ranks that have not joined.
        failure: the error of the pass that this rank has given up; "" if it has not.
        engine: the ranks' engine.
        name: the name of the operation that gathered the reports.

    Raises:
        RingError: on all ranks, with the failure of one that has given up.
    """
    if all(rank.gave_up for rank in ranks):
        return
    if failure:
        engine.end(failure)
    if any(rank.gave_up for rank in ranks):  # it ends the job instead of answering
        engine.allgather(
            torch.zeros(1, dtype=torch.uint8, device="cpu"), name, joinable=True
        ).wait()


def _hint(error: RingError, done: str) -> str:
    if isinstance(error, PeerLostError):
        if " has left" not in str(error):  # it has died
            return ""
        return f". The rank that has left did {done}: {_REMEDY}"
    hint = f". All ranks have done {done}, one does not do the next: {_REMEDY}"
    if isinstance(error, MismatchError):
        hint += f". {_REMEDY_IN_ANOTHER_COLLECTIVE}"
    return hint
