# SPDX-License-Identifier: Apache-2.0
"""ShardedState: each rank steps a part of the parameters, and keeps only the state of that part.

ZeRO-1: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020. On CPUs the ranks of a host have one copy of the parameters and of the optimizer's
state, in memory that they share (`Segment`): each rank writes its part there, and nothing is sent.
Each host has a whole copy, since gradients are averaged between hosts. Elsewhere (devices, ranks
that share no memory) the parts are divided among all ranks, and broadcast after each step.

Writes of the program between steps count as without shard_state. In shared memory the program has a
private mapping: a page that it writes becomes this rank's own copy. At the next step the ranks of a
host compare their writes, each owner takes those in its part, and all give up their copies.

Additional cost of a step: two allreduces of some bytes, and in shared memory a look at the page
table (50 ns a page of 4 KiB). The first allreduce compares the writes, and waits until no rank
reads the parameters any more; the second waits until all parts are written.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_ring._C import Engine
from torch_ring.collectives.compare import (
    digests_of,
    hyper_parameters_of,
    require_same,
    require_same_lines,
)
from torch_ring.collectives.objects import allgather_object
from torch_ring.errors import InvalidArgumentError, MismatchError, RingError
from torch_ring.optimizer.host_memory import Home, Segment, Spec, share_memory
from torch_ring.optimizer.shard_parts import Part, cut, flat, plan_parts, require_dense
from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet, engine_of

__all__ = ["ShardedState", "StatePart"]

_log = logging.getLogger("torch_ring")

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the bytes of an element


class StatePart(Tensor):
    """A part of a tensor of the optimizer's state, as the program sees it where state is divided.

    Its elements are in the order of memory, and none if all are other ranks'.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, *_: Any) -> NoReturn:
        """Raise InvalidArgumentError: rows of the whole tensor would be meant."""
        raise InvalidArgumentError(
            f"rank {current.rank()}: shard_state=True divides the optimizer's state here: this is "
            "the rank's part of a tensor, which has no rows. Change state_dict(), and give it to "
            "load_state_dict(), on all ranks"
        )

    def __setitem__(self, *_: Any) -> NoReturn:
        """Raise InvalidArgumentError."""
        self.__getitem__()


class _Write(NamedTuple):
    """A value that the program has put into a parameter or into ``optimizer.state``."""

    number: int  # of the parameter
    key: str  # of its state; "": the parameter itself
    value: Any


_GONE = object()  # the value of a key that the program has taken out of the state
_NONE = torch.zeros(0, dtype=torch.int64, device="cpu")
_LOST = (
    "ranks have gone with their parts of the state of an optimizer (shard_state=True without "
    "shared memory): begin again from a checkpoint"
)


class _Told(NamedTuple):
    """A rank's description of its parameters and state, for the other ranks."""

    steps: int
    on_cpu: bool
    has_lost: bool  # the parts of ranks of an earlier world are lost
    # Number of the parameter, key of its state or "", place in shared memory, spec or value.
    things: list[list[Any]]

    def parameters(self) -> list[list[Any]]:
        """Return the specs of the parameters."""
        return [spec for _, key, _, *spec in self.things if not key]


