# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer: makes any torch optimizer step with the gradients of all ranks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from torch_ring._C import GradientHooks, NotFinite, Worst
from torch_ring.collectives.compare import verify_step
from torch_ring.collectives.reduce_op import Adasum, Average, ReduceOp, Sum, checked_op
from torch_ring.compression import Compression, Compressor, require_compressor
from torch_ring.compression.stateful import StatefulCompressor
from torch_ring.errors import (
    InvalidArgumentError,
    NonFiniteGradientError,
    ProcessSetLostError,
)
from torch_ring.optimizer.adasum_optimizer import wrap_adasum
from torch_ring.optimizer.backward_sync import BackwardSync, backward_sync_of
from torch_ring.optimizer.bucket_wire import ReductionSettings
from torch_ring.optimizer.buckets import split_evenly
from torch_ring.optimizer.gradient_report import culprit
from torch_ring.optimizer.loaded_rate import LoadedRate
from torch_ring.optimizer.parameters import has_gradients
from torch_ring.optimizer.reducer import Reducer
from torch_ring.optimizer.shard_parts import can_cut, require_dense
from torch_ring.optimizer.sharded_state import ShardedState
from torch_ring.optimizer.wrapping import (
    Copied,
    Wrapped,
    checked_names,
    require_known,
    unnamed,
    wrapped,
)
from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet, global_process_set, require_whole

__all__ = [
    "DistributedOptimizer",
    "WrappedOptimizer",
    "follow_world",
    "has_moved",
    "require_survivors",
]

_log = logging.getLogger("torch_ring")

Groups = int | Sequence[Sequence[Tensor]] | None


def DistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compressor | StatefulCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    run_ahead: bool | None = None,
    shard_state: bool = False,
    nan_check: bool | None = None,
) -> WrappedOptimizer:
    """Make `optimizer` step with gradients that are averaged over all ranks.

    ``p.grad`` is averaged when ``backward()`` returns, so clipping, ``GradScaler`` and other
    readers of gradients need no special call. A parameter with a gradient on any rank gets one on
    all; a rank without one counts as zero. An averaged gradient is not averaged again: another pass
    adds its own average to it, and changes, as by clipping, stay this rank's own.

    ``step()`` averages the rest: what accumulates, and what the program has set or written into
    ``p.grad`` itself. To clip that, call ``synchronize()`` first. docs/api/optimizer.md has more.

    The optimizer becomes an instance of a subclass of its class, with these additions:

    * ``synchronize()``: reduce the gradients that any rank has accumulated, as ``step()`` does;
    * ``no_sync()``: a context in which backward only accumulates, as DDP's;
    * ``skip_synchronize()``: a context in which ``step()`` reduces nothing;
    * ``set_backward_passes_per_step(passes)``, and ``backward_passes_per_step``.

    Collective: all ranks of the process set wrap optimizers of the same parameters in the same
    order, and call ``add_param_group`` alike. On one rank it costs nothing.

    Args:
        optimizer: any torch optimizer, fresh or with state.
        named_parameters: the names of parameters in errors, as ``model.named_parameters()``. None:
            numbers.
        compression: ``Compression.none``, ``.fp16``, ``.bf16``, ``.int8()``, ``.powersgd()``, or
            your own (docs/compression.md).
        backward_passes_per_step: the number of passes whose gradients are added up (not averaged)
            before they are averaged over ranks. If it is not 1, one more pass before ``step()`` is
            an AssertionError.
        op: Average or Sum of gradients; or Adasum.
        gradient_predivide_factor: Average divides by this before the sum, by size / this after it.
        num_groups: deprecated, use `groups`.
        groups: gradients that are reduced together, and apart from others: lists of parameters,
            or the number of groups of consecutive ones. 0 or None: by size and readiness.
        sparse_as_dense: reduce sparse gradients as dense ones; they are sparse again afterwards.
        process_set: the ranks that train this model together; by default all.
        run_ahead: whether hosts do not wait for each other in backward passes on GPUs that repeat
            themselves (docs/gpu.md). None: the value of TORCH_RING_RUN_AHEAD, by default yes.
        shard_state: whether each rank steps only a part of the parameters, and a host holds the
            optimizer's state once (docs/sharding.md).
        nan_check: whether ``step()`` raises NonFiniteGradientError on all ranks if a gradient was
            not finite before the average (docs/errors.md). None: the value of
            TORCH_RING_NAN_CHECK, by default no.

    Returns:
        `optimizer`.

    Raises:
        TypeError: `optimizer` is not a torch optimizer.
        ValueError: another argument is wrong, or a parameter cannot be reduced.
        MismatchError: the parameters differ between ranks; the first difference is named.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        is_class = isinstance(optimizer, type)
        found = f"the class {optimizer.__name__}" if is_class else type(optimizer).__name__
        raise TypeError(
            f"DistributedOptimizer wraps a torch.optim.Optimizer, not {found}: make the optimizer "
            "first, as in DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))"
        )
    if isinstance(optimizer, Wrapped) and not isinstance(optimizer, Copied):
        raise ValueError("the optimizer is a DistributedOptimizer already: wrap it once")
    _check_passes(backward_passes_per_step)
    require_compressor(compression)
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set must be a ProcessSet, not {process_set!r}")
    names = checked_names(optimizer, named_parameters)
    op = checked_op(op, (Average, Sum, Adasum))
    if shard_state:
        if op == Adasum:
            raise ValueError(
                "shard_state=True does not go with op=Adasum: each rank has its own state"
            )
        may_cut = can_cut(optimizer)
        require_dense(names)
    config = current.config()
    nan_check = config.nan_check if nan_check is None else bool(nan_check)
    if op == Adasum:
        if nan_check:
            raise ValueError("nan_check (TORCH_RING_NAN_CHECK) needs op=Average or Sum")
        if gradient_predivide_factor != 1.0:
            raise ValueError("gradient_predivide_factor needs op=Average")
        wrap_adasum(optimizer, names, compression, process_set, backward_passes_per_step)
        return cast("WrappedOptimizer", optimizer)
    reduction = ReductionSettings(
        _checked_with(gradient_predivide_factor, op),
        gradient_predivide_factor,
        compression,
        config.bucket_bytes,
        config.direct_gradient_bytes,
        sparse_as_dense,
        config.run_ahead if run_ahead is None else bool(run_ahead),
        bool(shard_state),
        nan_check,
    )
    groups = _groups_of(groups, num_groups, list(names))
    settings = _WrapSettings(reduction, groups, process_set, config.check_every)
    if shard_state:
        with wrapped(optimizer, _ShardedOptimizer) as sharded:
            sharded._shards = ShardedState(process_set, may_cut=may_cut)
            sharded._step_by_class()
            sharded._start(names, settings, backward_passes_per_step)
        made: _DistributedOptimizer = sharded
    else:
        with wrapped(optimizer, _DistributedOptimizer) as made:
            made._start(names, settings, backward_passes_per_step)
    if (
        made._reducer
        and torch.__future__.get_swap_module_params_on_conversion()
        and current.rank() == 0
    ):
        _log.warning(
            "float(), to() and load_state_dict() of a model will fail, now that its optimizer is "
            "wrapped: torch cannot replace parameters that are in use. Call "
            "torch.__future__.set_swap_module_params_on_conversion(False)"
        )
    return cast("WrappedOptimizer", optimizer)


def follow_world(optimizer: torch.optim.Optimizer) -> None:
    """Make a wrapped optimizer average over the ranks of the present world. Collective.

    Gradients of the previous world are dropped, reduced or not. An optimizer that is not wrapped
    stays as it is. If its process set has lost a rank, its steps raise ProcessSetLostError.
    """
    if isinstance(optimizer, _DistributedOptimizer):
        optimizer._follow_world()


def require_survivors(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the death of a rank would lose a part of the optimizer's state."""
    if isinstance(optimizer, _ShardedOptimizer) and optimizer._shards.is_divided:
        raise ValueError(
            "elastic training goes with shard_state=True only where the ranks of a host share "
            "memory: here a rank that dies takes its part of the optimizer's state with it"
        )


