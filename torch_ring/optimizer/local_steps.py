"""LocalSGD and DiLoCo: ranks step by themselves, and agree on parameters once in a while.

Both are one mechanism. After each `every` steps the ranks average a tensor for each parameter: the
parameter itself (LocalSGD), or its difference to the last parameters on which they agreed, with
which another optimizer steps (DiLoCo). The averaging is that of gradients: buckets, and the wires
of `bucket_wire`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_ring._C import Engine, Work
from torch_ring.collectives.broadcast import broadcast_async_
from torch_ring.collectives.compare import digests_of, require_same, verify_step
from torch_ring.collectives.reduce_op import Average
from torch_ring.compression import Compression, Compressor
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
from torch_ring.optimizer.gradient_report import refuse_sharded
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

__all__ = ["DiLoCo", "LocalSGD"]

_log = logging.getLogger("torch_ring")

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_STATE = "local_steps"  # in an optimizer's state_dict()


def LocalSGD(  # noqa: N802  the name in the literature
    optimizer: OptimizerT,
    every: int = 8,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    process_set: ProcessSet = global_process_set,
) -> OptimizerT:
    """Make `optimizer` average the parameters over all ranks after every `every` of its steps.

    Steps in between are this rank's own: nothing is sent. The state of the optimizer, such as
    momentum, stays each rank's own, too. See :func:`DiLoCo` for whatever is not said here.

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
    settings = _Settings("LocalSGD", every, process_set=process_set)
    return _wrap(optimizer, settings, named_parameters)


def DiLoCo(  # noqa: N802  the name in the literature
    optimizer: OptimizerT,
    outer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    outer_options: Mapping[str, Any] | None = None,
    every: int = 64,
    fragments: int = 1,
    delay: int = 0,
    compression: Compressor | StatefulCompressor = Compression.none,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    process_set: ProcessSet = global_process_set,
) -> OptimizerT:
    """Make `optimizer` step by itself, and agree with the other ranks after every `every` steps.

    The ranks keep a second copy of the parameters, on which they agree. After `every` steps, the
    agreed parameters minus this rank's own are averaged over the ranks. This mean is the gradient
    of a step of another optimizer, the outer one, on the agreed parameters, which all ranks then
    take as their own.

    The optimizer becomes an instance of a subclass of its class, which has in addition

    * ``end_round()``: agree now, wherever the round is: before an evaluation, a checkpoint, the end
      of the training. Collective;
    * ``outer``: the outer optimizer, for a scheduler of its learning rate, say; its parameters are
      the agreed ones.

    State, hyper-parameters, hooks and schedulers stay. ``state_dict()`` has one key more, with the
    agreed parameters and the state of the outer optimizer; it is equal on all ranks but for the
    local part, so one rank can save it, and any number of ranks go on from it. Buffers are each
    rank's own (:func:`broadcast_buffers`). Under ``GradScaler`` a step that is skipped on one rank
    counts as one: all ranks end a round after equally many calls of ``scaler.step()``.

    Collective: all ranks of the process set wrap optimizers of the same parameters in the same
    order, with the same weights, and take equally many steps. :func:`join` is refused in words.
    Parameters that are frozen when the optimizer is wrapped are not sent.

    Args:
        optimizer: any torch optimizer, fresh or with state. A ``DistributedOptimizer`` of a smaller
            process set averages the gradients of that set in every step; this set then has exactly
            one rank of that one, which tells its neighbours the result (:func:`hierarchy` makes two
            such sets).
        outer: makes the outer optimizer of a list of parameters.
        outer_options: its keyword arguments. None: ``lr=0.7, momentum=0.9, nesterov=True`` for
            ``torch.optim.SGD``, as in the paper, and none for others.
        every: steps from one agreement on a parameter to the next.
        fragments: into how many parts the parameters are cut. Each has its own rounds, of `every`
            steps, one after the other, so that a k-th is sent k times as often.
        delay: steps that are taken while a mean is on its way. The difference that it makes is then
            added to the parameters: steps that were taken meanwhile stay.
        compression: of what is sent, as in ``DistributedOptimizer``. With a stateful compressor and
            a delay, only its first request is under way during the steps.
        named_parameters: the names of parameters in errors, as ``model.named_parameters()``.
            None: errors have numbers instead.
        process_set: the ranks that agree; by default all. Others step by themselves.

    Returns:
        `optimizer`.

    Raises:
        TypeError: `optimizer` is not a torch optimizer, or `outer` makes none.
        ValueError: another argument is wrong.
        MismatchError: parameters or arguments differ between ranks. In the first step: the weights
            do.

    Source: A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
    Models", 2023, and "Streaming DiLoCo with overlapping communication", 2025 (fragments, delay;
    there a mixture of both parameters takes the place of the sum).
    """
    if outer_options is None:
        paper = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
        outer_options = paper if outer is torch.optim.SGD else {}
    settings = _Settings(
        "DiLoCo", every, fragments, delay, compression, outer, outer_options, process_set
    )
    return _wrap(optimizer, settings, named_parameters)