class ShardedState:
    """The division of an optimizer's parameters among the ranks, and the memory where they lie.

    Between steps, if the memory is shared, ``optimizer.state`` is whole on each rank, in the format
    of an unsharded optimizer; otherwise it has the same keys on all ranks, and each rank's part of
    the tensors. Both are divided by one function (`_divide_state`): what a rank has of its parts
    follows from ``optimizer.state``, whether its tensors are whole, shared or parts.

    The program may change the state and the parameters: the next step reads the changes
    (`_writes`), its first allreduce compares them, and all ranks take them over (`_take`). A tensor
    that the program puts in place of one in shared memory is copied there, and counts as written in
    place. Other keys, shapes, strides, dtypes or devices are placed, or divided, anew.

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
        self._names: Mapping[Tensor, str] = {}
        self._memories: list[Tensor] = []  # of the parameters; in shared memory the program's
        self._homes: dict[tuple[int, str], Home] = {}  # by parameter and key, as in `_Write`
        self._copies: list[tuple[Segment, Tensor]] = []  # pages written before this step
        self._parts: dict[int, list[tuple[Part, Tensor]]] = {}  # by parameter; or this rank's alone
        self._mine: dict[int, tuple[Part, Tensor]] = {}  # this rank's, by parameter
        self._state: dict[Tensor, dict[str, Any]] = {}  # state of this rank's parts
        self._known: dict[Tensor, dict[str, Any]] = {}  # the same before the present step
        self._shown: dict[Tensor, dict[str, Any]] = {}  # ``optimizer.state`` after the last step
        self._versions: dict[Tensor, dict[str, int]] = {}  # of its tensors, where state is divided
        self._groups_of_ranks: list[list[int]] = []  # each writes alike: hosts; or all ranks
        self._has_warned = False
        self._written = _NONE  # for each rank of the host: its steps times two, odd while it writes
        self._steps_here = 0  # steps since `_written` was made

    # --- where parameters and state lie

    def place(self, optimizer: Optimizer, index: int, names: Mapping[Tensor, str]) -> None:
        """Divide parameters and state among the ranks. Collective.

        A host takes the parameters and state of one of its ranks: preferably one that has them in
        shared memory already (others are new), with the most steps. If all ranks have them there,
        nothing is copied.

        Args:
            optimizer: the optimizer that owns parameters and state.
            index: the index of the optimizer on the process set.
            names: the names of the parameters.

        Raises:
            MismatchError: on all ranks: their parameters differ, or what the program has written.
        """
        before, self._engine = self._engine, engine_of(self._process_set)
        has_others = self.is_active and before is self._engine
        has_lost = self.is_divided and bool(self._state) and not has_others
        self._index, self._name, self._count = index, f"sharded.{index}", 0
        if has_others:
            self._agreed_writes(optimizer)
            if self.is_divided:
                self._divide_state(optimizer)
                self._collect(optimizer)  # now whole, the same on all ranks
        self._names = names
        self._look_for_writes()
        self._ranks = list(self._process_set.ranks or ())
        self._rank = current.rank()
        host_of = current.world().host_of
        hosts: dict[Any, list[int]] = {}
        for rank in self._ranks:
            hosts.setdefault(host_of[rank], []).append(rank)
        host = hosts[host_of[self._rank]]
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        tied = [
            number
            for number, parameter in enumerate(self._parameters)
            if _has_views(parameter) and self._home_of(number, "", parameter) is None
        ]
        things = self._things(optimizer)
        on_cpu = all(parameter.device.type == "cpu" for parameter in self._parameters)
        own = _Told(self._steps, on_cpu, has_lost, [line for line, _ in things])
        gathered = self._exchange(tuple(own))
        every = {r: _Told(*told) for r, told in zip(self._ranks, gathered, strict=True)}
        if any(told.has_lost for told in every.values()):
            self._refuse(_LOST)
        first = every[self._ranks[0]].parameters()
        other = next((r for r, told in every.items() if told.parameters() != first), None)
        if other is not None:
            raise MismatchError(
                f"rank {self._rank}: ranks {self._ranks[0]} and {other} have parameters of other "
                "shapes, strides or dtypes now: convert the model alike on all ranks"
            )
        could_share = len(hosts) < len(self._ranks)
        self.is_shared = could_share and all(told.on_cpu for told in every.values())
        if self.is_shared:
            self._warn_of_views(tied)
            self._share(optimizer, {rank: every[rank] for rank in host}, things)
        self._groups_of_ranks = list(hosts.values()) if self.is_shared else [self._ranks]
        self._divide(optimizer, host if self.is_shared else self._ranks)
        self.is_active = True
        self._sum([0], "placed")  # no rank steps before all have their parts

    @property
    def is_divided(self) -> bool:
        """Whether each rank has only the state of its part."""
        return self.is_active and not self.is_shared

    def _warn_of_views(self, tied: Sequence[int]) -> None:
        """Warn of other tensors in the old memory of parameters that are about to be moved."""
        if tied and self._rank == self._ranks[0]:
            _log.warning(
                "shard_state=True moves the parameters into shared memory, and other tensors lie "
                "where parameters %s of the optimizer do (views, or an earlier state_dict()): they "
                "stay there, with the present values",
                tied,
            )

    def leave(self) -> None:
        """End the division: this rank is alone now, with the whole state."""
        if self.is_divided and self._state:
            self._refuse(_LOST)
        self._look_for_writes()
        self.is_active = False
        self._engine = None  # type: ignore[assignment]  # its world has ended

    def _look_for_writes(self) -> None:
        """Set `has_moved` if a rank of this host has not finished the same step as this one.

        The surviving ranks may have ended at different points of a step, and dead ones anywhere.
        """
        if any(written != 2 * self._steps_here for written in self._written.tolist()):
            self.has_moved = True
        self._written, self._steps_here = _NONE, 0

    def _exchange(self, value: Any) -> list[Any]:
        return allgather_object(value, process_set=self._process_set)

    def _home_of(self, index: int, key: str, tensor: Tensor) -> Home | None:
        """Return the home of a parameter or of a tensor of its state, if it lies there."""
        home = self._homes.get((index, key))
        return home if home and home.program.data_ptr() == tensor.data_ptr() else None

    def _things(self, optimizer: Optimizer) -> list[tuple[list[Any], Tensor | None]]:
        """Return parameters and state as lines of `_Told`, with the tensors."""
        things: list[tuple[list[Any], Tensor | None]] = []
        for index, parameter in enumerate(self._parameters):
            values = {"": parameter.detach(), **optimizer.state.get(parameter, {})}
            for key, value in values.items():
                if isinstance(value, Tensor):
                    home = self._home_of(index, key, value)
                    spec = _spec_of(value, parameter.shape, parameter.detach())
                    things.append(([index, key, home and home.address(), *spec], value))
                else:
                    things.append(([index, key, None, value], None))
        return things

    def _share(
        self,
        optimizer: Optimizer,
        host: Mapping[int, _Told],
        things: Sequence[tuple[list[Any], Tensor | None]],
    ) -> None:
        """Move parameters and state into shared memory, unless all ranks have them there."""
        places = {rank: {tuple(line[:3]) for line in host[rank].things if line[2]} for rank in host}
        kept = set.intersection(*places.values())
        holder = max(host, key=lambda rank: (bool(places[rank]), host[rank].steps, -rank))
        lines = host[holder].things
        new = [line for line in lines if len(line) > 4 and tuple(line[:3]) not in kept]
        counts = Spec([len(host)], [1], "int64")  # new memory is zero
        values: list[Tensor | None] | None = None
        if self._rank == holder:
            own = {(line[0], line[1]): tensor for line, tensor in things}
            values = [*(own[index, key] for index, key, *_ in new), None]
        made = self._segment([*(Spec(*spec) for _, _, _, *spec in new), counts], holder, values)
        if made is None:
            self.is_shared = False
            return
        self._written = made.pop().shared
        self._homes = {  # in the order of the holder: each process has its own of a set of texts
            (index, key): self._homes[index, key]
            for index, key, known, *_ in lines
            if (index, key, known) in kept
        }
        self._homes |= {
            (index, key): home for (index, key, *_), home in zip(new, made, strict=True)
        }
        state: dict[Tensor, dict[str, Any]] = {}
        for index, key, _, *spec in lines:
            home = self._homes.get((index, key))
            if key:
                value = spec[0] if home is None else home.program
                state.setdefault(self._parameters[index], {})[key] = value
            elif home is not None and self._home_of(index, "", self._parameters[index]) is None:
                self._parameters[index].data = home.program
        self._memories = [self._homes[index, ""].program for index in range(len(self._parameters))]
        self._show(optimizer, state)

    def _show(self, optimizer: Optimizer, shown: dict[Tensor, dict[str, Any]]) -> None:
        """Set ``optimizer.state``, in the order of an unsharded optimizer."""
        for parameter in self._parameters:
            values = optimizer.state.pop(parameter, {})
            if parameter in shown:
                values = values if isinstance(values, dict) else {}
                values.clear()
                values.update(shown[parameter])
                optimizer.state[parameter] = values
        self._shown = shown
        self._note_versions()

    def _note_versions(self) -> None:
        """Note the versions of the tensors in a divided state, to see writes in place."""
        shown = {} if self.is_shared else self._shown
        self._versions = {parameter: _versions(values) for parameter, values in shown.items()}

    def _segment(
        self, layout: Sequence[Spec], holder: int, values: Sequence[Tensor | None] | None
    ) -> list[Home] | None:
        """Return tensors in memory that the rank `holder` makes for its host. Collective.

        Args:
            layout: the specs of the tensors, the same on all ranks of the host.
            holder: a rank of this host.
            values: on the holder, the values of the tensors; None: undefined values.

        Returns:
            The homes; None on all ranks of the set if one of them cannot share memory.
        """
        try:
            return share_memory(layout, holder, values, self._ranks, self._rank, self._exchange)
        except OSError as error:
            if self._rank == self._ranks[0]:
                _log.warning("shard_state=True without shared memory: %s", error)
            return None

    def _divide(self, optimizer: Optimizer, group: Sequence[int]) -> None:
        """Assign parts of parameters and state to the ranks of the group."""
        sizes = [(p.numel(), p.element_size()) for p in self._parameters]
        plan = plan_parts(sizes, len(group), may_cut=self._may_cut)
        self._owners = group
        if not self.is_shared:
            self._homes = {}
            self._memories = [parameter.detach() for parameter in self._parameters]
        own = group.index(self._rank)
        self._parts, self._mine = defaultdict(list), {}
        for part in plan:
            if part.owner == own or not self.is_shared:
                home = self._homes.get((part.parameter, ""))
                tensor = cut(home.shared if home else self._memories[part.parameter], part)
                self._parts[part.parameter].append((part, tensor))
                if part.owner == own:
                    self._mine[part.parameter] = (part, tensor)
        self._divide_state(optimizer)

    def _divide_state(self, optimizer: Optimizer) -> None:
        """Take this rank's share of ``optimizer.state``, whose tensors are whole, or parts."""
        state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        shown: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for index, parameter in enumerate(self._parameters):
            for key, value in optimizer.state.get(parameter, {}).items():
                shown[parameter][key] = value
                own = None
                if index in self._mine:
                    own = state[self._mine[index][1]][key] = self._own(index, key, value)
                if isinstance(value, Tensor) and not self.is_shared:
                    shown[parameter][key] = self._visible(index, own, value)
        self._homes = {
            (index, key): home
            for (index, key), home in self._homes.items()
            if not key or key in shown[self._parameters[index]]
        }
        self._state = state
        self._known = {tensor: dict(state.get(tensor, {})) for _, tensor in self._mine.values()}
        self._show(optimizer, {parameter: values for parameter, values in shown.items() if values})

    def _own(self, index: int, key: str, value: Any) -> Any:
        """Return the share of this rank's part in a value of the state."""
        if not isinstance(value, Tensor):
            return value
        part, tensor = self._mine[index]
        home = self._homes.get((index, key))
        if home is not None:
            value = home.shared
        elif isinstance(value, StatePart):
            value = value.as_subclass(Tensor)
        if part.is_whole or (value.shape == tensor.shape and home is None):
            return value
        if value.shape == self._memories[index].shape:
            own = self._slice(value, part)
            return own if home else own.clone()
        # The first part uses the whole parameter's own tensor, such as its number of steps.
        return value if part.begin == 0 else value.clone()

    def _slice(self, value: Tensor, part: Part) -> Tensor:
        """Return the part's elements of a tensor like the parameter; of another, all elements."""
        like = self._memories[part.parameter]
        return cut(value.detach(), part, like) if value.shape == like.shape else value.detach()

    def _visible(self, index: int, own: Tensor | None, value: Tensor) -> Tensor:
        """Return what ``optimizer.state`` has in place of a tensor that is divided."""
        if own is None:
            return torch.empty(0, dtype=value.dtype, device=value.device).as_subclass(StatePart)
        part, tensor = self._mine[index]
        is_cut = not part.is_whole and own.shape == tensor.shape
        return own.as_subclass(StatePart) if is_cut else own

    # --- writes of the program

    @torch.no_grad()
    def _writes(self, optimizer: Optimizer) -> list[_Write]:
        """Return what the program has written since the last step.

        Raises:
            ValueError: it has put a value into ``optimizer.state`` that cannot be divided.
        """
        self._take_homes_again()
        found: list[_Write] = []
        for index, parameter in enumerate(self._parameters):
            if parameter.data_ptr() != self._memories[index].data_ptr():
                found += self._follow(index)
            found += self._writes_to_state(optimizer, index)
        found = self._put_in_place(optimizer, found)
        for index, key in self._touched():
            home = self._homes[index, key]
            if not _same_bits(home.program, home.shared):
                found.append(_Write(index, key, home.program))
        return found

    def _take_homes_again(self) -> None:
        """Make new tensors in place of those that torch has moved.

        ``share_memory_()`` moves a storage, and so does a tensor's way to another process: with the
        parameter it moves the tensor that is known here.
        """
        for (index, key), left in self._homes.items():
            if not left.has_been_left():
                continue
            home = self._homes[index, key] = left.taken_again()
            if key:
                self._shown[self._parameters[index]][key] = home.program
            else:
                self._memories[index] = home.program

    def _follow(self, index: int) -> Iterator[_Write]:
        """Follow a parameter to its new memory; yield a write if it is shared, or in other form."""
        has_views = self.is_shared and _has_views(self._parameters[index])
        value, memory = self._parameters[index].detach(), self._memories[index]
        if not self.is_shared and _fits(value, memory) and value.stride() == memory.stride():
            self._memories[index] = value
            for part, tensor in self._parts[index]:
                tensor.data = cut(value, part)
            return
        if not _fits(value, memory) or Spec.of(value) != Spec.of(memory):
            require_dense({self._parameters[index]: self._called(index)})
        elif has_views and not self._has_warned:
            self._has_warned = True
            self._warn_of_views([index])
        yield _Write(index, "", value)

    def _writes_to_state(self, optimizer: Optimizer, index: int) -> Iterator[_Write]:
        """Yield what the program has written to a parameter's state, unless in shared memory."""
        parameter = self._parameters[index]
        shown, state = self._shown.get(parameter, {}), optimizer.state.get(parameter, {})
        if not isinstance(state, dict):
            raise ValueError(f"optimizer.state of {self._called(index)} is no dict: {state!r}")
        versions = self._versions.get(parameter, {})
        if (
            state.keys() == shown.keys()
            and all(map(operator.is_, state.values(), shown.values()))
            and (self.is_shared or versions == _versions(state))
        ):
            return
        yield from (_Write(index, key, _GONE) for key in shown if key not in state)
        for key, value in state.items():
            is_written = isinstance(value, Tensor) and value._version != versions.get(key)
            if not _is_same(value, shown.get(key, _GONE)) or (is_written and not self.is_shared):
                self._require_divisible(index, key, value)
                yield _Write(index, key, value)

    def _put_in_place(self, optimizer: Optimizer, writes: Sequence[_Write]) -> list[_Write]:
        """Copy what replaces tensors in shared memory there; return the other writes."""
        others: list[_Write] = []
        copies: list[tuple[_Write, Tensor, Tensor]] = []
        segments = self._segments()
        for write in writes:
            index, key, value = write
            home = self._homes.get((index, key))
            if (
                home is None
                or not _fits(value, home.program)
                or (not key and Spec.of(value) != Spec.of(home.program))
            ):
                others.append(write)
            else:  # the value may lie where another one is copied
                is_shared = any(segment.holds(value) for segment in segments)
                copies.append((write, home.program, value.clone() if is_shared else value))
        for (index, key, _), program, value in copies:
            program.copy_(value)
            if key:
                optimizer.state[self._parameters[index]][key] = program
            else:
                self._parameters[index].data = program
        return others

    def _touched(self) -> list[tuple[int, str]]:
        """Return the keys of the shared tensors that this rank may have copies of."""
        self._copies = []
        counts: dict[Segment, list[int]] = {}
        for segment in self._segments():
            pages = segment.written_pages()
            if len(pages):
                self._copies.append((segment, pages))
                counts[segment] = torch.bincount(pages, minlength=segment.pages).cumsum(0).tolist()
        return [
            place
            for place, home in self._homes.items()
            if home.segment in counts and home.is_on(counts[home.segment])
        ]

    def _segments(self) -> set[Segment]:
        return {home.segment for home in self._homes.values()}

    def _require_divisible(self, index: int, key: str, value: Any) -> None:
        """Raise ValueError for a tensor of the state that is neither whole nor this rank's part."""
        own = self._mine[index][1].shape if index in self._mine else torch.Size([0])
        if (
            self.is_divided
            and len(self._parts[index]) > 1
            and isinstance(value, Tensor)
            and value.numel() != 1
            and value.shape not in (self._memories[index].shape, own)
        ):
            raise ValueError(
                f"optimizer.state has a tensor of shape {list(value.shape)} as '{key}' of "
                f"{self._called(index)}. shard_state=True divides it here, and takes one of the "
                f"parameter's shape, or of this rank's part: {list(own)}"
            )

    def _called(self, index: int) -> str:
        name = self._names.get(self._parameters[index], "")
        is_named = name and not name.startswith("allreduce.noname")
        return f"parameter {index} ('{name}')" if is_named else f"parameter {index}"

    def _lines_of(self, writes: Sequence[_Write]) -> list[str]:
        """Return lines that are the same on ranks which have written alike.

        Where memory is shared they have digests. Elsewhere ranks have different parts.
        """
        tensors = [write.value for write in writes if isinstance(write.value, Tensor)]
        digests = iter(digests_of(tensors).tolist() if self.is_shared and tensors else ())
        lines = []
        for write in writes:
            index, key, value = write
            what = f"'{key}' of {self._called(index)} in optimizer.state" if key else ""
            what = what or self._called(index)
            if value is _GONE:
                lines.append(f"{what} is taken out")
            elif not isinstance(value, Tensor):
                lines.append(f"{what} is {value!r}")
            elif self.is_shared:
                lines.append(f"{what} is written (digest {next(digests) & (1 << 64) - 1:x})")
            else:
                how = "changed in place" if self._is_in_place(write) else "written"
                lines.append(f"{what} is {how}")
        return lines

    def _require_alike(self, every: Mapping[int, Sequence[str]]) -> None:
        """Raise MismatchError if the writes of ranks differ which must be alike."""
        for ranks in self._groups_of_ranks:
            require_same_lines(
                {rank: every[rank] for rank in ranks},
                f"rank {self._rank}: since the last step the program has written differently on "
                "different ranks",
                ". With shard_state=True a parameter is stepped once for several ranks: write the "
                "same on all of them, or call broadcast_parameters(model.state_dict(), 0) or "
                "broadcast_optimizer_state(optimizer, 0) after it",
                absent="nothing more",
            )

    def _found_writes(self, optimizer: Optimizer) -> tuple[list[_Write], str]:
        """Return what the program has written, and the reason if it cannot be divided."""
        try:
            return self._writes(optimizer), ""
        except ValueError as error:
            return [], str(error)

    def _agreed_writes(self, optimizer: Optimizer, root: int | None = None) -> list[_Write]:
        """Return what the program has written, alike on all ranks. Collective.

        Args:
            optimizer: as for `place`.
            root: the rank whose writes count if they differ; None: they must not.

        Raises:
            InvalidArgumentError: on all ranks: one of them cannot divide a value, or has changed
                the only copy of its part.
            MismatchError: on all ranks: they have written differently.
        """
        writes, problem = self._found_writes(optimizer)
        if self._rank == root:
            is_partial = not all(map(self._is_whole, writes))
        else:
            is_partial = any(
                write.key and self._is_in_place(write) and write.number in self._mine
                for write in writes
            )
        gathered = self._exchange((problem, self._lines_of(writes), is_partial))
        every = dict(zip(self._ranks, gathered, strict=True))
        for rank, (why, *_) in every.items():
            if why:
                self._refuse(problem or f"rank {rank} cannot divide the state: {why}")
        lines = {rank: told for rank, (_, told, _) in every.items()}
        if root is None:
            self._require_alike(lines)
        elif len(set(map(tuple, lines.values()))) > 1:
            partial = next((rank for rank, (*_, has_part) in every.items() if has_part), None)
            if partial is not None:
                self._refuse(
                    f"rank {partial} has changed its part of the state, which no other rank has "
                    "(shard_state=True divides the state here): change it on all ranks alike, or "
                    "call load_state_dict() with a whole state"
                )
            return writes if self._rank == root else []
        return writes

    def _is_in_place(self, write: _Write) -> bool:
        """Return whether the program has written into the tensor that it was shown."""
        index, key, value = write
        shown = self._shown.get(self._parameters[index], {}).get(key)
        return value is (shown if key else self._memories[index])

    def _is_whole(self, write: _Write) -> bool:
        """Return whether a write to a divided state gives the whole value."""
        index, key, value = write
        if not key or not isinstance(value, Tensor):
            return True
        has_all = len(self._parts[index]) == 1 and value.numel() > 0
        is_like = value.numel() == 1 or value.shape == self._parameters[index].shape
        return not self._is_in_place(write) and (has_all or is_like)

    @torch.no_grad()
    def _take(self, optimizer: Optimizer, writes: Sequence[_Write]) -> None:
        """Take over what the program has written, alike on all ranks."""
        if not self.is_shared:
            self._divide_state(optimizer)
            return
        for index, key, value in writes:
            if index in self._mine:
                part, tensor = self._mine[index]
                own = self._state[tensor][key] if key else tensor
                own.copy_(self._slice(value, part))

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
        writes = self._enter(optimizer)
        self.has_moved = False
        stepped: Any = object.__new__(type(optimizer))
        groups = self._groups(optimizer)
        failure: BaseException | None = None
        self._note_write(2 * self._steps_here + 1)
        try:
            if writes:
                self._take(optimizer, writes)
            vars(stepped).update(vars(optimizer), param_groups=groups, state=self._state)
            raw(stepped)
            self._note_write(2 * self._steps_here + 2)
        except BaseException as error:  # Ctrl-C, too: the other ranks wait
            failure = error
        for _, tensor in self._mine.values():
            tensor.grad = None
        self._leave(optimizer, failure)
        self._steps += 1
        self._steps_here += 1
        torch.autograd.graph.increment_version(
            [parameter for parameter in self._parameters if parameter.grad is not None]
        )
        if self.is_divided:
            self._note_versions()
        return loss

    def _groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return the groups with this rank's parts, and their gradients, as parameters."""
        groups = [{**group, "params": []} for group in optimizer.param_groups]
        group_of = [i for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        for index, (part, tensor) in self._mine.items():
            gradient = self._parameters[index].grad
            if gradient is not None:
                tensor.grad = self._slice(gradient, part)
            groups[group_of[index]]["params"].append(tensor)
        return groups

    def _note_write(self, number: int) -> None:
        if self.is_shared:
            self._written[self._owners.index(self._rank)] = number

    def _sum(self, numbers: Sequence[int], what: str) -> list[int]:
        self._count += 1
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        name = f"{self._name}.{self._count}.{what}"
        total: list[int] = self._engine.run("allreduce", tensor, None, name).tolist()
        return total

    def _enter(self, optimizer: Optimizer) -> list[_Write]:
        """Wait until all ranks are about to step, so that none reads the parameters any more.

        Returns:
            What the program has written since the last step, alike on the ranks of a host.
        """
        writes: list[_Write] = []
        problem = self._problem(optimizer)
        if not problem:
            writes, problem = self._found_writes(optimizer)
        lines, written = self._lines(optimizer), self._lines_of(writes)
        digest = _digest(lines)
        placed = [write for write in writes if not self._is_in_place(write)]
        has_moved = any(not write.key for write in placed)
        is_rebuilt = self.is_shared and bool(placed)
        who = self._rank if problem else 0
        in_groups = [0] * 2 * len(self._groups_of_ranks)
        for number, ranks in enumerate(self._groups_of_ranks):
            if self._rank in ranks:
                in_groups[2 * number] = _digest(written)
                in_groups[2 * number + 1] = _digest(written) ** 2
        own = [1, bool(problem), who, has_moved, is_rebuilt, digest, digest * digest, *in_groups]
        here, problems, who, moved, rebuilt, digests, squares, *in_groups = self._sum(own, "enter")
        size = len(self._ranks)
        if here != size:
            self._refuse(
                f"{size - here} ranks have called join(), and step no more: with shard_state=True "
                "their parts of the parameters would stay. Give all ranks as many batches"
            )
        if problems:
            others = f"rank {who} cannot step" if problems == 1 else f"{problems} ranks cannot step"
            self._refuse(problem or f"{others}: see the error there")
        # Equality holds only if all digests are equal.
        if digests * digests != size * squares:
            require_same(lines, "the ranks step differently", self._process_set)
        if moved not in (0, size):
            self._refuse(
                f"{moved} of {size} ranks have given parameters other memory since the last step "
                "(model.to(), p.data = ...): do it alike on all ranks"
            )
        sums = zip(self._groups_of_ranks, in_groups[::2], in_groups[1::2], strict=True)
        if any(total * total != len(ranks) * square for ranks, total, square in sums):
            self._require_alike(dict(zip(self._ranks, self._exchange(written), strict=True)))
        if moved or rebuilt:
            del writes, placed  # they would count as views of the parameters
            self.place(optimizer, self._index, self._names)
            return self._writes(optimizer) if self.is_shared else []
        return writes

    def _refuse(self, why: str) -> NoReturn:
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
        is_new = any(self._is_new(tensor) for _, tensor in self._mine.values())
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
        for segment, pages in self._copies:
            segment.drop(pages)
        if not self.is_shared:
            works = [
                self._engine.submit(
                    "broadcast",
                    tensor.detach(),
                    tensor.detach(),
                    f"{self._name}.{self._count}.{position}",
                    root=self._ranks.index(self._owners[part.owner]),
                )
                for position, (part, tensor) in enumerate(chain(*self._parts.values()))
            ]
            for work in works:
                work.wait()

    def _is_new(self, tensor: Tensor) -> bool:
        """Return whether the step has put values into the state of a part, or taken some out."""
        state, known = self._state.get(tensor, {}), self._known[tensor]
        return state.keys() != known.keys() or not all(
            _is_same(value, known[key]) for key, value in state.items()
        )

    def _described(self, indices: Iterable[int]) -> list[list[Any]]:
        """Return what the ranks' parts of parameters have as state, as whole values. Collective.

        Args:
            indices: the parameters on this rank. The owner of a parameter's first part describes.

        Returns:
            For each parameter its index and a list of keys, each with a value; or, for a tensor,
            with whether it is on the CPU, and its spec.
        """
        told: list[list[Any]] = []
        for index in indices:
            part, tensor = self._mine[index]
            items: list[list[Any]] = []
            for key, value in self._state.get(tensor, {}).items():
                if isinstance(value, Tensor):
                    spec = _spec_of(value, tensor.shape, self._memories[index])
                    items.append([key, value.device.type == "cpu", *spec])
                else:
                    items.append([key, value])
            if part.begin == 0:
                told.append([index, items])
        every = dict(zip(self._ranks, self._exchange(told), strict=True))
        return [each for rank in self._owners for each in every[rank]]

    def _adopt(self, optimizer: Optimizer) -> None:
        """Show all ranks the state that a step has made. Collective."""
        changed = {i: tensor for i, (_, tensor) in self._mine.items() if self._is_new(tensor)}
        new: list[tuple[int, str, Spec]] = []
        for index, items in self._described(changed):
            parameter = self._parameters[index]
            state: dict[str, Any] = {}
            for key, value, *layout in items:
                state[key] = value
                if not layout:
                    continue
                spec, home = Spec(*layout), self._homes.get((index, key))
                if not self.is_shared:
                    device = torch.device("cpu") if value else parameter.device
                    state[key] = torch.empty(0, dtype=spec.torch_dtype, device=device)
                    if index in self._mine:
                        state[key] = self._state[self._mine[index][1]][key]
                elif home is not None and Spec.of(home.program) == spec:
                    state[key] = home.program
                else:
                    new.append((index, key, spec))
            optimizer.state[parameter] = state
        if self.is_shared:
            made = self._segment([spec for *_, spec in new], self._owners[0], None)
            if made is None:
                raise RingError(
                    f"rank {self._rank}: no shared memory for the state of the optimizer"
                )
            for (index, key, _), home in zip(new, made, strict=True):
                self._homes[index, key] = home
                optimizer.state[self._parameters[index]][key] = home.program
            for index, tensor in changed.items():
                for key, value in self._state.get(tensor, {}).items():
                    if isinstance(value, Tensor):
                        self._own(index, key, value).copy_(value)
        self._sum([0], "adopted")  # the values are there
        self._divide_state(optimizer)

    # --- the whole state

    @contextlib.contextmanager
    def whole(self, optimizer: Optimizer) -> Iterator[None]:
        """Context in which ``optimizer.state`` is whole. Collective, if state is divided."""
        if not self.is_divided:
            yield
            return
        self._agreed_writes(optimizer)
        self._divide_state(optimizer)
        self._collect(optimizer, to_cpu=True)
        try:
            yield
        finally:
            for parameter in self._parameters:  # state_dict() has the dicts
                optimizer.state.pop(parameter, None)
            self._show(optimizer, self._shown)

    @contextlib.contextmanager
    def replaced(self, optimizer: Optimizer, root: int) -> Iterator[None]:
        """Context in which a rank has its whole state, which all ranks take there. Collective.

        Args:
            optimizer: as for `place`.
            root: the rank. Only what the program has written there counts.
        """
        if not self.is_divided:
            yield
            return
        writes = self._agreed_writes(optimizer, root)
        whole = [write for write in writes if write.key and self._is_whole(write)]
        if not writes:  # others may have written
            self._show(optimizer, self._shown)
        self._divide_state(optimizer)
        self._collect(optimizer)
        for index, key, value in whole:
            state = optimizer.state.setdefault(self._parameters[index], {})
            state[key] = value
            if value is _GONE:
                del state[key]
        try:
            yield
        finally:
            self._divide_state(optimizer)

    def _collect(self, optimizer: Optimizer, *, to_cpu: bool = False) -> None:
        """Give ``optimizer.state`` the parts of all ranks. Collective.

        Args:
            optimizer: as for `place`.
            to_cpu: whether to put the state on the CPU rather than on the parts' device.
        """
        whole: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for number, (index, items) in enumerate(self._described(self._mine)):
            parameter, like = self._parameters[index], self._memories[index]
            for key, value, *layout in items:
                whole[parameter][key] = value
                if not layout:
                    continue
                spec, device = Spec(*layout), torch.device("cpu") if value else parameter.device
                tensor = torch.empty_strided(
                    spec.shape, spec.stride, dtype=spec.torch_dtype, device=device
                )
                is_like = tensor.shape == like.shape
                for part, own in self._parts[index] if is_like else self._parts[index][:1]:
                    here = cut(tensor, part) if is_like else tensor
                    if index in self._mine and self._mine[index][0] is part:
                        here.copy_(self._state[own][key])
                    name = f"{self._name}.{self._count}.state.{number}.{key}.{part.owner}"
                    self._engine.run("broadcast", flat(here), flat(here), name, part.owner)
                whole[parameter][key] = tensor.cpu() if to_cpu else tensor
        self._count += 1
        for parameter in self._parameters:
            optimizer.state.pop(parameter, None)
            if parameter in whole:
                optimizer.state[parameter] = whole[parameter]


def _has_views(parameter: Tensor) -> bool:
    """Return whether other tensors share the memory of a parameter, as far as torch tells."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    # Two uses are the parameter and the Python object of `untyped_storage()`.
    return count is not None and count(parameter.untyped_storage()._cdata) > 2


def _same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype, with `other` dense, have the same bits."""
    if tensor.stride() != other.stride():
        tensor = torch.empty_like(other).copy_(tensor)
    bits = _BITS.get(other.element_size(), torch.int64)
    return torch.equal(
        *(flat(each.resolve_conj().resolve_neg()).view(bits) for each in (tensor, other))
    )


def _spec_of(value: Tensor, shape: torch.Size, like: Tensor) -> Spec:
    """Return the spec of a tensor of the state: that of `like`, if it has the shape given."""
    spec = Spec.of(value)
    return Spec.of(like)._replace(dtype=spec.dtype) if value.shape == shape else spec


def _fits(value: Any, other: Tensor) -> bool:
    """Return whether a value can be copied into a tensor of the state without a loss."""
    if not isinstance(value, Tensor):
        return False
    form = (other.shape, other.dtype, other.device)
    return (value.shape, value.dtype, value.device) == form


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values of a state are the same tensor, or equal values."""
    is_tensor = isinstance(value, Tensor) or isinstance(other, Tensor)
    return value is other or (not is_tensor and repr(value) == repr(other))


def _versions(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the versions of a state's tensors, which increase with writes in place."""
    return {key: value._version for key, value in state.items() if isinstance(value, Tensor)}


def _digest(lines: Sequence[str]) -> int:
    """Return 24 bits, so that the sum of many squares fits into an int64."""
    return zlib.crc32(repr(lines).encode()) >> 8
