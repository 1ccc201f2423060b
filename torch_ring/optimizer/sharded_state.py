"""ShardedState: each rank steps a part of the parameters, and keeps only the state of that part.

ZeRO-1: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020. On CPUs the ranks of a host have one copy of the parameters and of the optimizer's
state, in memory that they share (`Segment`): each rank writes its part there, and nothing is sent.
Each host has a whole copy, since gradients are averaged between hosts. Elsewhere (devices, ranks
that share no memory) the parts are divided among all ranks, and broadcast after each step.

Additional cost of a step: two allreduces of some bytes. The first waits until no rank reads the
parameters any more, and the second until all parts are written.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import logging
import math
import mmap
import os
import secrets
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from torch_ring._C import Engine
from torch_ring.collectives.compare import hyper_parameters_of, refuse_lazy, require_same
from torch_ring.collectives.objects import allgather_object
from torch_ring.collectives.reduce_op import Sum
from torch_ring.errors import InvalidArgumentError, MismatchError, RingError
from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet, engine_of

__all__ = ["Part", "ShardedState", "can_cut", "plan_parts", "require_dense"]

_log = logging.getLogger("torch_ring")

_ELEMENTWISE = (
    ASGD, SGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop,
)  # fmt: skip
_BY_TENSOR = (Adafactor, Muon)
_CUT = 1024  # elements: parts begin at whole vectors of a kernel, and at cache lines
_LEAST_CUT = 16  # a tensor smaller than this fraction of a rank's fair part stays in one piece
_LINE = 64  # bytes
_AT_ONCE = 1 << 20  # bytes allocated in one call: a signal makes the system undo the call


def can_cut(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may step a part of a tensor; if not, it needs whole tensors.

    Raises:
        ValueError: it cannot step tensors independently.
    """
    cls = type(optimizer)
    kinds: list[Any] = [*_ELEMENTWISE, *_BY_TENSOR]
    step = inspect.unwrap(cls.step)
    found = next((k for k in kinds if issubclass(cls, k) and inspect.unwrap(k.step) is step), None)
    if found is None:
        raise ValueError(
            f"shard_state=True: {cls.__name__} is none of the optimizers that step each tensor by "
            f"itself ({', '.join(sorted(kind.__name__ for kind in kinds))}, and subclasses with "
            "the same step()): wrap it with shard_state=False"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("shard_state=True: a step of differentiable=True cannot be divided")
    return found in _ELEMENTWISE


def require_dense(names: Mapping[Tensor, str]) -> None:
    """Raise ValueError for a parameter whose elements overlap, or do not fill their memory."""
    refuse_lazy((name, parameter) for parameter, name in names.items())
    for parameter, name in names.items():
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            raise ValueError(
                f"shard_state=True: '{name}' of shape {list(parameter.shape)} has strides "
                f"{parameter.stride()}, which do not fill its memory: make it contiguous()"
            )


class Part(NamedTuple):
    """The elements [begin, end) of a parameter, in the order of memory, that a rank steps."""

    parameter: int
    begin: int
    end: int
    owner: int  # index of the rank
    is_whole: bool


def plan_parts(sizes: Sequence[tuple[int, int]], ranks: int, *, may_cut: bool) -> list[Part]:
    """Divide consecutive parameters among ranks, with bytes as equal as possible.

    A parameter that crosses the border between two ranks' fair parts is cut there, if it may be cut
    and is not small; otherwise it belongs to the rank whose fair part has its middle.

    Args:
        sizes: for each parameter, the number of elements and the bytes of an element.
        ranks: the number of ranks.
        may_cut: whether parameters may be cut.
    """
    fair = sum(numel * itemsize for numel, itemsize in sizes) / ranks
    parts = []
    begin_bytes = 0
    for index, (numel, itemsize) in enumerate(sizes):
        nbytes = numel * itemsize
        edges = {0, numel}
        if may_cut and nbytes * _LEAST_CUT >= fair:
            inner = (k * fair - begin_bytes for k in range(1, ranks))
            edges |= {round(at / itemsize / _CUT) * _CUT for at in inner if 0 < at < nbytes}
        inside = sorted(edge for edge in edges if edge <= numel)
        for begin, end in pairwise(inside) if numel else [(0, 0)]:
            middle = begin_bytes + (begin + end) / 2 * itemsize
            owner = min(int(middle / fair), ranks - 1) if fair else 0
            parts.append(Part(index, begin, end, owner, end - begin == numel))
        begin_bytes += nbytes
    return parts


class Spec(NamedTuple):
    """Shape, strides and dtype of a tensor, as the ranks exchange them."""

    shape: list[int]
    stride: list[int]
    dtype: str

    @staticmethod
    def of(tensor: Tensor) -> Spec:
        """Return the spec of a tensor whose elements fill their memory."""
        stride = torch.empty_like(tensor, device="meta").stride()
        return Spec(list(tensor.shape), list(stride), str(tensor.dtype).removeprefix("torch."))

    def in_memory(self, memory: mmap.mmap, offset: int) -> Tensor:
        """Return a tensor in the memory, and keep the memory alive."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=dtype, device="cpu")
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
        return flat.as_strided(self.shape, self.stride)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


class Segment:
    """Shared memory of a host, which one rank makes and the others open: a memfd without a name.

    The system frees it with the last tensor of the last process, even if processes are killed. It
    begins with a unique token.

    Args:
        fd: the rank's descriptor, to be closed by `close`. The mapping has its own.
        token: the memory's token.
    """

    def __init__(self, fd: int, token: bytes) -> None:
        self._fd = fd
        self.token = token
        self.memory = mmap.mmap(fd, 0)

    @staticmethod
    def make(nbytes: int) -> Segment:
        """Make memory. Raises OSError if the host has no more."""
        fd = os.memfd_create("torch_ring.sharded", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            for begin in range(0, nbytes, _AT_ONCE):
                os.posix_fallocate(fd, begin, min(_AT_ONCE, nbytes - begin))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            token = secrets.token_bytes(16)
            os.pwrite(fd, token, 0)
            return Segment(fd, token)
        except BaseException:
            os.close(fd)
            raise

    def offer(self) -> tuple[int, int, str]:
        """Return the arguments of `open` for another process of this user."""
        return os.getpid(), self._fd, self.token.hex()

    @staticmethod
    def open(offer: Sequence[Any]) -> Segment:
        """Open the memory that another process offers. Raises OSError."""
        pid, number, token = offer
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pread(fd, 16, 0) != bytes.fromhex(token):
                raise OSError(f"/proc/{pid}/fd/{number} is something else: other containers?")
            return Segment(fd, bytes.fromhex(token))
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the descriptor; tensors keep the mapping."""
        os.close(self._fd)


_NONE = torch.zeros(0, dtype=torch.int64, device="cpu")


class _Told(NamedTuple):
    """A rank's description of its parameters and state, for the other ranks."""

    steps: int
    on_cpu: bool
    has_lost: bool  # the parts of ranks of an earlier world are lost
    is_new: bool  # the whole state has been replaced
    has_parts: bool  # the rank has parts of the state
    things: list[list[Any]]  # number of the parameter, key of its state or "", spec or value
    homes: list[tuple[str, int] | None]  # token and offset, for tensors in shared memory

    def parameters(self) -> list[list[Any]]:
        """Return the specs of the parameters."""
        return [thing for thing in self.things if thing[1] == ""]

    def home_of(self) -> dict[tuple[int, str], tuple[str, int] | None]:
        """Return the homes by number and key."""
        pairs = zip(self.things, self.homes, strict=True)
        return {(index, key): home for (index, key, *_), home in pairs}


class ShardedState:
    """The division of an optimizer's parameters among the ranks, and the memory where they lie.

    Between steps, if the memory is shared, ``optimizer.state`` is whole on each rank, in the format
    of an unsharded optimizer; otherwise it is empty, and each rank has the state of its part here.
    The program may replace it, or the memory of a parameter (load_state_dict(), model.to()): the
    first allreduce of the next step tells all ranks, which divide everything anew.

    Thread: the one that steps. Errors: RingError of the collectives.

    Args:
        process_set: the ranks.
        may_cut: whether parameters may be cut.

    Attributes:
        is_shared: whether the ranks of a host have the parameters in shared memory.
        is_active: whether there is more than one rank.
        has_moved: whether a rank of this host had begun to write its part of a failed step. Valid
            after `place` or `leave`: then no rank is in that step any more.
    """

    def __init__(self, process_set: ProcessSet, *, may_cut: bool) -> None:
        self._process_set = process_set
        self._may_cut = may_cut
        self._steps = 0  # number of this rank's steps
        self.is_shared = False
        self.is_active = False
        self.has_moved = False
        self._engine: Engine = None  # type: ignore[assignment]  # place() has it
        self._ranks: list[int] = []
        self._owners: Sequence[int] = []  # the ranks that divide the parameters
        self._parameters: list[Tensor] = []
        self._pointers: list[int] = []  # addresses of their memory
        self._whole: dict[Tensor, dict[str, Any]] = {}  # the state in shared memory
        self._homes: dict[int, tuple[str, int]] = {}  # token and offset of tensors, by address
        self._kept: list[Tensor] = []  # those tensors, so that no other gets their addresses
        self._parts: list[tuple[Part, Tensor]] = []  # all; or this rank's, if memory is shared
        self._mine: list[tuple[Part, Tensor]] = []
        self._state: dict[Tensor, dict[str, Any]] = defaultdict(dict)  # state of this rank's parts
        self._hosts = 0
        self._versions: list[int] = []  # versions of the parameters after the last step
        self._has_warned = False
        self._written = _NONE  # for each rank of the host: its steps times two, odd while it writes
        self._steps_here = 0  # steps since `_written` was made
        self._is_replaced = False  # whether the whole state is known to be replaced
        self._known: dict[Tensor, tuple[int, ...]] = {}  # ids of the state's tensors, by part

    # --- where parameters and state lie

    def place(self, optimizer: Optimizer, index: int) -> None:
        """Divide parameters and state among the ranks. Collective.

        A host takes the parameters and state of one of its ranks: preferably one that has them in
        shared memory already (others are new), with the most steps. If all ranks have them there,
        nothing is copied.

        Args:
            optimizer: the optimizer that owns parameters and state.
            index: the index of the optimizer on the process set.

        Raises:
            MismatchError: on all ranks: their parameters differ.
        """
        self._name, self._count = f"sharded.{index}", 0
        self._look_for_writes()
        before, self._engine = self._engine, engine_of(self._process_set)
        has_parts = self.is_divided and bool(self._state)
        has_lost = has_parts and before is not self._engine
        self._ranks = list(self._process_set.ranks or ())
        self._rank = current.rank()
        host_of = current.world().host_of
        host = [rank for rank in self._ranks if host_of[rank] == host_of[self._rank]]
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        alone = [parameter for parameter in self._parameters if not _has_views(parameter)]
        things = self._things(optimizer)
        described = [[*key, *spec] for key, spec, _ in things]
        homes = [None if v is None else self._homes.get(v.data_ptr()) for *_, v in things]
        on_cpu = all(parameter.device.type == "cpu" for parameter in self._parameters)
        is_new = self._is_dirty(optimizer)
        own = _Told(self._steps, on_cpu, has_lost, is_new, has_parts, described, homes)
        gathered = self._exchange(tuple(own))
        every = {r: _Told(*told) for r, told in zip(self._ranks, gathered, strict=True)}
        if any(told.has_lost for told in every.values()):
            self._refuse(
                "ranks have gone with their parts of the state of an optimizer (shard_state=True "
                "without shared memory): begin again from a checkpoint"
            )
        first = every[self._ranks[0]].parameters()
        other = next((r for r, told in every.items() if told.parameters() != first), None)
        if other is not None:
            raise MismatchError(
                f"rank {self._rank}: ranks {self._ranks[0]} and {other} have parameters of other "
                "shapes, strides or dtypes now: convert the model alike on all ranks"
            )
        if any(told.has_parts for told in every.values()):
            self._collect(optimizer, [told.is_new for told in every.values()])
            things = self._things(optimizer)
        could_share = len({host_of[rank] for rank in self._ranks}) < len(self._ranks)
        self.is_shared = could_share and all(told.on_cpu for told in every.values())
        if self.is_shared:
            self._warn_of_views(alone)
            self._share(optimizer, {rank: every[rank] for rank in host}, things)
        self._divide(optimizer, host if self.is_shared else self._ranks)
        self.is_active = True
        self._hosts = len({host_of[rank] for rank in self._ranks})
        self._versions = [parameter._version for parameter in self._parameters]
        self._sum([0], "placed")  # no rank steps before all have their parts

    @property
    def is_divided(self) -> bool:
        """Whether each rank has only the state of its part."""
        return self.is_active and not self.is_shared

    def _warn_of_views(self, alone: Sequence[Tensor]) -> None:
        """Warn of other tensors in the old memory of parameters that are about to be moved."""
        kept = set(map(id, alone))
        tied = [
            index
            for index, parameter in enumerate(self._parameters)
            if id(parameter) not in kept and parameter.data_ptr() not in self._homes
        ]
        if tied and self._rank == self._ranks[0]:
            _log.warning(
                "shard_state=True moves the parameters into shared memory, and other tensors lie "
                "where parameters %s of the optimizer do (views, or an earlier state_dict()): they "
                "stay there, with the present values",
                tied,
            )

    def note_replaced(self) -> None:
        """Note that ``optimizer.state`` has been replaced, or is empty."""
        self._is_replaced = True

    def leave(self, optimizer: Optimizer) -> None:
        """End the division: this rank is alone now, with the whole state."""
        if self.is_divided and self._state:
            raise InvalidArgumentError(
                f"rank {self._rank}: the other ranks have gone with their parts of the state of a "
                f"{type(optimizer).__name__} (shard_state=True without shared memory): begin again "
                "from a checkpoint"
            )
        self._look_for_writes()
        self.is_active = False

    def _look_for_writes(self) -> None:
        """Set `has_moved` if a rank of this host has not finished the same step as this one.

        The surviving ranks may have ended at different points of a step, and dead ones anywhere.
        """
        if any(written != 2 * self._steps_here for written in self._written.tolist()):
            self.has_moved = True
        self._written, self._steps_here = _NONE, 0

    def _exchange(self, value: Any) -> list[Any]:
        return allgather_object(value, process_set=self._process_set)

    def _things(self, optimizer: Optimizer) -> list[tuple[tuple[int, str], Any, Tensor | None]]:
        """Return parameters and state as (key, spec or other value, tensor)."""
        things: list[tuple[tuple[int, str], Any, Tensor | None]] = []
        for index, parameter in enumerate(self._parameters):
            things.append(((index, ""), Spec.of(parameter), parameter.detach()))
            for key, value in optimizer.state.get(parameter, {}).items():
                is_tensor = isinstance(value, Tensor)
                spec = self._spec_of_state(parameter, value) if is_tensor else (value,)
                things.append(((index, key), spec, value if is_tensor else None))
        return things

    @staticmethod
    def _spec_of_state(parameter: Tensor, value: Tensor) -> Spec:
        """Return the spec of a state's tensor, with the memory layout of its parameter."""
        like = parameter.detach() if value.shape == parameter.shape else value
        return Spec.of(like)._replace(dtype=Spec.of(value).dtype)

    def _is_dirty(self, optimizer: Optimizer) -> bool:
        """Return whether the program has replaced the state of a parameter."""
        state = optimizer.state
        if self._is_replaced or not self.is_shared:
            return self._is_replaced or any(state.values())
        return any(v is not self._whole.get(p) for p, v in state.items() if v) or any(
            parameter not in state for parameter in self._whole
        )

    def _share(
        self,
        optimizer: Optimizer,
        host: Mapping[int, _Told],
        things: list[tuple[tuple[int, str], Any, Tensor | None]],
    ) -> None:
        """Move parameters and state into shared memory, unless all ranks have them there."""
        holder = max(host, key=lambda rank: (any(host[rank].homes), host[rank].steps, -rank))
        described, homes = host[holder].things, host[holder].homes
        own = {key: tensor for key, _, tensor in things}
        at = [told.home_of() for told in host.values()]
        new: list[tuple[tuple[int, str], Spec]] = []
        state: dict[int, dict[str, Any]] = {}
        shared: dict[tuple[int, str], Tensor] = {}
        for line, home in zip(described, homes, strict=True):
            key: tuple[int, str] = (line[0], line[1])
            if len(line) == 3:
                state.setdefault(key[0], {})[key[1]] = line[2]
                continue
            if key[1]:
                state.setdefault(key[0], {})[key[1]] = None  # keeps the order
            tensor = own.get(key)
            if tensor is not None and home and all(each.get(key) == home for each in at):
                shared[key] = tensor
            else:
                new.append((key, Spec(*line[2:])))
        is_holder = self._rank == holder
        values: list[Tensor | None] | None = [own[key] for key, _ in new] if is_holder else None
        counts = Spec([len(host)], [1], "int64")  # new memory is zero
        values = [*values, None] if values is not None else None
        made = self._segment([*(spec for _, spec in new), counts], holder, values)
        if made is None:
            self.is_shared = False
            return
        self._written, _ = made.pop()
        kept = {tensor.data_ptr() for tensor in shared.values()}
        self._homes = {at: home for at, home in self._homes.items() if at in kept}
        self._homes.update((tensor.data_ptr(), home) for tensor, home in made)
        self._kept = [*shared.values(), *(tensor for tensor, _ in made)]
        for (key, _), (tensor, _) in zip(new, made, strict=True):
            shared[key] = tensor
            if key[1] == "":
                self._parameters[key[0]].data = tensor
        self._whole = {}
        for index, values_of in state.items():
            whole = {k: shared.get((index, k), v) for k, v in values_of.items()}
            self._whole[self._parameters[index]] = whole
        self._show(optimizer)

    def _show(self, optimizer: Optimizer) -> None:
        """Set ``optimizer.state`` to the state in shared memory."""
        for parameter in self._parameters:  # in the order of an unsharded optimizer
            optimizer.state.pop(parameter, None)
            if parameter in self._whole:
                optimizer.state[parameter] = self._whole[parameter]

    def _segment(
        self, layout: Sequence[Spec], holder: int, values: Sequence[Tensor | None] | None
    ) -> list[tuple[Tensor, tuple[str, int]]] | None:
        """Return tensors in memory that the rank `holder` makes for its host. Collective.

        Args:
            layout: the specs of the tensors, the same on all ranks of the host.
            holder: a rank of this host.
            values: on the holder, the values of the tensors; None: undefined values.

        Returns:
            Each tensor with its token and offset; None on all ranks of the set if one of them
            cannot share memory.
        """
        offsets = []
        end = _LINE
        for spec in layout:
            offsets.append(end)
            end += -(-spec.nbytes // _LINE) * _LINE
        segment: Segment | None = None
        made: list[tuple[Tensor, tuple[str, int]]] = []
        problem = ""

        def fill(found: Segment) -> None:
            token = found.token.hex()
            for spec, at in zip(layout, offsets, strict=True):
                made.append((spec.in_memory(found.memory, at), (token, at)))

        try:
            try:
                if self._rank == holder and layout:
                    segment = Segment.make(end)
                    fill(segment)
                    for (tensor, _), value in zip(made, values or (), strict=False):
                        if value is not None:
                            tensor.copy_(value)
            except (OSError, ValueError) as error:
                problem = f"rank {self._rank} cannot make {end} bytes: {error}"
            offers = self._exchange(None if problem or segment is None else segment.offer())
            offer = offers[self._ranks.index(holder)]
            try:
                if self._rank != holder and layout and offer is not None:
                    segment = Segment.open(offer)
                    fill(segment)
            except (OSError, ValueError) as error:
                problem = f"rank {self._rank} cannot open the memory of rank {holder}: {error}"
            problems = [each for each in self._exchange(problem) if each]
        finally:
            if segment is not None:
                segment.close()
        if not problems:
            return made
        if self._rank == self._ranks[0]:
            _log.warning("shard_state=True without shared memory: %s", problems[0])
        return None

    def _divide(self, optimizer: Optimizer, group: Sequence[int]) -> None:
        """Assign parts to the ranks of the group, and take the state of this rank's parts."""
        sizes = [(p.numel(), p.element_size()) for p in self._parameters]
        plan = plan_parts(sizes, len(group), may_cut=self._may_cut)
        self._owners = group
        own = group.index(self._rank)
        self._parts = [
            (part, _cut(self._parameters[part.parameter].detach(), part))
            for part in plan
            if part.owner == own or not self.is_shared
        ]
        self._mine = [(part, tensor) for part, tensor in self._parts if part.owner == own]
        self._pointers = [parameter.data_ptr() for parameter in self._parameters]
        self._state, self._known, self._is_replaced = defaultdict(dict), {}, False
        for part, tensor in self._mine:
            parameter = self._parameters[part.parameter]
            whole = optimizer.state.get(parameter, {})
            if whole:
                self._state[tensor] = {
                    key: self._own(value, part, parameter) if isinstance(value, Tensor) else value
                    for key, value in whole.items()
                }
            self._known[tensor] = _ids(self._state.get(tensor))
        if not self.is_shared:
            self._whole, self._homes, self._kept = {}, {}, []
            for parameter in self._parameters:
                optimizer.state.pop(parameter, None)

    def _own(self, value: Tensor, part: Part, parameter: Tensor) -> Tensor:
        """Return a part's share of a state's tensor, given that of the whole parameter."""
        if not part.is_whole and value.shape == parameter.shape:
            own = _cut(value.detach(), part, parameter)
            return own if self.is_shared else own.clone()
        # The first part uses the whole parameter's own tensor, such as its number of steps.
        return value if part.begin == 0 else value.clone()

    # --- a step

    def step(
        self, optimizer: Optimizer, raw: Callable[..., Any], closure: Callable[[], Any] | None
    ) -> Any:
        """Step this rank's part, and wait for the others'. Collective.

        Args:
            optimizer: the optimizer, with reduced gradients.
            raw: the ``step`` of its class, without hooks.
            closure: computes and reduces gradients, and returns the loss; None: the gradients are
                there already.

        Raises:
            MismatchError: on all ranks: their gradients or hyper-parameters differ.
            InvalidArgumentError: on all ranks: one of them cannot step.
            RingError: on all other ranks: a rank has failed in the step, which is half done.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._enter(optimizer)
        self.has_moved = False
        stepped: Any = object.__new__(type(optimizer))
        groups = self._groups(optimizer)
        vars(stepped).update(vars(optimizer), param_groups=groups, state=self._state)
        failure: BaseException | None = None
        self._note_write(2 * self._steps_here + 1)
        try:
            raw(stepped)
            self._note_write(2 * self._steps_here + 2)
        except BaseException as error:  # Ctrl-C, too: the other ranks wait
            failure = error
        for _, tensor in self._mine:
            tensor.grad = None
        self._leave(optimizer, failure)
        self._steps += 1
        self._steps_here += 1
        torch.autograd.graph.increment_version(
            [parameter for parameter in self._parameters if parameter.grad is not None]
        )
        self._versions = [parameter._version for parameter in self._parameters]
        return loss

    def _groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return the groups with this rank's parts, and their gradients, as parameters."""
        groups = [{**group, "params": []} for group in optimizer.param_groups]
        group_of = [i for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        for part, tensor in self._mine:
            parameter = self._parameters[part.parameter]
            gradient = parameter.grad
            if gradient is not None:
                tensor.grad = _cut(gradient.detach(), part, parameter)
            groups[group_of[part.parameter]]["params"].append(tensor)
        return groups

    def _note_write(self, number: int) -> None:
        if self.is_shared:
            self._written[self._owners.index(self._rank)] = number

    def _sum(self, numbers: Sequence[int], what: str) -> list[int]:
        self._count += 1
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        name = f"{self._name}.{self._count}.{what}"
        total: list[int] = self._engine.allreduce_and_wait(
            tensor, None, name, Sum, 1.0, 1.0
        ).tolist()
        return total

    def _enter(self, optimizer: Optimizer) -> None:
        """Wait until all ranks are about to step, so that none reads the parameters any more."""
        problem = self._problem(optimizer)
        lines = self._lines(optimizer)
        digest = zlib.crc32(repr(lines).encode()) >> 8
        is_new = self._is_dirty(optimizer) or any(
            parameter.data_ptr() != pointer
            for parameter, pointer in zip(self._parameters, self._pointers, strict=True)
        )
        versions = [parameter._version for parameter in self._parameters]
        has_written = self.is_shared and self._steps_here > 0 and versions != self._versions
        who = self._rank if problem else 0
        here, problems, who, new, writers, digests, squares = self._sum(
            [1, bool(problem), who, is_new, has_written, digest, digest * digest], "enter"
        )
        size = len(self._ranks)
        if here != size:
            self._refuse(
                f"{size - here} ranks have called join(), and step no more: with shard_state=True "
                "their parts of the parameters would stay. Give all ranks as many batches"
            )
        if problems:
            others = f"rank {who} cannot step" if problems == 1 else f"{problems} ranks cannot step"
            self._refuse(problem or f"{others}: see the error there")
        if digests * digests != size * squares:  # equality holds only if all digests are equal
            require_same(lines, "the ranks step differently", self._process_set)
        if writers > self._hosts and not self._has_warned:
            self._has_warned = True
            self._warn_of_writers(writers, versions)
        if new:
            if new != size:
                self._refuse(
                    f"{new} of {size} ranks have got another optimizer state, or other memory of "
                    "parameters, since the last step: call load_state_dict(), model.to() and the "
                    "like on all ranks, or broadcast_optimizer_state() after it"
                )
            self.place(optimizer, int(self._name.rpartition(".")[2]))

    def _warn_of_writers(self, writers: int, versions: Sequence[int]) -> None:
        """Warn that several ranks of a host have changed parameters, which they share."""
        if self._rank == self._ranks[0]:
            pairs = zip(versions, self._versions, strict=True)
            written = [index for index, (now, before) in enumerate(pairs) if now != before]
            _log.warning(
                "%d ranks have written to parameters between two steps (here to %s of the "
                "optimizer). With shard_state=True the ranks of a host share their memory: let one "
                "rank of the host write, between two barriers, unless repeated writes do no harm "
                "(docs/sharding.md)",
                writers,
                written,
            )

    def _refuse(self, why: str) -> None:
        raise InvalidArgumentError(f"rank {self._rank}: {why}")

    def _problem(self, optimizer: Optimizer) -> str:
        """Return the reason why this rank cannot step; "" if it can."""
        present = [p for group in optimizer.param_groups for p in group["params"]]
        if list(map(id, present)) != list(map(id, self._parameters)):
            return (
                "parameters have been moved in param_groups, or taken out, by hand, and with "
                "shard_state=True other ranks would step them as before: wrap a new optimizer"
            )
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                return (
                    f"the gradient of parameter {index} of the optimizer is sparse, which "
                    "shard_state=True does not take: use sparse_as_dense=True and "
                    "Embedding(sparse=False)"
                )
            if gradient.dtype != parameter.dtype:
                return f"the gradient of parameter {index} has another dtype: {gradient.dtype}"
        return ""

    def _lines(self, optimizer: Optimizer) -> list[str]:
        """Return the settings that must be the same on all ranks, since each part has one owner."""
        without = [i for i, parameter in enumerate(self._parameters) if parameter.grad is None]
        settings = [f"{each.name} is {each.describe()}" for each in hyper_parameters_of(optimizer)]
        return [f"parameters {without} of the optimizer have no gradient", *settings]

    def _leave(self, optimizer: Optimizer, failure: BaseException | None) -> None:
        """Wait until all parts are stepped."""
        is_new = self.is_shared and any(
            _ids(self._state.get(tensor)) != self._known[tensor] for _, tensor in self._mine
        )
        try:
            failed, new = self._sum([failure is not None, is_new and failure is None], "leave")
        except RingError as error:
            raise failure or error from None
        if failure is not None:
            raise failure
        if failed:
            raise RingError(
                f"rank {self._rank}: {failed} other ranks have failed to step their parts of the "
                "parameters: some are stepped, others are not. Begin again from a checkpoint"
            )
        if new:
            self._adopt(optimizer)
        if not self.is_shared:
            works = [
                self._engine.broadcast(
                    tensor.detach(),
                    tensor.detach(),
                    self._ranks.index(self._owners[part.owner]),
                    f"{self._name}.{self._count}.{position}",
                )
                for position, (part, tensor) in enumerate(self._parts)
            ]
            for work in works:
                work.wait()

    def _adopt(self, optimizer: Optimizer) -> None:
        """Move the state that a step has made into shared memory. Collective."""
        changed = [
            (part, tensor)
            for part, tensor in self._mine
            if _ids(self._state.get(tensor)) != self._known[tensor]
        ]
        told: list[tuple[int, list[Any]]] = []
        for part, tensor in changed:
            if part.begin == 0:
                parameter = self._parameters[part.parameter]
                items: list[Any] = []
                for key, value in self._state[tensor].items():
                    if not isinstance(value, Tensor):
                        items.append([key, value])
                        continue
                    spec = Spec.of(value)
                    if not part.is_whole and value.shape == tensor.shape:
                        spec = Spec.of(parameter)._replace(dtype=spec.dtype)
                    elif value.shape == parameter.shape:
                        spec = self._spec_of_state(parameter, value)
                    items.append([key, *spec])
                told.append((part.parameter, items))
        every = dict(zip(self._ranks, self._exchange(told), strict=True))
        new: list[tuple[int, str, Spec]] = []
        for index, items in sorted(each for rank in self._owners for each in every[rank]):
            whole = self._whole.setdefault(self._parameters[index], {})
            for key, *spec in items:
                if len(spec) == 1:
                    whole[key] = spec[0]
                    continue
                before = whole.get(key)
                if not isinstance(before, Tensor) or Spec.of(before) != Spec(*spec):
                    whole[key] = None  # keeps the order
                    new.append((index, key, Spec(*spec)))
        made = self._segment([spec for *_, spec in new], self._owners[0], None)
        if made is None:
            raise RingError(f"rank {self._rank}: no shared memory for the state of the optimizer")
        for (index, key, _), (tensor, home) in zip(new, made, strict=True):
            self._whole[self._parameters[index]][key] = tensor
            self._homes[tensor.data_ptr()] = home
            self._kept.append(tensor)
        for part, tensor in changed:
            parameter = self._parameters[part.parameter]
            state = self._state[tensor]
            for key, value in state.items():
                if isinstance(value, Tensor):
                    own = self._own(self._whole[parameter][key], part, parameter)
                    own.copy_(value)
                    state[key] = own
            self._known[tensor] = _ids(state)
        self._show(optimizer)
        self._sum([0], "adopted")

    # --- the whole state

    @contextlib.contextmanager
    def whole(self, optimizer: Optimizer, *, is_replaced: bool = False) -> Iterator[None]:
        """Context in which ``optimizer.state`` is whole. Collective, if memory is not shared.

        Args:
            optimizer: as for `place`.
            is_replaced: whether all ranks replace the state there; the new one is used afterwards.
        """
        if not self.is_active or (self.is_shared and not is_replaced):
            yield
            return
        collected = False
        if not self.is_shared:
            dirty = self._exchange(self._is_dirty(optimizer))
            collected = self._collect(optimizer, dirty, to_cpu=not is_replaced)
        try:
            yield
        finally:
            if is_replaced:
                self.note_replaced()
            elif collected:
                for parameter in self._parameters:
                    optimizer.state.pop(parameter, None)

    def _collect(
        self, optimizer: Optimizer, dirty: Sequence[bool], *, to_cpu: bool = False
    ) -> bool:
        """Give ``optimizer.state`` the parts of all ranks, unless it has been replaced. Collective.

        Args:
            optimizer: as for `place`.
            dirty: for each rank, whether its state has been replaced.
            to_cpu: whether to put the state on the CPU rather than on the parts' device.

        Returns:
            Whether ``optimizer.state`` has the parts now.
        """
        if any(dirty):
            return False
        own: list[Any] = []
        sent: list[Tensor] = []
        for part, tensor in self._mine:
            for key, value in self._state.get(tensor, {}).items():
                line: list[Any] = [part.parameter, part.begin, part.end, part.is_whole, key]
                if isinstance(value, Tensor):
                    sent.append(value)
                    is_cut = not part.is_whole and value.shape == tensor.shape
                    line += [is_cut, value.device.type == "cpu", *Spec.of(value)]
                else:
                    line.append(value)
                own.append(line)
        for owner, lines in enumerate(self._exchange(own)):
            mine = iter(sent)
            for number, (index, begin, end, is_whole, key, *rest) in enumerate(lines):
                parameter = self._parameters[index]
                state = optimizer.state[parameter]
                if len(rest) == 1:
                    state[key] = rest[0]
                    continue
                is_cut, on_cpu, *described = rest
                spec = Spec(*described)
                device = torch.device("cpu") if on_cpu else parameter.device
                dtype = getattr(torch, spec.dtype)
                if self._ranks[owner] == self._rank:
                    value = next(mine)
                else:
                    value = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=device)
                flat = _flat(value)
                name = f"{self._name}.{self._count}.state.{owner}.{number}"
                self._engine.broadcast(flat, flat, owner, name, blocking=True).wait()
                if to_cpu:
                    value = value.cpu()
                if is_cut:
                    if key not in state:
                        like = parameter.detach()
                        state[key] = torch.empty_like(like, dtype=dtype, device=value.device)
                    part = Part(index, begin, end, owner, is_whole)
                    _cut(state[key], part).copy_(value)
                elif begin == 0:
                    state[key] = value.clone()
        self._count += 1
        return True


def _has_views(parameter: Tensor) -> bool:
    """Return whether other tensors share the memory of a parameter, as far as torch tells."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    # Two uses are the parameter and the Python object of `untyped_storage()`.
    return count is not None and count(parameter.untyped_storage()._cdata) > 2


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in the order of memory, without gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _cut(tensor: Tensor, part: Part, like: Tensor | None = None) -> Tensor:
    """Return a part of a tensor in the memory layout of `like`: a view if possible, or a copy."""
    if part.is_whole:
        return tensor
    if like is not None and tensor.stride() != like.stride():
        tensor = torch.empty_like(like.detach(), dtype=tensor.dtype).copy_(tensor)
    return _flat(tensor)[part.begin : part.end]


def _ids(state: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Return the ids of a state's tensors, which show whether one was replaced."""
    return tuple(id(value) for value in (state or {}).values() if isinstance(value, Tensor))
