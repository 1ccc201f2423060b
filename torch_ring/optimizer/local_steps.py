# SPDX-License-Identifier: Apache-2.0
"""LocalSGD and DiLoCo: ranks step by themselves, and agree on parameters once in a while.

Both share one mechanism. After every `every` steps the ranks average one tensor per parameter: the
parameter itself (LocalSGD), or its difference from the agreed parameter, which is the gradient of a
step of another optimizer (DiLoCo). The tensors are averaged like gradients: in buckets, over the
wires of `bucket_wire`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torch_ring._C import Engine, Work
from torch_ring.collectives.broadcast import broadcast_async_
from torch_ring.collectives.compare import (
    Line,
    Thing,
    digests_of,
    refuse_lazy,
    require_consistent,
    require_same,
    start_lines,
    verify_step,
)
from torch_ring.collectives.reduce_op import Average
from torch_ring.compression import Compression, Compressor, require_compressor
from torch_ring.compression.stateful import StatefulCompressor
from torch_ring.errors import InvalidArgumentError, MismatchError, ProcessSetLostError
from torch_ring.optimizer.bucket_wire import (
    FinishStage,
    ReductionSettings,
    bucket_memory,
    wire_maker,
)
from torch_ring.optimizer.buckets import Bucket, TensorSpec, plan_buckets
from torch_ring.optimizer.distributed_optimizer import _DistributedOptimizer, _ShardedOptimizer
from torch_ring.optimizer.gradient_report import require_usable
from torch_ring.optimizer.wrapping import (
    Copied,
    Wrapped,
    checked_names,
    require_known,
    unnamed,
    wrapped,
)
from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet, engine_of, global_process_set, membership

__all__ = ["DiLoCo", "DiLoCoOptimizer", "LocalOptimizer", "LocalSGD"]

_log = logging.getLogger("torch_ring")

_STATE = "local_steps"  # in an optimizer's state_dict()


def LocalSGD(  # noqa: N802  the name in the literature
    optimizer: torch.optim.Optimizer,
    every: int = 8,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    process_set: ProcessSet = global_process_set,
) -> LocalOptimizer:
    """Make `optimizer` average the parameters over all ranks after every `every` of its steps.

    Steps in between are this rank's own: nothing is sent. The state of the optimizer, such as
    momentum, stays each rank's own, too. See :func:`DiLoCo` for all other details.

    Args:
        optimizer: any torch optimizer, fresh or with state; or a ``DistributedOptimizer`` of a
            smaller process set.
        every: steps from one average to the next.
        named_parameters: the names of parameters in errors, as ``model.named_parameters()``.
            None: errors have numbers instead.
        process_set: the ranks that average; by default all.

    Returns:
        `optimizer`.

    Raises:
        TypeError, ValueError, MismatchError: as :func:`DiLoCo`.

    Source: S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; B. McMahan
    et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
    2017 (FedAvg).
    """
    settings = _LocalSettings("LocalSGD", every, process_set=process_set)
    return _wrap(optimizer, settings, named_parameters)


def DiLoCo(  # noqa: N802  the name in the literature
    optimizer: torch.optim.Optimizer,
    outer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    outer_options: Mapping[str, Any] | None = None,
    every: int = 64,
    fragments: int = 1,
    delay: int = 0,
    compression: Compressor | StatefulCompressor = Compression.none,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    process_set: ProcessSet = global_process_set,
) -> DiLoCoOptimizer:
    """Make `optimizer` step locally, and agree with the other ranks after every `every` steps.

    The ranks keep a second copy of the parameters, on which they agree. After `every` steps, the
    agreed parameters minus this rank's own are averaged over the ranks. This mean is the gradient
    of a step of another optimizer, the outer one, on the agreed parameters, which all ranks then
    take as their own.

    The optimizer becomes an instance of a subclass of its class, with these additions:

    * ``end_round()``: agree now, in the middle of a round: before an evaluation, a checkpoint, the
      end of the training. Collective;
    * ``outer``: the outer optimizer, for example for a scheduler of its learning rate; its
      parameters are the agreed ones.

    State, hyper-parameters, hooks and schedulers stay. ``state_dict()`` has an additional key with
    the agreed parameters and the state of the outer optimizer. All of it but the local part is
    equal on all ranks, so one rank can save it, and any number of ranks can go on from it. Buffers
    are each rank's own (:func:`broadcast_buffers`). Under ``GradScaler`` a skipped step counts,
    too: all ranks end a round after equally many calls of ``scaler.step()``.

    Collective: all ranks of the process set wrap optimizers of the same parameters in the same
    order, with the same weights, and take equally many steps. :func:`join` raises an error.
    Parameters that are frozen when the optimizer is wrapped are not sent.

    Args:
        optimizer: any torch optimizer, fresh or with state. A ``DistributedOptimizer`` of a smaller
            process set averages gradients within that smaller set in every step. Then `process_set`
            must have exactly one rank of each smaller set, which sends the result to the others
            (:func:`hierarchy` makes such sets).
        outer: makes the outer optimizer from a list of parameters.
        outer_options: its keyword arguments. None: ``lr=0.7, momentum=0.9, nesterov=True`` for
            ``torch.optim.SGD``, as in the paper, and none for others.
        every: steps from one agreement on a parameter to the next.
        fragments: the number of parts into which the parameters are cut. Each has its own rounds of
            `every` steps, at different steps: with k fragments, a k-th of the parameters is sent k
            times as often.
        delay: the number of steps taken while a mean is being computed. Its change is then added to
            the parameters, so the steps taken meanwhile are kept.
        compression: as in ``DistributedOptimizer``. With a stateful compressor and a delay, only
            its first request is sent during the steps.
        named_parameters: the names of parameters in errors, as ``model.named_parameters()``.
            None: errors have numbers instead.
        process_set: the ranks that agree; by default all. Other ranks step on their own.

    Returns:
        `optimizer`.

    Raises:
        TypeError: `optimizer` is not a torch optimizer, or `outer` makes none.
        ValueError: another argument is wrong.
        MismatchError: parameters or arguments differ between ranks. In the first step: the weights
            differ.

    Source: A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
    Models", 2023, and "Streaming DiLoCo with overlapping communication", 2025 (fragments, delay;
    there a mixture of both parameters takes the place of the sum).
    """
    if outer_options is None:
        paper = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
        outer_options = paper if outer is torch.optim.SGD else {}
    settings = _LocalSettings(
        "DiLoCo", every, fragments, delay, compression, outer, outer_options, process_set
    )
    return _wrap(optimizer, settings, named_parameters)


@dataclass(frozen=True)
class _LocalSettings:
    """The arguments of `LocalSGD` or `DiLoCo`.

    Raises:
        ValueError: an argument is wrong.
    """

    kind: str
    every: int
    fragments: int = 1
    delay: int = 0
    compression: Compressor | StatefulCompressor = Compression.none
    outer: Callable[..., torch.optim.Optimizer] | None = None
    outer_options: Mapping[str, Any] = field(default_factory=dict)
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer, at least {least}, not {value!r}")
        if self.fragments > self.every:
            raise ValueError(
                f"fragments={self.fragments}, but a round has {self.every} steps (every)"
            )
        if self.delay >= self.every:
            raise ValueError(
                f"delay={self.delay}: the next mean would begin before this one counts: it must be "
                f"less than every={self.every}"
            )
        require_compressor(self.compression)
        if not isinstance(self.process_set, ProcessSet):
            raise ValueError(f"process_set must be a ProcessSet, not {self.process_set!r}")

    def reduction(self) -> ReductionSettings:
        """Return the settings for making the means."""
        return ReductionSettings(Average, 1.0, self.compression, current.config().bucket_bytes)

    def describe(self) -> str:
        """Return a line that must be the same on all ranks."""
        outer = getattr(self.outer, "__qualname__", "an outer optimizer") if self.outer else "none"
        return (
            f"{self.kind}: every={self.every}, fragments={self.fragments}, delay={self.delay}, "
            f"outer={outer} {dict(self.outer_options)}, {self.reduction().describe()}"
        )


def _wrap(
    optimizer: torch.optim.Optimizer,
    settings: _LocalSettings,
    named_parameters: Iterable[tuple[str, Tensor]] | None,
) -> DiLoCoOptimizer:
    kind = settings.kind
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{kind} wraps a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, Wrapped) and not isinstance(optimizer, Copied):
        if isinstance(optimizer, LocalStepsOptimizer):
            raise ValueError(f"the optimizer has rounds already: {kind} wraps it once")
        if not isinstance(optimizer, _DistributedOptimizer):
            raise ValueError(f"{kind} does not go with op=Adasum")
        if isinstance(optimizer, _ShardedOptimizer):
            raise ValueError(
                f"{kind} does not go with shard_state=True: a parameter is stepped once for "
                "several ranks, and within a round their parameters differ"
            )
        names = dict(optimizer._parameter_names)
    else:
        names = checked_names(optimizer, named_parameters)
    with wrapped(optimizer, LocalStepsOptimizer) as made:
        made._start(names, settings)
    return cast("DiLoCoOptimizer", optimizer)


class LocalStepsOptimizer(Wrapped):
    """The methods that are added to the optimizer's class."""

    _rounds: Rounds
    _process_set = global_process_set  # for ScaledLR: not the smaller set of a DistributedOptimizer

    def _start(self, names: dict[Tensor, str], settings: _LocalSettings) -> None:
        if not hasattr(self, "_optimizer_state_dict_post_hooks"):
            raise InvalidArgumentError(
                f"{settings.kind} cannot wrap {type(self).__name__}: it does not call "
                "Optimizer.__init__(), so its state_dict() would lack the agreed parameters"
            )
        inner = self._settings.process_set if isinstance(self, _DistributedOptimizer) else None
        self._rounds = Rounds(names, settings, inner)
        self._wrapped_by = settings.kind
        # Hooks instead of a method: a scheduler may have bound the class's `step` to the instance.
        self.register_step_pre_hook(_before_step)
        self.register_step_post_hook(_after_step)
        self.register_state_dict_post_hook(_add_state)
        self.register_load_state_dict_pre_hook(_take_state)

    def end_round(self) -> None:
        """Agree on all parameters now, and begin a round. Collective.

        Parameters without a step since the last agreement stay as they are.
        """
        self._rounds.end_round()

    @property
    def outer(self) -> torch.optim.Optimizer | None:
        """The outer optimizer, whose parameters are the agreed ones; None with LocalSGD."""
        return self._rounds.outer

    @property
    def _step_supports_amp_scaling(self) -> bool:
        of_class = getattr(self._user_class, "_step_supports_amp_scaling", False)
        supports = bool(vars(self).get("_step_supports_amp_scaling", of_class))
        caller = sys._getframe(1)
        # GradScaler.step() reads this, and then calls step() unless a gradient is infinite.
        is_scaler = caller.f_code is torch.amp.GradScaler.step.__code__
        if is_scaler and not supports and _finds_infinity(caller.f_locals["self"], self):
            self._rounds.begin_step(self)
            self._rounds.count_step()
        return supports

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = value

    def _after_add_param_group(self) -> None:
        group = len(self.param_groups) - 1
        added = self.param_groups[-1]["params"]
        self._rounds.add({p: unnamed(group, index) for index, p in enumerate(added)}, self)