@dataclass(frozen=True)
class _Settings:
    """The arguments of `LocalSGD` or `DiLoCo`.

    Raises:
        ValueError: one is wrong.
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
        if not callable(getattr(self.compression, "compress", None)):
            raise ValueError(
                f"compression must be a compressor like Compression.bf16, not {self.compression!r}"
            )
        if not isinstance(self.process_set, ProcessSet):
            raise ValueError(f"process_set must be a ProcessSet, not {self.process_set!r}")

    def reduction(self) -> ReductionSettings:
        """Return how the means are made."""
        return ReductionSettings(Average, 1.0, self.compression, current.config().bucket_bytes)

    def describe(self) -> str:
        """Return a line that must be the same on all ranks."""
        outer = getattr(self.outer, "__qualname__", "an outer optimizer") if self.outer else "none"
        return (
            f"{self.kind}: every={self.every}, fragments={self.fragments}, delay={self.delay}, "
            f"outer={outer} {dict(self.outer_options)}, {self.reduction().describe()}"
        )


def _wrap(
    optimizer: OptimizerT,
    settings: _Settings,
    named_parameters: Iterable[tuple[str, Tensor]] | None,
) -> OptimizerT:
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
                f"{kind} does not go with shard_state=True: a parameter lies in the memory of "
                "several ranks, and each of them would take the agreed one"
            )
        names = dict(optimizer._parameter_names)
    else:
        names = checked_names(optimizer, named_parameters)
    with wrapped(optimizer, LocalStepsOptimizer) as made:
        made._start(names, settings)
    return optimizer


class LocalStepsOptimizer(Wrapped):
    """The methods that a wrapped optimizer has in addition."""

    _rounds: Rounds

    def _start(self, names: dict[Tensor, str], settings: _Settings) -> None:
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

        Parameters that have seen no step since the last agreement stay as they are.
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


def _finds_infinity(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a scaler is about to skip a step: on this rank, others may take theirs."""
    state = scaler._per_optimizer_states[id(optimizer)]
    if not state["found_inf_per_device"]:
        scaler.unscale_(optimizer)  # as it would itself
    return any(found.item() for found in state["found_inf_per_device"].values())


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Step pre-hook; called twice for one step if a `step` calls its base class's."""
    assert isinstance(optimizer, LocalStepsOptimizer)
    optimizer._rounds.begin_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Step post-hook; called as often as `_before_step`, of which the last call ends the step."""
    assert isinstance(optimizer, LocalStepsOptimizer)
    wrapper = sys._getframe(1)  # torch's, around step()
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
        at: the step of each `every` after which a round ends.
        rounds: that have ended.
        steps: since then.
        on_its_way: the mean, if it has begun.
    """

    parameters: Sequence[int]
    at: int
    rounds: int = 0
    steps: int = 0
    on_its_way: _Mean | None = None