def has_moved(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a failed step in the last world may have changed parameters or state."""
    return not isinstance(optimizer, _ShardedOptimizer) or optimizer._shards.has_moved


@dataclass(frozen=True)
class _WrapSettings:
    """The arguments of a reducer, kept to make the next one when parameters are added; and more."""

    reduction: ReductionSettings
    groups: Groups
    process_set: ProcessSet
    check_every: int  # steps; 0: never


class _JointClosure:
    """A closure whose gradients and loss are reduced over all ranks.

    Args:
        closure: computes gradients, and returns a loss or None. May call add_param_group().
        optimizer: the optimizer, whose process set has several ranks.
    """

    def __init__(self, closure: Callable[[], Any], optimizer: _DistributedOptimizer) -> None:
        self._closure = closure
        self._optimizer = optimizer

    def __call__(self) -> Any:
        """Compute the gradients, reduce them, and return the loss reduced over all ranks."""
        self._optimizer._backward_sync.expect_gradients(self._reducer)
        loss = self._closure()
        reducer = self._reducer
        self._optimizer._backward_sync.reduce_pending(reducer)
        self._optimizer._require_finite()
        if loss is None:
            return None
        if isinstance(loss, Tensor):
            has_fractions = loss.is_floating_point() or loss.is_complex()
            return reducer.reduce_loss(loss if has_fractions else loss.double())
        if not hasattr(loss, "__float__"):
            raise TypeError(
                "the closure of a step returns the loss, as a tensor or a number, or None; not "
                f"{type(loss).__name__}"
            )
        number = torch.tensor(float(loss), dtype=torch.float64, device="cpu")
        mean = reducer.reduce_loss(number).item()
        is_whole = isinstance(loss, Integral) or not isinstance(loss, Real)
        return mean if is_whole else type(loss)(mean)  # such as np.float32

    @property
    def _reducer(self) -> Reducer:
        reducer = self._optimizer._reducer
        assert reducer is not None, "steps of one rank have no joint closure"
        return reducer


class _DistributedOptimizer(Wrapped):
    """The methods that are added to the user's optimizer class."""

    _parameter_names: dict[Tensor, str]
    _reducer: Reducer | None  # None on one rank, and outside the process set
    _backward_sync: BackwardSync  # the reducer's; unset without a reducer
    _settings: _WrapSettings
    _passes_per_step: int
    _left_out: list[Tensor]  # frozen parameters without gradients to reduce
    _skip_synchronize: bool
    _step_is_open: bool
    _steps_alone: int  # steps without other ranks
    _broken_by: str  # the error of the last change of its parameters
    _checked_groups: list[list[Tensor]]  # the parameters of each group at the last step
    _loaded_rate: LoadedRate

    def _start(
        self, names: dict[Tensor, str], settings: _WrapSettings, passes_per_step: int
    ) -> None:
        self._reducer = None
        self._parameter_names = names
        self._left_out = [p for p in names if not has_gradients(p)]
        self._settings = settings
        self._passes_per_step = passes_per_step
        self._skip_synchronize = False
        self._step_is_open = False
        self._steps_alone = 0
        self._checked_groups = []
        self._broken_by = ""
        self._make_reducer()
        # Hooks instead of a method: a scheduler may have bound the class's `step` to the instance.
        self.register_step_pre_hook(_before_step)
        if settings.reduction.nan_check:
            self.register_step_pre_hook(_look)
        self.register_step_post_hook(_after_step)
        self._loaded_rate = LoadedRate(settings.process_set)
        self._loaded_rate.hook(self)

    def synchronize(self) -> None:
        """Reduce the gradients accumulated on any rank since the last reduction. Collective."""
        if self._reducer:
            self._require_known_parameters()
            self._backward_sync.reduce_pending(self._reducer)
        else:
            require_whole(self._settings.process_set)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which ``step()`` uses the gradients as they are."""
        self._skip_synchronize = True
        try:
            yield
        finally:
            self._skip_synchronize = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes only accumulate; the next one outside reduces all."""
        if self._reducer:
            self._reducer.hooks.set_synchronizing(False)
        try:
            yield
        finally:
            if self._reducer:
                self._reducer.hooks.set_synchronizing(True)

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes over which gradients are accumulated."""
        return self._passes_per_step

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate gradients over `passes` backward passes from now on."""
        _check_passes(passes)
        self._passes_per_step = passes
        if self._reducer:
            self._reducer.hooks.set_passes_per_step(passes)
            self._reducer.hooks.restart_passes()

    def _after_zero_grad(self) -> None:
        if self._reducer:
            self._backward_sync.drop_gradients(self._reducer)

    @property
    def _process_set(self) -> ProcessSet:
        """The ranks that train together, for a ScaledLR."""
        return self._settings.process_set

    def _after_load_state_dict(self) -> None:
        self._loaded_rate.after_load(self)
        if self._reducer:
            self._reducer.hooks.restart_passes()

    def _require_known_parameters(self) -> None:
        """Raise ValueError for a parameter that is not reduced.

        Such a parameter was put into a group by hand, or was frozen when the optimizer was wrapped.
        """
        for parameter in self._left_out:
            if parameter.requires_grad:
                raise ValueError(
                    f"'{self._parameter_names[parameter]}' requires a gradient now, which cannot "
                    f"be reduced: its dtype is {parameter.dtype}"
                )
        groups = [group["params"] for group in self.param_groups]
        if len(groups) == len(self._checked_groups) and all(
            len(params) == len(before) and all(map(operator.is_, params, before))
            for params, before in zip(groups, self._checked_groups, strict=True)
        ):
            return
        require_known(groups, self._parameter_names, "reduced")
        self._checked_groups = [list(params) for params in groups]

    def _require_finite(self) -> None:
        """Raise NonFiniteGradientError, with nan_check and if a gradient is not finite.

        An optimizer that gets GradScaler's ``found_inf`` in ``step()`` skips such a step itself.
        """
        if not self._settings.reduction.nan_check or getattr(self, "found_inf", None) is not None:
            return
        if self._reducer:
            self._reducer.require_finite()
            return
        gradients = {
            name: parameter.grad
            for parameter, name in reversed(self._parameter_names.items())
            if parameter.grad is not None
        }
        looks = zip(gradients, GradientHooks.worst_numbers(list(gradients.values())), strict=True)
        found = [(name, worst) for name, worst in looks if worst != Worst.finite]
        if found:
            (name, worst), *others = found
            mine = NotFinite(0, current.rank(), worst, carries=False)
            raise NonFiniteGradientError(culprit(name, [mine], len(others), self._steps_alone + 1))

    def _after_add_param_group(self) -> None:
        """Reduce the new parameters from now on. Collective."""
        group = len(self.param_groups) - 1
        for index, parameter in enumerate(self.param_groups[-1]["params"]):
            self._parameter_names[parameter] = unnamed(group, index)
        self._left_out = [p for p in self._parameter_names if not has_gradients(p)]
        self._make_reducer(before=self._reducer)

    def _follow_world(self) -> None:
        self._step_is_open = False
        self._user_class.zero_grad(self, set_to_none=True)
        try:
            self._make_reducer()
        except ProcessSetLostError as error:  # raised by step() of an optimizer still in use
            if current.rank() == 0:
                _log.warning("the steps of an optimizer will fail: %s", error)

    def _make_reducer(self, before: Reducer | None = None) -> None:
        """Make a reducer of the parameters, if there is another rank. Collective.

        The reducer leaves the agreement when this optimizer is deleted, even if others refer to it.

        Args:
            before: the present one, if its gradients go on in the new one.
        """
        if self._reducer is not None:  # the traceback of a failed pass may keep it alive
            self._backward_sync.remove(self._reducer)
            del self._backward_sync  # it refers to the engine of a world that may have ended
        self._reducer = None  # free its buckets before new ones are made
        self._broken_by = ""  # also where this rank is alone now
        process_set = self._settings.process_set
        is_set = process_set.process_set_id is not None  # otherwise backward_sync_of() raises
        if is_set and (not process_set.included() or process_set.size() == 1):
            return
        parameters = list(filter(has_gradients, self._parameter_names))
        sync = backward_sync_of(process_set)
        try:
            reducer = sync.add(
                parameters,
                [self._parameter_names[parameter] for parameter in parameters],
                self._settings.reduction,
                _group_indices(self._settings.groups, parameters),
                before,
            )
        except BaseException as error:
            self._broken_by = f"{type(error).__name__}: {error}"
            raise
        reducer.hooks.set_passes_per_step(self._passes_per_step)
        leave = functools.partial(_leave, sync, weakref.ref(reducer))
        reducer.owner = weakref.ref(self, leave)
        reducer.comparison.optimizer = weakref.ref(self)
        self._reducer, self._backward_sync = reducer, sync


if TYPE_CHECKING:

    class WrappedOptimizer(_DistributedOptimizer, Any):  # type: ignore[misc]
        """The type of what `DistributedOptimizer` returns: the user's class with more methods.

        Python has no type for two classes at once. A class with `Any` among its bases comes
        closest: it fits wherever the user's class does, as in ``optimizer =
        DistributedOptimizer(optimizer)``. torch's methods and those added here have their types;
        what only the user's class has is Any.
        """

else:
    WrappedOptimizer = _DistributedOptimizer


class _ShardedOptimizer(_DistributedOptimizer):
    """The methods with ``shard_state=True``: each rank steps its part of the parameters."""

    _shards: ShardedState

    @property
    def _has_divided_state(self) -> bool:
        """Whether ``state`` has this rank's parts only."""
        return self._shards.is_divided

    @_disable_dynamo  # it waits for other ranks: not in a graph
    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's part of the parameters, and wait for the others'. Collective."""
        raw = inspect.unwrap(self._user_class.step, stop=lambda f: not hasattr(f, "hooked"))
        if not self._shards.is_active:
            return raw(self, closure)
        return self._shards.step(self, raw, closure)

    step.hooked = True  # type: ignore[attr-defined]

    def state_dict(self, root_rank: int | None = None) -> dict[str, Any]:
        """Return the whole state, in the format of an unsharded optimizer. Collective.

        Args:
            root_rank: the global rank that gets it; others get no state. None: all ranks get it.
        """
        with self._shards.whole(self):
            found = self._user_class.state_dict(self)
        return found if root_rank in (None, current.rank()) else {**found, "state": {}}

    def _replaced_state(self, root: int) -> contextlib.AbstractContextManager[None]:
        """Context in which the root has its whole state, and all ranks take it. Collective."""
        return self._shards.replaced(self, root)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self._shards.is_divided:
            raise InvalidArgumentError(
                f"rank {current.rank()}: the state of this {type(self).__name__} is divided among "
                "the ranks: copy its state_dict(), on all ranks"
            )
        return super().__reduce_ex__(protocol)

    def _step_by_class(self) -> None:
        """Make an earlier scheduler, which has wrapped ``step()``, call that of this class."""
        if "step" not in vars(self):
            return
        if not hasattr(self.step, "_wrapped_by_lr_sched"):
            raise InvalidArgumentError(
                f"the step() of this {type(self).__name__} has been replaced: wrap the optimizer "
                "first"
            )
        reference = weakref.ref(self)

        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer: Any = reference()
            optimizer._opt_called = True  # the scheduler checks it
            return type(optimizer).step(optimizer, *args, **kwargs)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.step = step  # type: ignore[method-assign]

    def _make_reducer(self, before: Reducer | None = None) -> None:
        super()._make_reducer(before)
        if self._reducer is None:
            self._shards.leave()
        else:
            self._shards.place(self, self._reducer.index, self._parameter_names)


def _leave(sync: BackwardSync, reference: weakref.ref[Reducer], _owner: object) -> None:
    reducer = reference()
    if reducer is not None:
        sync.leave(reducer)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Step pre-hook; called twice for one step if `step` calls the base class's `step`."""
    assert isinstance(optimizer, _DistributedOptimizer)
    optimizer._step_is_open = True
    if optimizer._loaded_rate.ranks is not None:
        optimizer._loaded_rate.before_step(optimizer)
    if optimizer._broken_by:  # else it would step with gradients of this rank alone
        raise InvalidArgumentError(
            f"the optimizer cannot step: adding parameters has failed ({optimizer._broken_by})"
        )
    reducer = optimizer._reducer
    if reducer is None or optimizer._skip_synchronize:
        require_whole(optimizer._settings.process_set)
        if reducer is not None:
            reducer.begin_unreduced_step()
        return None
    optimizer._require_known_parameters()
    position = next((i for i, argument in enumerate(args) if i > 0 and callable(argument)), None)
    if position is not None:
        closure = _joint(args[position], optimizer)
        return (*args[:position], closure, *args[position + 1 :]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _joint(kwargs["closure"], optimizer)}
    optimizer._backward_sync.reduce_pending(reducer)
    return None


def _look(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Step pre-hook with nan_check, after `_before_step`. A closure is checked after it has run."""
    assert isinstance(optimizer, _DistributedOptimizer)
    if not any(map(callable, (*args[1:], *kwargs.values()))):
        optimizer._require_finite()


def _joint(closure: Callable[[], Any], optimizer: _DistributedOptimizer) -> _JointClosure:
    return closure if isinstance(closure, _JointClosure) else _JointClosure(closure, optimizer)


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Step post-hook; called as often as `_before_step`."""
    assert isinstance(optimizer, _DistributedOptimizer)
    is_open, optimizer._step_is_open = optimizer._step_is_open, False
    reducer = optimizer._reducer
    if is_open and reducer:
        optimizer._backward_sync.finish_step(reducer)
        settings = optimizer._settings
        names, process_set = optimizer._parameter_names, settings.process_set
        verify_step(settings.check_every, reducer.steps, optimizer, names, process_set)
    elif is_open:
        optimizer._steps_alone += 1


def _check_passes(passes: int) -> None:
    if not isinstance(passes, Integral) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an integer, at least 1, not {passes!r}")


def _checked_with(predivide_factor: float, op: ReduceOp) -> ReduceOp:
    if predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    if not predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor must be positive, not {predivide_factor}")
    return op


def _groups_of(groups: Groups, num_groups: int, parameters: Sequence[Tensor]) -> Groups:
    """Return the checked value of `groups`, or of its deprecated alias `num_groups`.

    Raises:
        ValueError: a number is negative; an element of a group is no tensor, is in `groups` twice,
            or is none of `parameters`.
    """
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups must be a non-negative integer, not {groups}")
        return groups
    if not isinstance(groups, list | tuple) or not all(isinstance(g, list | tuple) for g in groups):
        raise ValueError("groups must be a non-negative integer or a list of lists of tensors")
    known, seen = set(map(id, parameters)), set()
    for tensor in (tensor for group in groups for tensor in group):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"groups must consist of tensors, not of {type(tensor).__name__}")
        if id(tensor) in seen:
            raise ValueError("a parameter can be in groups only once")
        if id(tensor) not in known:
            raise ValueError(
                f"a tensor of shape {list(tensor.shape)} in groups is no parameter of the optimizer"
            )
        seen.add(id(tensor))
    return groups


def _group_indices(groups: Groups, parameters: Sequence[Tensor]) -> list[Sequence[int]]:
    """Return the groups as parameter indices; a number n means n consecutive groups.

    Tensors in groups that are not in `parameters` have no gradients.
    """
    if isinstance(groups, int):
        return list(split_evenly(len(parameters), groups)) if groups else []
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    indices = [[index_of.get(id(tensor)) for tensor in group] for group in groups or ()]
    known = [[index for index in group if index is not None] for group in indices]
    return [group for group in known if group]
