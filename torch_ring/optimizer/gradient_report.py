# SPDX-License-Identifier: Apache-2.0
"""Checks, warnings and errors about the ranks' reports of a backward pass."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed
from torch import Tensor

from torch_ring._C import Engine, NotFinite, PassReport, Worst
from torch_ring.collectives.compare import refuse_lazy
from torch_ring.errors import InvalidArgumentError, MismatchError, PeerLostError, RingError
from torch_ring.optimizer.buckets import Bucket

__all__ = [
    "end_given_up",
    "explained",
    "rank_word",
    "refuse_ddp",
    "require_same_steps",
    "require_usable",
    "warn_of_one_graph",
]

_NEARLY_ALL = 0.9  # of the gradients: a head outside of the graph does not matter


_log = logging.getLogger("torch_ring")


def refuse_ddp(parameters: Iterable[Tensor]) -> None:
    """Refuse parameters whose gradients DistributedDataParallel averages, too.

    Its result replaces the sum of several passes before a step by the last one. Parameters do not
    refer to DDP, so this searches all objects of the process, if torch.distributed has several
    ranks.

    Raises:
        InvalidArgumentError: there are such parameters.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if torch.distributed.get_world_size() == 1:
        return
    own = set(map(id, parameters))
    shared = {id(parameter) for parameter in _of_ddp()} & own
    if shared:
        raise InvalidArgumentError(
            f"DistributedDataParallel averages the gradients of {len(shared)} of the {len(own)} "
            "parameters of this DistributedOptimizer, too, and of several passes before a step "
            "only the last one would count. Train the model itself, without DDP, or do not wrap "
            "the optimizer"
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


def rank_word(ranks: Sequence[PassReport], size: int) -> str:
    """Return the words before the number of a report: its rank's, or a place among fewer."""
    return "rank" if len(ranks) == size else "of the ranks that have not joined, number"


def require_same_steps(ranks: Sequence[PassReport], other: int | None, size: int) -> None:
    """Check that ranks are in the same step.

    Args:
        ranks: the reports of the ranks that have not joined.
        other: the first rank among them that is in another step than the first (`decide`), if any.
        size: the number of all ranks.

    Raises:
        MismatchError: there is one; names it.
    """
    if other is None:
        return
    who = rank_word(ranks, size)
    raise MismatchError(
        f"the ranks are in different steps: {who} 0 has taken {ranks[0].steps} optimizer steps, "
        f"{who} {other} {ranks[other].steps}. Every rank must call step() equally often, and "
        "backward() equally often between two steps (a rank without data may leave it out). If an "
        "exception like KeyboardInterrupt was caught on a rank, it may have left a step out, and "
        "its weights differ: call shutdown() and init(), and go on from a checkpoint"
    )


def end_given_up(failure: str, engine: Engine, name: str) -> None:
    """End the job: some ranks have given up the pass that the ranks agree on (`decide`).

    Args:
        failure: the error of the pass that this rank has given up; "" if it has not.
        engine: the ranks' engine.
        name: the name of the operation that gathered the reports.

    Raises:
        RingError: on all ranks, with the failure of one that has given up.
    """
    if failure:
        engine.end(failure)
    # A rank that has given up ends the job instead of answering.
    nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
    engine.submit("allgather", nothing, None, name, joinable=True).wait()


def _hint(error: RingError, done: str) -> str:
    if isinstance(error, PeerLostError):
        if " has left" not in str(error):  # it has died
            return ""
        return f". The rank that has left did {done}: {_REMEDY}"
    hint = f". All ranks have done {done}, one does not do the next: {_REMEDY}"
    if isinstance(error, MismatchError):
        hint += f". {_REMEDY_IN_ANOTHER_COLLECTIVE}"
    return hint
