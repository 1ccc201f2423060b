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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    is_same: bool  # it has the bits of before, and has only been moved, or restored


_GONE = object()  # the value of a key that the program has taken out of the state


_NONE = torch.zeros(0, dtype=torch.int64, device="cpu")


class _Told(NamedTuple):
    """A rank's description of its parameters and state, for the other ranks."""

    steps: int
    on_cpu: bool
    has_lost: bool  # the parts of ranks of an earlier world are lost
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
    of an unsharded optimizer; otherwise it has the same keys on all ranks, and each rank's part of
    the tensors. The program may change it and the parameters: the next step reads the changes
    (`_writes`), its first allreduce compares them, and all ranks take them over (`_take`). Only
    parameters with other shapes, strides, dtypes or devices are divided anew.

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
        self._likes: list[Tensor] = []  # on the meta device, with the strides that were divided
        self._shown: dict[Tensor, dict[str, Any]] = {}  # ``optimizer.state`` after the last step
        self._versions: dict[Tensor, dict[str, int]] = {}  # of its tensors, where state is divided
        self._homes: dict[int, Home] = {}  # by the address of the program's tensor
        self._copies: list[tuple[Segment, Tensor]] = []  # pages written before this step
        self._cut: set[int] = set()  # the parameters that several ranks divide
        self._parts: list[tuple[Part, Tensor]] = []  # all; or this rank's, if memory is shared
        self._mine: list[tuple[Part, Tensor]] = []
        self._part_of: dict[int, tuple[Part, Tensor]] = {}  # this rank's, by parameter
        self._state: dict[Tensor, dict[str, Any]] = defaultdict(dict)  # state of this rank's parts
        self._known: dict[Tensor, dict[str, Any]] = {}  # the same, as all ranks know it
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
        if self.is_active and before is self._engine:
            writes = self._agreed_writes(optimizer)
            if self.is_divided:
                self._take(optimizer, [write for write in writes if write.key])
        self._index, self._name, self._count = index, f"sharded.{index}", 0
        self._names = names
        self._look_for_writes()
        has_parts = self.is_divided and bool(self._state)
        has_lost = has_parts and before is not self._engine
        self._ranks = list(self._process_set.ranks or ())
        self._rank = current.rank()
        host_of = current.world().host_of
        hosts: dict[Any, list[int]] = {}
        for rank in self._ranks:
            hosts.setdefault(host_of[rank], []).append(rank)
        host = hosts[host_of[self._rank]]
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        alone = [parameter for parameter in self._parameters if not _has_views(parameter)]
        things = self._things(optimizer)
        described = [[*key, *spec] for key, spec, _ in things]
        found = [None if v is None else self._homes.get(v.data_ptr()) for *_, v in things]
        homes = [None if home is None else home.address() for home in found]
        on_cpu = all(parameter.device.type == "cpu" for parameter in self._parameters)
        own = _Told(self._steps, on_cpu, has_lost, has_parts, described, homes)
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
            self._collect(optimizer)  # now whole, the same on all ranks, and nowhere shared
            things = self._things(optimizer)
            own = own._replace(
                things=[[*key, *spec] for key, spec, _ in things], homes=[None] * len(things)
            )
            every = {
                rank: told._replace(things=own.things, homes=own.homes)
                for rank, told in every.items()
            }
        could_share = len(hosts) < len(self._ranks)
        self.is_shared = could_share and all(told.on_cpu for told in every.values())
        if self.is_shared:
            self._warn_of_views(alone)
            self._share(optimizer, {rank: every[rank] for rank in host}, things)
        self._groups_of_ranks = list(hosts.values()) if self.is_shared else [self._ranks]
        self._divide(optimizer, host if self.is_shared else self._ranks)
        self.is_active = True
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
        self._written = made.pop().shared
        self._homes.update((home.program.data_ptr(), home) for home in made)
        for (key, _), home_of_new in zip(new, made, strict=True):
            shared[key] = home_of_new.program
            if key[1] == "":
                self._parameters[key[0]].data = home_of_new.program
        self._memories = [shared[index, ""] for index in range(len(self._parameters))]
        self._shown = {}
        for index, values_of in state.items():
            self._shown[self._parameters[index]] = {
                key: shared.get((index, key), value) for key, value in values_of.items()
            }
        self._show(optimizer)

    def _show(self, optimizer: Optimizer) -> None:
        """Set ``optimizer.state`` to the state that is known, and forget the memory of others."""
        for parameter in self._parameters:  # in the order of an unsharded optimizer
            values = optimizer.state.pop(parameter, {})
            if parameter in self._shown:
                values = values if isinstance(values, dict) else {}
                values.clear()
                values.update(self._shown[parameter])
                optimizer.state[parameter] = values
        if self.is_shared:
            values = (v for shown in self._shown.values() for v in shown.values())
            tensors = [v for v in values if isinstance(v, Tensor)]
            kept = {tensor.data_ptr() for tensor in (*self._memories, *tensors)}
            self._homes = {at: home for at, home in self._homes.items() if at in kept}
        else:
            self._note_versions()

    def _note_versions(self) -> None:
        """Note the versions of the tensors in the divided state, to see writes in place."""
        self._versions = {p: _versions(shown) for p, shown in self._shown.items()}

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
        """Assign parts to the ranks of the group, and take the state of this rank's parts."""
        sizes = [(p.numel(), p.element_size()) for p in self._parameters]
        plan = plan_parts(sizes, len(group), may_cut=self._may_cut)
        self._owners = group
        self._cut = {part.parameter for part in plan if not part.is_whole}
        if not self.is_shared:
            self._memories = [parameter.detach() for parameter in self._parameters]
        self._likes = [torch.empty_like(memory, device="meta") for memory in self._memories]
        own = group.index(self._rank)
        self._parts = [
            (part, cut(self._twin(self._memories[part.parameter]), part))
            for part in plan
            if part.owner == own or not self.is_shared
        ]
        self._mine = [(part, tensor) for part, tensor in self._parts if part.owner == own]
        self._part_of = {part.parameter: (part, tensor) for part, tensor in self._mine}
        self._state, self._known = defaultdict(dict), {}
        for part, tensor in self._mine:
            for key, value in optimizer.state.get(self._parameters[part.parameter], {}).items():
                self._state[tensor][key] = self._own(value, part)
            self._known[tensor] = dict(self._state.get(tensor, {}))
        if not self.is_shared:
            self._homes, self._shown = {}, {}
            for index, parameter in enumerate(self._parameters):
                for key, value in optimizer.state.get(parameter, {}).items():
                    self._shown.setdefault(parameter, {})[key] = self._visible(index, key, value)
            self._show(optimizer)

    def _twin(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the program as the owners of its parts write it."""
        home = self._homes.get(tensor.data_ptr())
        return tensor if home is None or not tensor.numel() else home.shared

    def _own(self, value: Any, part: Part) -> Any:
        """Return a part's share of a value of the state, given that of the whole parameter."""
        if not isinstance(value, Tensor):
            return value
        value = self._twin(value)
        if not part.is_whole and value.shape == self._likes[part.parameter].shape:
            own = self._slice(value, part)
            return own if self.is_shared else own.clone()
        # The first part uses the whole parameter's own tensor, such as its number of steps.
        return value if part.begin == 0 else value.clone()

    def _slice(self, value: Tensor, part: Part) -> Tensor:
        """Return the part's elements of a tensor like the parameter; of another, all elements."""
        like = self._likes[part.parameter]
        return cut(value.detach(), part, like) if value.shape == like.shape else value.detach()

    def _visible(self, index: int, key: str, value: Any) -> Any:
        """Return what ``optimizer.state`` has in place of a value that is divided."""
        if not isinstance(value, Tensor):
            return value
        if index not in self._part_of:
            return torch.empty(0, dtype=value.dtype, device=value.device).as_subclass(StatePart)
        part, tensor = self._part_of[index]
        own: Tensor = self._state[tensor][key]
        is_cut = not part.is_whole and own.shape == tensor.shape
        return own.as_subclass(StatePart) if is_cut else own

    # --- writes of the program

    def _writes(self, optimizer: Optimizer) -> list[_Write]:
        """Return what the program has written since the last step.

        Raises:
            ValueError: it has put a value into ``optimizer.state`` that cannot be divided.
        """
        found: list[_Write] = []
        touched = self._touched()
        for index, parameter in enumerate(self._parameters):
            memory = self._memories[index]
            if self._is_in_other_form(index):
                require_dense({parameter: self._called(index)})
                found.append(_Write(index, "", parameter.detach(), is_same=not self.is_shared))
            elif parameter.data_ptr() != memory.data_ptr():
                if self.is_shared:
                    self._warn_of_view(index)
                is_same = not self.is_shared or _same_bits(parameter.detach(), self._twin(memory))
                found.append(_Write(index, "", parameter.detach(), is_same))
            elif memory.data_ptr() in touched:
                found.append(_Write(index, "", memory, _same_bits(memory, self._twin(memory))))
            found += self._writes_to_state(optimizer, index, touched)
        return found

    def _touched(self) -> set[int]:
        """Return the addresses of the shared tensors that this rank may have copies of."""
        self._copies = []
        touched: set[int] = set()
        homes: dict[Segment, list[tuple[int, Home]]] = {}
        for address, home in self._homes.items():
            homes.setdefault(home.segment, []).append((address, home))
        for segment, homes_there in homes.items():
            pages = segment.written_pages()
            if len(pages):
                self._copies.append((segment, pages))
                counts = torch.bincount(pages, minlength=segment.pages).cumsum(0).tolist()
                touched.update(address for address, home in homes_there if home.is_on(counts))
        return touched

    def _writes_to_state(
        self, optimizer: Optimizer, index: int, touched: set[int]
    ) -> Iterator[_Write]:
        """Yield what the program has written to the state of a parameter."""
        parameter = self._parameters[index]
        shown, state = self._shown.get(parameter, {}), optimizer.state.get(parameter, {})
        if not isinstance(state, dict):
            raise ValueError(f"optimizer.state of {self._called(index)} is no dict: {state!r}")
        versions = self._versions.get(parameter, {})
        if (
            not touched
            and state.keys() == shown.keys()
            and all(map(operator.is_, state.values(), shown.values()))
            and (self.is_shared or versions == _versions(state))
        ):
            return
        yield from (_Write(index, key, _GONE, is_same=False) for key in shown if key not in state)
        for key, value in state.items():
            before = shown.get(key, _GONE)
            if not isinstance(value, Tensor):
                if not _is_same(value, before):
                    yield _Write(index, key, value, is_same=False)
            elif not self.is_shared:
                if value is not before or value._version != versions[key]:
                    self._require_divisible(index, key, value)
                    yield _Write(index, key, value, is_same=False)
            elif value is not before or value.data_ptr() in touched:
                is_same = self._has_twin(value, before) and _same_bits(value, self._twin(before))
                yield _Write(index, key, value, is_same)

    def _has_twin(self, value: Tensor, before: Any) -> bool:
        """Return whether a value fits into the shared memory of the one before."""
        return (
            isinstance(before, Tensor)
            and before.data_ptr() in self._homes
            and (value.shape, value.dtype, value.device)
            == (before.shape, before.dtype, before.device)
        )

    def _is_in_other_form(self, index: int) -> bool:
        """Return whether the program has moved a parameter so that all must be divided anew."""
        parameter, memory = self._parameters[index], self._memories[index]
        if parameter.data_ptr() == memory.data_ptr():
            return False
        if parameter.device != memory.device or Spec.of(parameter.detach()) != Spec.of(memory):
            return True
        return not self.is_shared and parameter.stride() != memory.stride()

    def _require_divisible(self, index: int, key: str, value: Tensor) -> None:
        """Raise ValueError for a tensor of the state that is neither whole nor this rank's part."""
        like, own = self._likes[index], self._part_of.get(index)
        shapes = [like.shape, own[1].shape if own else torch.Size([0])]
        if index in self._cut and value.numel() != 1 and value.shape not in shapes:
            raise ValueError(
                f"optimizer.state has a tensor of shape {list(value.shape)} as '{key}' of "
                f"{self._called(index)}. shard_state=True divides it here, and takes one of the "
                f"parameter's shape, or of this rank's part: {list(shapes[1])}"
            )

    def _called(self, index: int) -> str:
        name = self._names.get(self._parameters[index], "")
        is_named = name and not name.startswith("allreduce.noname")
        return f"parameter {index} ('{name}')" if is_named else f"parameter {index}"

    def _lines_of(self, writes: Sequence[_Write]) -> list[str]:
        """Return lines that are the same on ranks which have written alike.

        Where memory is shared they have digests. Elsewhere ranks have different parts.
        """
        own = [write for write in writes if not write.is_same]
        tensors = [write.value for write in own if isinstance(write.value, Tensor)]
        digests = iter(digests_of(tensors).tolist() if self.is_shared and tensors else ())
        lines = []
        for write in own:
            index, key, value, _ = write
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

    def _tell_writes(
        self, optimizer: Optimizer, root: int | None = None
    ) -> tuple[list[_Write], dict[int, list[str]], list[int]]:
        """Exchange what the program has written. Collective.

        Returns:
            What it has written here, its description on each rank, and the ranks that have changed
            a divided state so that the root alone cannot tell the whole.

        Raises:
            InvalidArgumentError: on all ranks: one of them cannot divide a value.
        """
        writes: list[_Write] = []
        problem = ""
        try:
            writes = self._writes(optimizer)
        except ValueError as error:
            problem = str(error)
        if self._rank == root:
            is_partial = not all(map(self._is_whole, writes))
        else:
            is_partial = any(
                self._is_in_place(write) and write.number in self._part_of for write in writes
            )
        gathered = self._exchange((problem, self._lines_of(writes), is_partial))
        every = dict(zip(self._ranks, gathered, strict=True))
        for rank, (why, *_) in every.items():
            if why:
                self._refuse(problem or f"rank {rank} cannot divide the state: {why}")
        lines = {rank: told for rank, (_, told, _) in every.items()}
        return writes, lines, [rank for rank, (*_, partial) in every.items() if partial]

    def _agreed_writes(self, optimizer: Optimizer) -> list[_Write]:
        """Return what the program has written, alike on all ranks. Collective.

        Raises:
            InvalidArgumentError: on all ranks: one of them cannot divide a value.
            MismatchError: on all ranks: they have written differently.
        """
        writes, lines, _ = self._tell_writes(optimizer)
        self._require_alike(lines)
        return writes

    def _writes_of(self, optimizer: Optimizer, root: int) -> list[_Write]:
        """Return what the program has written, where only the root's writes count. Collective.

        Raises:
            InvalidArgumentError: on all ranks: one of them cannot divide a value, or has changed
                the only copy of its part.
        """
        writes, lines, partial = self._tell_writes(optimizer, root)
        if len(set(map(tuple, lines.values()))) == 1:
            return writes
        if partial:
            self._refuse(
                f"rank {partial[0]} has changed its part of the state, which no other rank has "
                "(shard_state=True divides the state here): change it on all ranks alike, or call "
                "load_state_dict() with a whole state"
            )
        return writes if self._rank == root else []

    def _is_in_place(self, write: _Write) -> bool:
        """Return whether the program has changed a tensor of a divided state in place."""
        index, key, value, _ = write
        return bool(key) and value is self._shown.get(self._parameters[index], {}).get(key)

    def _is_whole(self, write: _Write) -> bool:
        """Return whether a write to a divided state gives the whole value."""
        index, key, value, _ = write
        if not key or not isinstance(value, Tensor):
            return True
        has_all = index not in self._cut and value.numel() > 0
        is_like = value.numel() == 1 or value.shape == self._parameters[index].shape
        return not self._is_in_place(write) and (has_all or is_like)

    @torch.no_grad()
    def _take(self, optimizer: Optimizer, writes: Sequence[_Write]) -> None:
        """Take over what the program has written, alike on all ranks."""
        moved: dict[int, Tensor] = {}
        for index, key, value, is_same in writes:
            parameter, own = self._parameters[index], self._part_of.get(index)
            if not key:
                if own is not None and not is_same:
                    own[1].copy_(self._slice(value, own[0]))
                if not self.is_shared:
                    moved[index] = self._memories[index] = value
                elif parameter.data_ptr() != self._memories[index].data_ptr():
                    parameter.data = self._memories[index]
                continue
            shown = self._shown.setdefault(parameter, {})
            before = shown.get(key)
            if own is not None and not is_same:
                self._take_own(key, value, before, *own)
            if value is _GONE:
                del shown[key]
            elif not self.is_shared:
                shown[key] = value if value is before else self._visible(index, key, value)
            elif not isinstance(value, Tensor) or not self._has_twin(value, before):
                shown[key] = value  # a tensor: until _adopt()
            if not shown:
                del self._shown[parameter]
        for part, tensor in self._parts if moved else ():
            if part.parameter in moved:
                tensor.data = cut(moved[part.parameter], part)
        self._show(optimizer)

    def _take_own(self, key: str, value: Any, before: Any, part: Part, tensor: Tensor) -> None:
        """Take over a value that the program has written to the state of this rank's part."""
        state, known = self._state[tensor], self._known[tensor]
        if value is _GONE:
            del state[key]
            known.pop(key, None)
            if not state:
                del self._state[tensor]
            return
        if not isinstance(value, Tensor):
            state[key] = known[key] = value
        elif self.is_shared and self._has_twin(value, before):
            state[key].copy_(self._slice(value, part))
        elif value is not before:
            state[key] = self._slice(value, part).clone()
            if not self.is_shared:
                known[key] = state[key]

    def _warn_of_view(self, index: int) -> None:
        """Warn once of other tensors in the memory that the program has given to a parameter."""
        if not self._has_warned and _has_views(self._parameters[index]):
            self._has_warned = True
            self._warn_of_views([p for i, p in enumerate(self._parameters) if i != index])

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
        vars(stepped).update(vars(optimizer), param_groups=groups, state=self._state)
        failure: BaseException | None = None
        self._note_write(2 * self._steps_here + 1)
        try:
            if writes:
                self._take(optimizer, writes)
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
        if self.is_divided:
            self._note_versions()
        return loss

    def _groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return the groups with this rank's parts, and their gradients, as parameters."""
        groups = [{**group, "params": []} for group in optimizer.param_groups]
        group_of = [i for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        for part, tensor in self._mine:
            parameter = self._parameters[part.parameter]
            gradient = parameter.grad
            if gradient is not None:
                tensor.grad = self._slice(gradient, part)
            groups[group_of[part.parameter]]["params"].append(tensor)
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
        problem = self._problem(optimizer)
        writes: list[_Write] = []
        try:
            writes = [] if problem else self._writes(optimizer)
        except ValueError as error:
            problem = str(error)
        lines, written = self._lines(optimizer), self._lines_of(writes)
        digest = _digest(lines)
        has_moved = any(map(self._is_in_other_form, range(len(self._parameters))))
        who = self._rank if problem else 0
        in_groups = [0] * 2 * len(self._groups_of_ranks)
        for number, ranks in enumerate(self._groups_of_ranks):
            if self._rank in ranks:
                in_groups[2 * number] = _digest(written)
                in_groups[2 * number + 1] = _digest(written) ** 2
        here, problems, who, moved, digests, squares, *in_groups = self._sum(
            [1, bool(problem), who, has_moved, digest, digest * digest, *in_groups], "enter"
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
        if moved:
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
        is_new = any(self._is_new(tensor) for _, tensor in self._mine)
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
                for position, (part, tensor) in enumerate(self._parts)
            ]
            for work in works:
                work.wait()

    def _is_new(self, tensor: Tensor) -> bool:
        """Return whether the step has put values into the state of a part, or taken some out."""
        state, known = self._state.get(tensor, {}), self._known[tensor]
        return state.keys() != known.keys() or not all(
            _is_same(value, known[key]) for key, value in state.items()
        )

    def _adopt(self, optimizer: Optimizer) -> None:
        """Show all ranks the state that a step has made, if shared in shared memory. Collective."""
        changed = [(part, tensor) for part, tensor in self._mine if self._is_new(tensor)]
        told: list[tuple[int, list[Any]]] = []
        for part, tensor in changed:
            if part.begin == 0:
                items: list[Any] = []
                for key, value in self._state[tensor].items():
                    spec = self._spec_of_part(value, part) if isinstance(value, Tensor) else [value]
                    items.append([key, *spec])
                told.append((part.parameter, items))
        every = dict(zip(self._ranks, self._exchange(told), strict=True))
        new: list[tuple[int, str, Spec]] = []
        for index, items in sorted(each for rank in self._owners for each in every[rank]):
            parameter = self._parameters[index]
            before, shown = self._shown.pop(parameter, {}), {}
            for key, *spec in items:
                shown[key] = spec[0]
                if len(spec) > 1:
                    like = torch.empty(0, dtype=Spec(*spec).torch_dtype, device=parameter.device)
                    shown[key] = before.get(key) if self.is_shared else like
                    if not self.is_shared:
                        shown[key] = self._visible(index, key, like)
                    elif not self._is_at_home(shown[key], Spec(*spec)):
                        new.append((index, key, Spec(*spec)))
            if shown:
                self._shown[parameter] = shown
        if self.is_shared:
            made = self._segment([spec for *_, spec in new], self._owners[0], None)
            if made is None:
                raise RingError(
                    f"rank {self._rank}: no shared memory for the state of the optimizer"
                )
            for (index, key, _), home in zip(new, made, strict=True):
                self._shown[self._parameters[index]][key] = home.program
                self._homes[home.program.data_ptr()] = home
        for part, tensor in changed:
            state = self._state[tensor]
            for key, value in state.items():
                if self.is_shared and isinstance(value, Tensor):
                    shown_there = self._shown[self._parameters[part.parameter]]
                    state[key] = self._own(shown_there[key], part).copy_(value)
            self._known[tensor] = dict(state)
        self._show(optimizer)
        self._sum([0], "adopted")

    def _spec_of_part(self, value: Tensor, part: Part) -> Spec:
        """Return the spec of the whole tensor to which a part's tensor belongs."""
        like, spec = self._likes[part.parameter], Spec.of(value)
        is_part = value.shape == (like.shape if part.is_whole else (part.end - part.begin,))
        return Spec.of(like)._replace(dtype=spec.dtype) if is_part else spec

    def _is_at_home(self, value: Any, spec: Spec) -> bool:
        is_tensor = isinstance(value, Tensor)
        return is_tensor and value.data_ptr() in self._homes and Spec.of(value) == spec

    # --- the whole state

    @contextlib.contextmanager
    def whole(self, optimizer: Optimizer) -> Iterator[None]:
        """Context in which ``optimizer.state`` is whole. Collective, if state is divided."""
        if not self.is_divided:
            yield
            return
        writes = self._agreed_writes(optimizer)
        self._take(optimizer, [write for write in writes if write.key])
        self._collect(optimizer, to_cpu=True)
        try:
            yield
        finally:
            for parameter in self._parameters:  # state_dict() has the dicts
                optimizer.state.pop(parameter, None)
            self._show(optimizer)

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
        writes = [write for write in self._writes_of(optimizer, root) if write.key]
        whole = [write for write in writes if self._is_whole(write)]
        self._take(optimizer, writes)
        self._collect(optimizer)
        for index, key, value, _ in whole:
            optimizer.state.setdefault(self._parameters[index], {})[key] = value
            if value is _GONE:
                del optimizer.state[self._parameters[index]][key]
        try:
            yield
        finally:
            self._state.clear()
            self._shown, self._versions = {}, {}
            self._known = {tensor: {} for _, tensor in self._mine}

    def _collect(self, optimizer: Optimizer, *, to_cpu: bool = False) -> None:
        """Give ``optimizer.state`` the parts of all ranks. Collective.

        Args:
            optimizer: as for `place`.
            to_cpu: whether to put the state on the CPU rather than on the parts' device.
        """
        for parameter in self._parameters:
            optimizer.state.pop(parameter, None)
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
                state = optimizer.state.setdefault(parameter, {})
                if len(rest) == 1:
                    state[key] = rest[0]
                    continue
                is_cut, on_cpu, *described = rest
                spec = Spec(*described)
                device = torch.device("cpu") if on_cpu else parameter.device
                dtype = spec.torch_dtype
                if self._ranks[owner] == self._rank:
                    value = next(mine)
                else:
                    value = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=device)
                elements = flat(value)
                name = f"{self._name}.{self._count}.state.{owner}.{number}"
                self._engine.run("broadcast", elements, elements, name, owner)
                if to_cpu:
                    value = value.cpu()
                if is_cut:
                    if key not in state:
                        like = self._likes[index]
                        state[key] = torch.empty_strided(
                            like.shape, like.stride(), dtype=dtype, device=value.device
                        )
                    part = Part(index, begin, end, owner, is_whole)
                    cut(state[key], part).copy_(value)
                elif begin == 0:
                    state[key] = value.clone()
        self._count += 1


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