if TYPE_CHECKING:

    class LocalOptimizer(LocalStepsOptimizer, Any):  # type: ignore[misc]
        """The type of what `LocalSGD` returns; see `WrappedOptimizer`."""

    class DiLoCoOptimizer(LocalOptimizer):
        """The type of what `DiLoCo` returns."""

        @property
        def outer(self) -> torch.optim.Optimizer:
            """The outer optimizer, whose parameters are the agreed ones."""

else:
    LocalOptimizer = DiLoCoOptimizer = LocalStepsOptimizer


def _finds_infinity(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a scaler is about to skip a step on this rank; others may take theirs."""
    state = scaler._per_optimizer_states[id(optimizer)]
    if not state["found_inf_per_device"]:
        scaler.unscale_(optimizer)  # as scaler.step() would
    return any(found.item() for found in state["found_inf_per_device"].values())


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Step pre-hook; called twice for one step if `step` calls the base class's `step`."""
    assert isinstance(optimizer, LocalStepsOptimizer)
    optimizer._rounds.begin_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Step post-hook; called as often as `_before_step`: the last call ends the step."""
    assert isinstance(optimizer, LocalStepsOptimizer)
    wrapper = sys._getframe(1)  # torch's wrapper around step()
    frame = wrapper.f_back
    while frame is not None:
        if frame.f_code is wrapper.f_code and frame.f_locals.get("self") is optimizer:
            return
        frame = frame.f_back
    optimizer._rounds.count_step()


def _add_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    assert isinstance(optimizer, LocalStepsOptimizer)
    state_dict[_STATE] = optimizer._rounds.state()


def _take_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    assert isinstance(optimizer, LocalStepsOptimizer)
    optimizer._rounds.load(state_dict.get(_STATE))


@dataclass
class _Fragment:
    """Parameters with rounds of their own.

    Attributes:
        parameters: their indices.
        at: the position, within every `every` steps, of the step that ends a round.
        rounds: the number of ended rounds.
        steps: the number of steps since the last one.
        on_its_way: the mean that is being computed, if any.
    """

    parameters: Sequence[int]
    at: int
    rounds: int = 0
    steps: int = 0
    on_its_way: _Mean | None = None

    @property
    def unsent(self) -> int:
        """The steps since the last mean that has come; at least 1 if one is on its way."""
        return max(self.steps, int(self.on_its_way is not None))


class Rounds:
    """Counts the steps of an optimizer, and makes its ranks agree on the parameters.

    Thread: the one that takes steps.

    Args:
        names: the parameters of the optimizer, with their names.
        settings: the arguments.
        inner: the ranks that average the gradients of each step, if it is a DistributedOptimizer.

    Attributes:
        inner: as above.
        outer: the outer optimizer; None with LocalSGD, and on ranks that take no part.
        agrees: whether this rank takes part in agreements, itself or by its neighbours.
        has_begun: whether it has taken the first step.
    """

    def __init__(
        self, names: Mapping[Tensor, str], settings: _LocalSettings, inner: ProcessSet | None
    ) -> None:
        self._settings = settings
        self.inner = inner
        self._frozen = {p: name for p, name in names.items() if not p.requires_grad}
        self._names = {p: name for p, name in names.items() if p.requires_grad}
        self._parameters = list(self._names)
        self.outer: torch.optim.Optimizer | None = None
        self._agreed: list[Tensor] = []
        self.has_begun = False
        self._first: Callable[[], list[Line]] | None = None  # the weights at the first gradient
        self._steps = 0
        self._engine: Engine | None = None  # of the world to which `_index` belongs
        self._index = 0
        self._warned = False
        current.config()  # raises NotInitializedError
        require_usable((name, p) for p, name in self._names.items())
        self._fragments = self._cut()
        self._require_same()
        self.agrees = bool(self._sets())
        self._make_outer()
        self._begin_anew()
        self._take_index()

    def _require_same(self) -> None:
        """Compare the ranks' arguments and parameters, and report a rank with wrong sets."""
        lines = [self._settings.describe(), *(_line(p, name) for p, name in self._names.items())]
        problem: Exception | None = None
        try:
            self._sets()
        except InvalidArgumentError:  # without the sets it cannot be reported
            raise
        except ValueError as error:
            problem = error
        for each in (self._settings.process_set, self.inner):
            if each is None or not each.included():
                continue
            try:
                require_same(
                    [str(problem)] if problem else lines,
                    f"the ranks wrap different optimizers by {self._settings.kind}",
                    each,
                )
            except MismatchError as error:  # go on: the other set must get the error, too
                problem = problem or error
        if problem is not None:
            raise problem

    def _cut(self) -> list[_Fragment]:
        """Return the fragments: consecutive parameters, with about equally many elements each."""
        parts, every = self._settings.fragments, self._settings.every
        sizes = [p.numel() for p in self._parameters]
        if parts > max(len(sizes), 1):
            raise ValueError(f"fragments={parts}, but {len(sizes)} parameters require gradients")
        fragments: list[list[int]] = [[]]
        done = 0
        for index, size in enumerate(sizes):
            left = len(sizes) - index  # remaining parameters: each later part needs at least one
            is_full = done >= sum(sizes) * len(fragments) / parts or left == parts - len(fragments)
            if fragments[-1] and is_full and len(fragments) < parts:
                fragments.append([])
            fragments[-1].append(index)
            done += size
        return [
            _Fragment(part, every * (number + 1) // parts) for number, part in enumerate(fragments)
        ]

    def _leader(self) -> int | None:
        """Return the rank that sends the results to the inner set; None: there is no inner set.

        Raises:
            ValueError: the inner set has no rank of the process set, or several.
        """
        if self.inner is None or not self.inner.included():
            return None
        ranks = self._settings.process_set.ranks or []
        shared = sorted(set(self.inner.ranks or ()) & set(ranks))
        if len(shared) != 1:
            raise ValueError(
                f"process_set={ranks} has {len(shared) or 'no'} rank{'s' * (len(shared) > 1)} of "
                f"{self.inner.ranks}, which average the gradients of each step: it must have "
                "exactly one. hvd.hierarchy() makes two such sets"
            )
        return shared[0]

    def _sets(self) -> list[ProcessSet]:
        """Return the sets whose ranks must have the same agreed parameters as this one.

        Raises:
            InvalidArgumentError: the process set has not been added.
            ProcessSetLostError: it has lost a rank.
        """
        process_set = self._settings.process_set
        if process_set.process_set_id is None:
            membership(process_set)  # raises
        sets = [process_set] if process_set.included() else []
        return sets + ([self.inner] if self.inner and self._leader() is not None else [])

    def _make_outer(self) -> None:
        """Make the agreed parameters from the present ones, and their optimizer."""
        make = self._settings.outer
        if make is None or not self._sets():
            return
        self._agreed = [p.detach().clone().requires_grad_() for p in self._parameters]
        try:
            outer = make(self._agreed, **self._settings.outer_options)
        except (TypeError, ValueError) as error:
            name = getattr(make, "__name__", "outer")
            raise ValueError(
                f"{name} makes no outer optimizer with outer_options="
                f"{dict(self._settings.outer_options)}: {error}"
            ) from error
        if not isinstance(outer, torch.optim.Optimizer):
            raise TypeError(f"outer must make a torch.optim.Optimizer, not {type(outer).__name__}")
        try:
            inspect.signature(outer.step).bind()
        except TypeError as error:
            raise ValueError(
                f"{type(outer).__name__} cannot be the outer optimizer: its step() needs arguments "
                f"({error}), and there is no loss of the agreed parameters that a closure could "
                "compute"
            ) from error
        self.outer = outer

    def add(self, names: Mapping[Tensor, str], optimizer: torch.optim.Optimizer) -> None:
        """Add further parameters of the optimizer to the last fragment. Collective."""
        added = {p: name for p, name in names.items() if p.requires_grad}
        refuse_lazy((name, p) for p, name in added.items())
        for each in self._sets():
            lines = [_line(p, name) for p, name in added.items()]
            require_same(lines, "the ranks add different parameters", each)
            verify_step(1, self._steps, optimizer, added, each, with_state=False)
        last = self._fragments[-1]
        if last.on_its_way is not None:
            self._end(last)
        self._frozen |= {p: name for p, name in names.items() if not p.requires_grad}
        self._names |= added
        first = len(self._parameters)
        self._parameters += added
        last.parameters = [*last.parameters, *range(first, len(self._parameters))]
        if self.outer is not None and added:
            agreed = [p.detach().clone().requires_grad_() for p in added]
            self._agreed += agreed
            self.outer.add_param_group({"params": agreed})

    # --- steps

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the parameters; in the first step, also that the ranks have the same weights."""
        groups = [group["params"] for group in optimizer.param_groups]
        require_known(groups, self._names.keys() | self._frozen.keys(), "averaged")
        for parameter, name in self._frozen.items():
            if parameter.requires_grad:
                raise ValueError(
                    f"'{name}' requires a gradient now, and did not when the optimizer was wrapped "
                    f"by {self._settings.kind}: it would not be averaged. Wrap a new optimizer"
                )
        if self.has_begun:
            return
        present = self._start_weights()()
        problem = self._difference(present)
        if problem is None:
            self._agree_on_present()  # the program may have broadcast parameters meanwhile
        elif self._difference(self._first() if self._first else present) is not None:
            raise problem
        self._first = None
        self.has_begun = True

    def _begin_anew(self) -> None:
        """Let the next step be the first one, and note the weights when a gradient comes."""
        self.has_begun, self._first = False, None
        reference = weakref.ref(self)
        hooks: list[RemovableHandle] = []

        def note(_gradient: Tensor) -> None:
            for hook in hooks:
                hook.remove()
            rounds = reference()
            if rounds is not None and rounds._first is None and not rounds.has_begun:
                rounds._agree_on_present()
                rounds._first = rounds._start_weights()

        hooks += [parameter.register_hook(note) for parameter in self._parameters]  # type: ignore[no-untyped-call]

    def _start_weights(self) -> Callable[[], list[Line]]:
        """Start to read the present weights; return a function that waits for their lines."""
        return start_lines([Thing(f"parameter '{name}'", p) for p, name in self._names.items()])

    @torch.no_grad()
    def _agree_on_present(self) -> None:
        if self.outer is not None:
            torch._foreach_copy_(self._agreed, self._parameters)

    def _difference(self, weights: Sequence[Line]) -> MismatchError | None:
        """Compare weights; return an error on all ranks or on none. Collective."""
        problem: MismatchError | None = None
        sets = self._sets()
        for each in sets:
            try:
                require_consistent(weights, each, "after step 0: ")
            except MismatchError as error:  # go on: the other set must get the error, too
                problem = problem or error
        for each in sets if self.inner is not None else ():
            told = [str(problem)] if problem else []
            try:
                require_same(told, "the ranks do not begin with the same weights", each)
            except MismatchError as error:
                problem = problem or error
        return problem

    def count_step(self) -> None:
        """Count a step, and begin or end the means that are due after it."""
        if not self._sets():
            return
        with self._taken_back_if_it_fails():
            self._steps += 1
            for fragment in self._fragments:
                fragment.steps += 1
            self._exchange()

    @contextlib.contextmanager
    def _taken_back_if_it_fails(self) -> Iterator[None]:
        """Context of an exchange. If it fails, as at the loss of a rank, it can be repeated."""
        steps = self._steps
        counts = [each.unsent for each in self._fragments]
        try:
            yield
        except BaseException:
            self._steps = steps
            for fragment, count in zip(self._fragments, counts, strict=True):
                fragment.on_its_way, fragment.steps = None, count
            raise

    def _exchange(self) -> None:
        """Begin and end the means that are due after a step."""
        delay, every = self._settings.delay, self._settings.every
        for fragment in self._fragments:
            if fragment.on_its_way is not None and fragment.steps == delay:
                self._end(fragment)
        for fragment in self._fragments:
            if (self._steps - fragment.at) % every == 0:
                self._begin(fragment)
                if not delay:
                    self._end(fragment)

    def end_round(self) -> None:
        """End all pending means, and then a round of each fragment with steps since its last."""
        if not self._sets():
            return
        with self._taken_back_if_it_fails():
            for fragment in self._fragments:
                if fragment.on_its_way is not None:
                    self._end(fragment)
            stepped = [fragment for fragment in self._fragments if fragment.steps]
            for fragment in stepped:
                self._begin(fragment)
            for fragment in stepped:
                self._end(fragment)
            self._steps = 0

    @torch.no_grad()
    def _begin(self, fragment: _Fragment) -> None:
        """Begin the mean of a fragment."""
        self._follow_parameters(fragment)
        parameters = [self._parameters[index] for index in fragment.parameters]
        values, agreed = parameters, [self._agreed[i] for i in fragment.parameters if self._agreed]
        if self.outer is not None:
            values = [own - p for own, p in zip(agreed, parameters, strict=True)]
        sent = [p.clone() for p in parameters] if self._settings.delay else None
        mean = _Mean(values, [self._names[p] for p in parameters], sent, self._settings)
        fragment.on_its_way, fragment.steps = mean, 0
        if self._settings.process_set.included():
            self._take_index()
            prefix = f"{self._settings.kind}.{self._index}"
            name = f"{self._fragments.index(fragment)}.{fragment.rounds}"
            mean.start(prefix, name, parameters, agreed)

    def _take_index(self) -> None:
        """Take this optimizer's number in the process set, in the same order on all ranks."""
        if self._settings.process_set.included():
            engine = engine_of(self._settings.process_set)
            if engine is not self._engine:
                owned = membership(self._settings.process_set).owned
                self._index = owned[Rounds] = owned.get(Rounds, -1) + 1
                self._engine = engine

    @torch.no_grad()
    def _end(self, fragment: _Fragment) -> None:
        """Wait for the mean of a fragment, and apply it."""
        mean, fragment.on_its_way = fragment.on_its_way, None
        assert mean is not None
        mean.wait()
        leader = self._leader()
        if leader is not None and self.inner is not None:
            mean.tell(leader, self.inner, self._settings.kind)
        results = mean.views
        if self.outer is not None:
            agreed = [self._agreed[index] for index in fragment.parameters]
            for own, gradient in zip(agreed, results, strict=True):
                own.grad = gradient
            self.outer.step()
            self.outer.zero_grad()
            results = agreed
        for place, index in enumerate(fragment.parameters):
            parameter, result = self._parameters[index], results[place]
            if mean.sent is None or not fragment.steps:
                parameter.copy_(result)
            else:
                parameter.add_(result - mean.sent[place])
        fragment.rounds += 1
        if mean.is_different and not self._warned and current.rank() == min(mean.ranks):
            self._warned = True
            _log.warning(
                "%s: the ranks do not have the same agreed parameters, so they train different "
                "models: let all ranks load_state_dict() or none, and none change "
                "optimizer.outer alone",
                self._settings.kind,
            )

    @torch.no_grad()
    def _follow_parameters(self, fragment: _Fragment) -> None:
        """After model.to(), move agreed parameters to the parameters' device and dtype."""
        if self.outer is None:
            return
        for index in fragment.parameters:
            agreed, parameter = self._agreed[index], self._parameters[index]
            if agreed.device != parameter.device or agreed.dtype != parameter.dtype:
                agreed.data = agreed.data.to(parameter)
                state = self.outer.state[agreed]
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape == agreed.shape:
                        state[key] = value.to(parameter)

    # --- state

    def state(self) -> dict[str, Any] | None:
        """Return the state for a later run, which begins a pending mean anew.

        None on a rank that takes no part in agreements.
        """
        if not self.agrees:
            return None
        return {
            "has_begun": self.has_begun,
            "steps": self._steps,
            "fragments": [[each.rounds, each.unsent] for each in self._fragments],
            "agreed": [each.detach() for each in self._agreed],
            "outer": self.outer.state_dict() if self.outer is not None else None,
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a state.

        Args:
            state: the result of `state`, from any rank; None: begin, with the parameters that the
                optimizer has in its next step.

        Raises:
            ValueError: the state is of other parameters.
        """
        is_used = state is not None and bool(self._sets())
        if state is not None and is_used:
            shapes, own = (
                [list(a.shape) for a in all_] for all_ in (state["agreed"], self._agreed)
            )
            if shapes != own:
                raise ValueError(
                    f"the state of {self._settings.kind} is of {len(shapes)} agreed parameters of "
                    f"shapes {shapes[:3]}..., and the optimizer has {len(own)} of {own[:3]}..."
                )
        for fragment in self._fragments:
            if fragment.on_its_way is not None:  # before another one of the same name begins
                fragment.on_its_way.wait()
            fragment.on_its_way, fragment.rounds, fragment.steps = None, 0, 0
        self._steps = 0
        self._begin_anew()
        if state is None or not is_used:
            return
        if self.outer is not None:
            with torch.no_grad():
                torch._foreach_copy_(self._agreed, list(state["agreed"]))
            self.outer.load_state_dict(state["outer"])
        self._steps, self.has_begun = state["steps"], state["has_begun"]
        if len(state["fragments"]) == len(self._fragments):
            for fragment, (rounds, steps) in zip(self._fragments, state["fragments"], strict=True):
                fragment.rounds, fragment.steps = rounds, steps

    def follow_world(self) -> None:
        """Drop pending means after a change of the ranks. The next means include their steps."""
        for fragment in self._fragments:
            fragment.steps, fragment.on_its_way = fragment.unsent, None
        self._engine = None
        with contextlib.suppress(ProcessSetLostError, InvalidArgumentError):  # step() raises it
            agreed, self.agrees = self.agrees, bool(self._sets())
            if self.agrees and not agreed:  # in place of a rank that has died
                self._make_outer()
                self._begin_anew()
            self._take_index()

    @property
    def ended(self) -> list[int]:
        """The number of ended rounds of each fragment."""
        return [fragment.rounds for fragment in self._fragments]

    @property
    def agreed(self) -> list[Tensor]:
        """The agreed parameters; with LocalSGD, which keeps none, those of this rank."""
        values = self._agreed if self.outer is not None and self.has_begun else self._parameters
        return [value.detach() for value in values]

    @torch.no_grad()
    def take(self, fragment: int, values: Sequence[Tensor]) -> None:
        """Set the parameters of a fragment. `values`: one for each of all parameters."""
        for index in self._fragments[fragment].parameters:
            self._parameters[index].copy_(values[index])


def _line(parameter: Tensor, name: str) -> str:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"'{name}' {dtype} {list(parameter.shape)}"


class _Mean:
    """The mean of tensors over the ranks.

    Args:
        values: this rank's tensors; only their shapes count on a rank that just gets the result.
        names: the names of the parameters.
        sent: copies of the parameters, if steps are taken before the result is applied.
        settings: the arguments of LocalSGD or DiLoCo.

    Attributes:
        views: the values, then the means.
        sent: as above.
        ranks: the ranks that make the mean.
        is_different: whether their agreed parameters differ.
    """

    def __init__(
        self,
        values: Sequence[Tensor],
        names: Sequence[str],
        sent: Sequence[Tensor] | None,
        settings: _LocalSettings,
    ) -> None:
        self.sent = sent
        self.views: list[Tensor] = list(values)
        self.ranks = settings.process_set.ranks or [0]
        self.is_different = False
        self._settings = settings
        self._names = names
        self._engine = engine_of(settings.process_set) if settings.process_set.included() else None
        self._stages: list[FinishStage] = []
        self._digests: Work | None = None
        specs = [
            TensorSpec(v.numel() * (1 + v.is_complex()), v.dtype.to_real(), v.device)
            for v in values
        ]
        self._buckets = plan_buckets(specs, range(len(specs)), current.config().bucket_bytes)
        self._memories = [self._memory(bucket) for bucket in self._buckets]
        for bucket, memory in zip(self._buckets, self._memories, strict=True):
            for slot in bucket.slots:
                value = values[slot.parameter]
                flat = memory[slot.offset : slot.offset + slot.numel]
                flat = torch.view_as_complex(flat.view(-1, 2)) if value.is_complex() else flat
                self.views[slot.parameter] = flat.view(value.shape).copy_(value)

    def _memory(self, bucket: Bucket) -> Tensor:
        if self._engine is not None:
            return bucket_memory(self._engine, bucket, bucket.dtype)
        return torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)

    def start(
        self, prefix: str, name: str, parameters: Sequence[Tensor], agreed: Sequence[Tensor]
    ) -> None:
        """Start to make the mean, on a rank of the process set.

        Args:
            prefix: the prefix of the operations' names.
            name: the name of this mean.
            parameters: the parameters, in the order of the values.
            agreed: the agreed parameters, whose digest the ranks compare.
        """
        assert self._engine is not None
        # An allgather, since it fails if a rank has joined: an allreduce would add its zeros.
        digest = digests_of([each.detach() for each in agreed])
        digest = digest.mul_(torch.arange(len(agreed), device="cpu") * 2 + 1).sum(0, keepdim=True)
        self._digests = self._engine.submit("allgather", digest, None, f"{prefix}.agreed.{name}")
        make = wire_maker(
            self._settings.reduction(),
            self._engine,
            len(self.ranks),
            list(zip(self._names, parameters, strict=True)),
        )
        for number, bucket in enumerate(self._buckets):
            name_of = functools.partial("{}.{}.{}.{}".format, prefix, name, number)
            self._stages += make(bucket, self.views.__getitem__).start(
                name_of,
                self._memories[number],
                bucket.parameters,
                blocking=not self._settings.delay,
            )

    def wait(self) -> None:
        """Wait until the mean is made.

        Raises:
            RingError: a rank is gone or late, or has joined.
        """
        if self._digests is not None:
            digests = self._digests.wait()
            self.is_different = bool((digests != digests[0]).any())
        while self._stages:
            self._stages = [finish for finish in self._stages if finish()]

    def tell(self, leader: int, process_set: ProcessSet, kind: str) -> None:
        """Send the means of one rank to all ranks of a set. Collective."""
        handles = [
            broadcast_async_(memory, leader, f"{kind}.result.{number}", process_set)
            for number, memory in enumerate(self._memories)
        ]
        for handle in handles:
            handle.wait()
