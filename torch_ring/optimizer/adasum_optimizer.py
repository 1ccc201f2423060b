# SPDX-License-Identifier: Apache-2.0
"""AdasumOptimizer: each rank takes its own step, and the parameters' changes are combined."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_ring._C import backward_name
from torch_ring.collectives.allreduce import grouped_allreduce
from torch_ring.collectives.compare import require_same, verify_step
from torch_ring.collectives.reduce_op import Adasum
from torch_ring.compression import Compressor
from torch_ring.compression.stateful import StatefulCompressor
from torch_ring.errors import RingError
from torch_ring.optimizer.gradient_report import explained, refuse_ddp, require_usable
from torch_ring.optimizer.weight_comparison import WeightComparison, is_compared
from torch_ring.optimizer.wrapping import Wrapped, unnamed, wrapped
from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet, engine_of

__all__ = ["AdasumOptimizer", "wrap_adasum"]


class AdasumOptimizer(Wrapped):
    """The methods that a wrapped optimizer has in addition with ``op=Adasum``.

    Each ``step()`` uses this rank's own gradients. The change of every parameter is then combined
    over the ranks by adaptive summation (S. Maleki et al., "Scaling Distributed Training with
    Adaptive Summation", MLSys 2021). So it is the change made by Adam that is combined, not its
    gradient. Under ``GradScaler`` a rank that skips its step would leave the others waiting: scale
    by hand.
    """

    _parameter_names: dict[Tensor, str]
    _compression: Compressor
    _process_set: ProcessSet
    _before: dict[Tensor, Tensor] | None
    _steps: int  # since the start, or since join()
    _since: str  # "" or " since join()", for errors
    _comparison: WeightComparison
    _check_every: int  # steps; 0: never
    backward_passes_per_step: int

    def synchronize(self) -> None:
        """Do nothing: only ``step()`` reduces."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise AssertionError, as in Horovod: ``step()`` itself reduces."""
        raise AssertionError("skip_synchronize() is not possible with op=Adasum")
        yield

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: backward passes never communicate here."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Store `passes`, without effect: gradients add up on this rank until ``step()``."""
        if passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, not {passes}")
        self.backward_passes_per_step = passes

    def _after_add_param_group(self) -> None:
        """Combine the changes of the new parameters, too, from now on."""
        group = len(self.param_groups) - 1
        for index, parameter in enumerate(self.param_groups[-1]["params"]):
            self._parameter_names[parameter] = unnamed(group, index)


def wrap_adasum(
    optimizer: torch.optim.Optimizer,
    names: dict[Tensor, str],
    compression: Compressor | StatefulCompressor,
    process_set: ProcessSet,
    backward_passes_per_step: int,
) -> None:
    """Make `optimizer` an :class:`AdasumOptimizer`. Collective.

    Raises:
        ValueError: the number of ranks is no power of two, a parameter is not of floating point, or
            `compression` keeps a state.
        MismatchError: the parameters differ between ranks.
    """
    if isinstance(compression, StatefulCompressor):
        raise ValueError("op=Adasum: a compressor with a state compresses gradients, not changes")
    size = process_set.size() if process_set.included() else 1
    if size & (size - 1):
        raise ValueError(f"op=Adasum needs a power of two of ranks, not {size}")
    names = {p: name for p, name in names.items() if p.requires_grad or p.is_floating_point()}
    for parameter, name in names.items():
        if not parameter.is_floating_point():
            raise ValueError(f"op=Adasum: '{name}' has dtype {parameter.dtype}")
    with wrapped(optimizer, AdasumOptimizer) as made:
        if size > 1:
            require_usable((name, parameter) for parameter, name in names.items())
            require_same(
                [f"'{name}' {p.dtype} {list(p.shape)}" for p, name in names.items()],
                "the ranks wrap different optimizers",
                process_set,
            )
        made._parameter_names = names
        made._compression = compression
        made._process_set = process_set
        made._before = None
        made._since = ""
        made._comparison = WeightComparison(names, process_set, weakref.ref(made))
        made._check_every = current.config().check_every
        made._steps = 0
        made.backward_passes_per_step = backward_passes_per_step
        if size > 1:
            # Hooks instead of a method: a scheduler may have bound the class's `step` to the
            # instance.
            made.register_step_pre_hook(_remember)
            made.register_step_post_hook(_combine)
    if size > 1 and process_set.process_set_id == 0:  # no other set can be joined
        current.world().on_rejoin.append(functools.partial(_on_rejoin, weakref.ref(made)))


def _on_rejoin(reference: weakref.ref[AdasumOptimizer]) -> None:
    """Restart the count of steps: a rank that had joined has taken fewer, perhaps none."""
    optimizer = reference()
    if optimizer is not None:
        optimizer._steps = 0
        optimizer._since = " since join()"
        optimizer._comparison.restart(optimizer._since)


def _trained(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.requires_grad)


def _remember(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Step pre-hook; called twice for one step if `step` calls the base class's `step`."""
    assert isinstance(optimizer, AdasumOptimizer)
    if optimizer._before is None:
        if not optimizer._comparison.has_begun:
            _compare_weights(optimizer)
            if not optimizer._since:
                refuse_ddp(tuple(optimizer._parameter_names))
        optimizer._before = {p: p.detach().clone() for p in _trained(optimizer)}


@contextlib.contextmanager
def _explaining(optimizer: AdasumOptimizer) -> Iterator[None]:
    """Context that adds the likely mistake of the program to errors."""
    try:
        yield
    except RingError as error:
        steps = optimizer._steps
        done = f"{steps} optimizer step{'s' if steps != 1 else ''}{optimizer._since}"
        better = explained(error, "", done)
        if better is None:
            raise
        raise better from error


def _compare_weights(optimizer: AdasumOptimizer) -> None:
    """Warn on one rank if the ranks' weights differ. A collective of those that have not joined."""
    engine = engine_of(optimizer._process_set)
    with _explaining(optimizer):
        name = f"{backward_name(0)}.weights"
        optimizer._comparison.compare_now(optimizer._steps, engine, name)


@torch.no_grad()
def _combine(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Step post-hook; called as often as `_remember`."""
    assert isinstance(optimizer, AdasumOptimizer)
    before, optimizer._before = optimizer._before, None
    if before is None:
        return
    changes = [parameter - start for parameter, start in before.items()]
    with _explaining(optimizer):
        combined = grouped_allreduce(
            changes,
            compression=optimizer._compression,
            op=Adasum,
            process_set=optimizer._process_set,
        )
    optimizer._steps += 1
    for (parameter, start), change in zip(before.items(), combined, strict=True):
        parameter.copy_(start + change)
    if is_compared(optimizer._steps):
        _compare_weights(optimizer)
    verify_step(
        optimizer._check_every,
        optimizer._steps,
        optimizer,
        optimizer._parameter_names,
        optimizer._process_set,
        with_state=False,  # each rank has stepped with its own gradients
    )