class Rounds:
    """Counts the steps of an optimizer, and lets its ranks agree on the parameters.

    Thread: the one that takes steps.

    Args:
        names: the parameters of the optimizer, with their names.
        settings: the arguments.
        inner: the ranks that average the gradients of each step, if it is a DistributedOptimizer.

    Attributes:
        inner: as above.
        outer: the outer optimizer; None with LocalSGD, and on ranks that agree with nobody.
        agrees: whether this rank agrees with others, itself or by its neighbours.
        has_begun: whether it has, in a first step.
    """

    def __init__(
        self, names: Mapping[Tensor, str], settings: _Settings, inner: ProcessSet | None
    ) -> None:
        self._settings = settings
        self.inner = inner
        self._frozen = {p: name for p, name in names.items() if not p.requires_grad}
        self._names = {p: name for p, name in names.items() if p.requires_grad}
        self._parameters = list(self._names)
        self.outer: torch.optim.Optimizer | None = None
        self._agreed: list[Tensor] = []
        self.has_begun = False
        self._steps = 0
        self._engine: Engine | None = None  # of the world in which `_index` counts
        self._index = 0
        self._warned = False
        current.config()  # raises NotInitializedError
        self._fragments = self._cut()
        refuse_sharded((name, p) for p, name in self._names.items())
        self._require_same()
        self.agrees = bool(self._sets())
        self._make_outer()
        self._take_index()

    def _require_same(self) -> None:
        """Compare arguments and parameters of the ranks. A rank whose sets are wrong tells it."""
        lines = [self._settings.describe(), *(_line(p, name) for p, name in self._names.items())]
        problem: Exception | None = None
        try:
            self._sets()
        except InvalidArgumentError:  # there are no sets in which to tell it
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
            except MismatchError as error:  # the other set is to hear of it, too
                problem = problem or error
        if problem is not None:
            raise problem

    def _cut(self) -> list[_Fragment]:
        """Return the fragments: consecutive parameters, of about equally many elements each."""
        parts, every = self._settings.fragments, self._settings.every
        sizes = [p.numel() for p in self._parameters]
        if parts > max(len(sizes), 1):
            raise ValueError(f"fragments={parts}, but {len(sizes)} parameters require gradients")
        fragments: list[list[int]] = [[]]
        done = 0
        for index, size in enumerate(sizes):
            left = len(sizes) - index  # parameters, for as many parts that are still to begin
            is_full = done >= sum(sizes) * len(fragments) / parts or left == parts - len(fragments)
            if fragments[-1] and is_full and len(fragments) < parts:
                fragments.append([])
            fragments[-1].append(index)
            done += size
        return [
            _Fragment(part, every * (number + 1) // parts) for number, part in enumerate(fragments)
        ]

    def _leader(self) -> int | None:
        """Return the rank of the inner set that tells it the results; None: there is no such set.

        Raises:
            ValueError: that set has no rank of the process set, or several.
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
        """Return the sets whose other ranks must have the same agreed parameters as this one.

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
        """Make agreed parameters of the present ones, and their optimizer."""
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
        """Let further parameters of the optimizer take part, in the last fragment. Collective."""
        added = {p: name for p, name in names.items() if p.requires_grad}
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
        """Check the parameters, and in the first step that the ranks have the same weights."""
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
        problem: MismatchError | None = None
        sets = self._sets()
        for each in sets:
            try:
                verify_step(1, 0, optimizer, self._names, each, with_state=False)
            except MismatchError as error:  # the other set is to hear of it, too
                problem = problem or error
        if self.inner is not None and self.inner in sets:
            try:
                told = [str(problem)] if problem else []
                require_same(told, "the ranks do not begin with the same weights", self.inner)
            except MismatchError as error:
                problem = problem or error
        if problem is not None:
            raise problem
        self.has_begun = True
        if self.outer is not None:  # the program may have broadcast parameters since
            with torch.no_grad():
                torch._foreach_copy_(self._agreed, self._parameters)

    def count_step(self) -> None:
        """Count a step, and begin or end what is due after it."""
        if not self._sets():
            return
        with self._taken_back_if_it_fails():
            self._steps += 1
            for fragment in self._fragments:
                fragment.steps += 1
            self._exchange()

    @contextlib.contextmanager
    def _taken_back_if_it_fails(self) -> Iterator[None]:
        """Context of an exchange. If a rank is lost, say, the survivors do it once more."""
        steps = self._steps
        counts = [max(each.steps, each.on_its_way is not None) for each in self._fragments]
        try:
            yield
        except BaseException:
            self._steps = steps
            for fragment, count in zip(self._fragments, counts, strict=True):
                fragment.on_its_way, fragment.steps = None, count
            raise

    def _exchange(self) -> None:
        """Begin and end what is due after a step."""
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
        """End what is on its way, and a round of each fragment that has seen a step since."""
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
        """Begin to send a fragment."""
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
        """Number the optimizers of the process set: in one order on all ranks, step or not."""
        if self._settings.process_set.included():
            engine = engine_of(self._settings.process_set)
            if engine is not self._engine:
                owned = membership(self._settings.process_set).owned
                self._index = owned[Rounds] = owned.get(Rounds, -1) + 1
                self._engine = engine

    @torch.no_grad()
    def _end(self, fragment: _Fragment) -> None:
        """Wait for the mean of a fragment, and let it count."""
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
        """Move agreed parameters to the device and the dtype of the parameters: of model.to()."""
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
        """Return what a later run needs. A mean that is on its way is begun anew then.

        A rank that agrees with nobody has nothing to give, and returns None.
        """
        if not self.agrees:
            return None
        return {
            "has_begun": self.has_begun,
            "steps": self._steps,
            "fragments": [
                # Of a mean that is dropped there is something to send.
                [each.rounds, max(each.steps, int(each.on_its_way is not None))]
                for each in self._fragments
            ],
            "agreed": [each.detach() for each in self._agreed],
            "outer": self.outer.state_dict() if self.outer is not None else None,
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a state.

        Args:
            state: what `state` returned, on any rank; None: begin, with the parameters that the
                optimizer has in its next step.

        Raises:
            ValueError: it is of other parameters.
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
            if fragment.on_its_way is not None:  # or another one of its name would begin beside it
                fragment.on_its_way.wait()
            fragment.on_its_way, fragment.rounds, fragment.steps = None, 0, 0
        self._steps, self.has_begun = 0, False
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
        """Drop what is on its way: the ranks are others. The next mean has it, too."""
        for fragment in self._fragments:
            if fragment.on_its_way is not None:
                fragment.on_its_way, fragment.steps = None, max(fragment.steps, 1)
        self._engine = None
        with contextlib.suppress(ProcessSetLostError, InvalidArgumentError):  # step() raises it
            agreed, self.agrees = self.agrees, bool(self._sets())
            if self.agrees and not agreed:  # instead of a rank that has died
                self.has_begun = False
                self._make_outer()
            self._take_index()

    @property
    def ended(self) -> list[int]:
        """How many rounds of each fragment have ended."""
        return [fragment.rounds for fragment in self._fragments]

    @property
    def agreed(self) -> list[Tensor]:
        """The agreed parameters; with LocalSGD, which keeps none, those of this rank."""
        values = self._agreed if self.outer is not None and self.has_begun else self._parameters
        return [value.detach() for value in values]

    @torch.no_grad()
    def take(self, fragment: int, values: Sequence[Tensor]) -> None:
        """Give the parameters of a fragment their values among those of all parameters."""
        for index in self._fragments[fragment].parameters:
            self._parameters[index].copy_(values[index])


def _line(parameter: Tensor, name: str) -> str:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"'{name}' {dtype} {list(parameter.shape)}"


class _Mean:
    """The mean of tensors over the ranks.

    Args:
        values: of this rank; a rank that only hears the result gives their shapes.
        names: of the parameters.
        sent: copies of the parameters, if steps are taken before the result counts.
        settings: say how the mean is made.

    Attributes:
        views: the values, then the means.
        sent: as above.
        ranks: that make it.
        is_different: whether they differ in the agreed parameters.
    """

    def __init__(
        self,
        values: Sequence[Tensor],
        names: Sequence[str],
        sent: Sequence[Tensor] | None,
        settings: _Settings,
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
        """Start to make it, on a rank of the process set.

        Args:
            prefix: of the names of operations.
            name: of this one.
            parameters: in the order of the values.
            agreed: of which the ranks compare a digest.
        """
        assert self._engine is not None
        # Of ranks that have joined, an allreduce would add zeros: an allgather refuses them.
        digest = digests_of([each.detach() for each in agreed])
        digest = digest.mul_(torch.arange(len(agreed), device="cpu") * 2 + 1).sum(0, keepdim=True)
        self._digests = self._engine.allgather(digest, f"{prefix}.agreed.{name}")
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
        """Wait until it is made.

        Raises:
            RingError: a rank is gone or late, or has joined.
        """
        if self._digests is not None:
            digests = self._digests.wait()
            self.is_different = bool((digests != digests[0]).any())
        while self._stages:
            self._stages = [finish for finish in self._stages if finish()]

    def tell(self, leader: int, process_set: ProcessSet, kind: str) -> None:
        """Give all ranks of a set the means that one of them has. Collective."""
        handles = [
            broadcast_async_(memory, leader, f"{kind}.result.{number}", process_set)
            for number, memory in enumerate(self._memories)
        ]
        for handle in handles:
            handle.wait()
