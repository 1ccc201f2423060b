# SPDX-License-Identifier: Apache-2.0
"""shard_state=True: each rank steps a part of the parameters, which all ranks of its host see."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import namespaces
import pytest
import torch
from launcher_commands import output_of, start_program
from logs import logged
from optimizer_writes import WRITES
from pool import DEADLINE_S, all_have_passed, error_of, eventually, expect_error, has_asked, run
from ports import free_port
from scripts import ROOT
from slow import on_shm_and_slowly_on_tcp
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from training import assert_same_on_all_ranks, joined_batches, loss_of, part
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring import checkpoint
from torch_ring.optimizer.host_memory import Segment
from torch_ring.optimizer.shard_parts import plan_parts

OPTIM = torch.optim
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adam": partial(Adam, lr=0.01, amsgrad=True),
    "fused": partial(Adam, lr=0.01, fused=True),
    "foreach": partial(OPTIM.AdamW, lr=0.01, foreach=True),
    "rmsprop": partial(OPTIM.RMSprop, momentum=0.5, centered=True),
    "adagrad": OPTIM.Adagrad,
    "adadelta": OPTIM.Adadelta,
    "adamax": OPTIM.Adamax,
    "asgd": OPTIM.ASGD,
    "nadam": OPTIM.NAdam,
    "radam": OPTIM.RAdam,
    "rprop": OPTIM.Rprop,
    "adafactor": OPTIM.Adafactor,
    "muon": OPTIM.Muon,
}
Parameters = Sequence[nn.Parameter]


def make_model(maker: str = "adam", seed: int = 1) -> Any:
    """Return a net with a weight that is cut, small weights, and one in another memory format."""
    torch.manual_seed(seed)
    bias = maker != "muon"  # which takes matrices only
    layers = [nn.Linear(*shape, bias=bias) for shape in ((8, 100), (100, 77), (77, 3))]
    if maker != "fused":  # not for strides of a transposed weight
        layers[1].weight.data = layers[1].weight.data.t().contiguous().t()
    return nn.Sequential(layers[0], nn.Tanh(), *layers[1:])


def plain(model: nn.Module, maker: str = "adam", **more: Any) -> Any:
    return hvd.DistributedOptimizer(MAKERS[maker](model.parameters()), **more)


def sharded(model: nn.Module, maker: str = "adam", **more: Any) -> Any:
    optimizer = MAKERS[maker](model.parameters())
    assert hvd.DistributedOptimizer(optimizer, shard_state=True, **more) is optimizer
    return optimizer


def step(model: nn.Module, optimizer: Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, part(batch)).backward()
    optimizer.step()


def trained(**more: Any) -> tuple[Any, Any]:
    """Return a model and its optimizer after a step."""
    model = make_model()
    optimizer = sharded(model, **more)
    step(model, optimizer, joined_batches(1)[0])
    return model, optimizer


def with_gradients() -> tuple[Any, Any]:
    """Return a model and its optimizer before the second step."""
    model, optimizer = trained()
    loss_of(model, part(joined_batches(1)[0])).backward()
    return model, optimizer


def assert_equal(model: nn.Module, other: nn.Module, where: str = "") -> None:
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), (where, name)


def assert_equal_states(state: dict[str, Any], other: dict[str, Any], where: str = "") -> None:
    """Compare two results of state_dict() bit by bit."""
    assert state["param_groups"] == other["param_groups"], where
    assert state["state"].keys() == other["state"].keys(), where
    for index, values in other["state"].items():
        assert list(state["state"][index]) == list(values), where
        for key, value in values.items():
            found = state["state"][index][key]
            assert found.shape == value.shape, (where, index, key)
            assert torch.equal(found, value), (where, index, key)


# --- programs beside an unsharded optimizer


def set_rate(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (number + 1)


def add_group(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    if number == 2:
        torch.manual_seed(5)
        added = nn.Linear(50, 60)
        optimizer.zero_grad()
        optimizer.add_param_group({"params": added.parameters(), "lr": 0.3})
        (added(torch.ones(1, 50)).sum() * (hvd.rank() + 1)).backward()


def reload_own(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    if number in (1, 3):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def reload_of_root(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    if number in (1, 3):
        hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)


def lack_gradients(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    """The first layer has no gradients in the first steps, the last one none in the second."""
    for parameter in parameters[:2] if number < 2 else ():
        parameter.grad = None
    for parameter in parameters[4:] if number == 1 else ():
        parameter.grad = None


def increase_momentum(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["momentum"] = 0.0 if number < 2 else 0.9


def restride(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    """Give matrices another memory format, whose state is cut."""
    for parameter in parameters if number == 2 else ():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().clone(memory_format=torch.contiguous_format).t()


PROGRAMS: dict[str, tuple[str, Callable[[], Any]]] = {
    **WRITES,
    **{
        f"{each.__name__} {maker}": (maker, lambda each=each: each)
        for each in (set_rate, add_group, reload_own, reload_of_root, lack_gradients, restride)
        for maker in ("sgd", "adam")
    },
    "increase_momentum": ("sgd", lambda: increase_momentum),
}
PLAIN = {maker: (maker, lambda: lambda *_: None) for maker in MAKERS}


def train_beside_unsharded(names: Sequence[str], **options: Any) -> None:
    """Compare with an unsharded optimizer beside which the program does the same."""
    for name in names:
        maker, make = (PROGRAMS | PLAIN)[name]
        models, does = (make_model(maker), make_model(maker)), (make(), make())
        optimizers = plain(models[0], maker, **options), sharded(models[1], maker, **options)
        for number, batch in enumerate(joined_batches(5)):
            for model, optimizer, do in zip(models, optimizers, does, strict=True):
                optimizer.zero_grad()
                loss_of(model, part(batch)).backward()
                do(number, list(model.parameters()), optimizer)
                optimizer.step()
            assert_equal(models[1], models[0], f"{name}, step {number}")
        process_set = options.get("process_set", hvd.global_process_set)
        is_one_of_several = hvd.size() > 1 and process_set.included()
        assert optimizers[1]._shards.is_active == is_one_of_several
        states = [optimizer.state_dict() for optimizer in optimizers]
        assert_equal_states(states[1], states[0], name)
        if not options:
            assert_same_on_all_ranks(*models[1].parameters())


@pytest.mark.parametrize(("transport", "size"), [("shm", 1), ("shm", 4), ("tcp", 2)])
def test_bits_are_those_of_an_unsharded_optimizer(transport: str, size: int) -> None:
    """Of all optimizers of torch that step each tensor by itself."""
    run(train_beside_unsharded, size, args=(list(MAKERS),), transport=transport)


@on_shm_and_slowly_on_tcp
def test_what_a_program_does_counts_as_without(transport: str) -> None:
    env = {"TORCH_RING_CHECK_EVERY": "1"}
    run(
        train_beside_unsharded,
        3,
        args=(list(PROGRAMS),),
        transport=transport,
        env=env,
        deadline_s=3 * DEADLINE_S,
    )


def train_in_a_set() -> None:
    train_beside_unsharded(["adam"], process_set=hvd.add_process_set([0, 2]))


@on_both_transports
def test_process_sets(transport: str) -> None:
    run(train_in_a_set, 3, transport=transport)


def train_on_hosts() -> tuple[bool, list[int]]:
    hvd.init()
    train_beside_unsharded(["adam", *WRITES])
    shards = trained()[1]._shards
    found = shards.is_shared, list(shards._owners)
    hvd.shutdown()
    return found


@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` (iproute2)")
@pytest.mark.slow
def test_each_host_has_a_whole_copy(hosts: list[str]) -> None:
    found = run(
        train_on_hosts,
        4,
        initialized=False,
        transport="",
        env={"MASTER_ADDR": f"{namespaces.NETWORK}.1", "MASTER_PORT": "29513"},
        namespaces=[hosts[host] for host in (0, 0, 1, 2)],
        deadline_s=3 * DEADLINE_S,
    )
    assert found == [(True, [0, 1]), (True, [0, 1]), (True, [2]), (True, [3])]


def share_nothing() -> None:
    """A rank cannot open the memory of another one: all go on without shared memory."""
    make = Segment.open
    if hvd.rank() == 2:
        Segment.open = staticmethod(lambda offer: make((1, 10_000, offer[2])))
    train_beside_unsharded(["adam", "add_group adam"])
    assert not sharded(make_model())._shards.is_shared
    Segment.open = staticmethod(make)


def test_ranks_that_cannot_share_memory_divide_the_state_all_the_same() -> None:
    run(share_nothing, 3)


# --- the parts


@pytest.mark.parametrize("may_cut", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_parts_are_balanced_and_cover_all(ranks: int, may_cut: bool) -> None:
    sizes = [(3, 4), (1_000_000, 4), (0, 4), (50_000, 2), (400_000, 8), *[(5_000, 4)] * 30]
    parts = plan_parts(sizes, ranks, may_cut=may_cut)
    for index, (numel, _) in enumerate(sizes):
        mine = [each for each in parts if each.parameter == index]
        edges = [0, *(each.end for each in mine)]
        assert [each.begin for each in mine] == edges[:-1]
        assert edges[-1] == numel
        assert all(each.is_whole for each in mine) == (len(mine) == 1)
        assert may_cut or len(mine) == 1
        assert all(each.begin % 1024 == 0 for each in mine)
    loads = [
        sum((p.end - p.begin) * sizes[p.parameter][1] for p in parts if p.owner == rank)
        for rank in range(ranks)
    ]
    assert [p.owner for p in parts] == sorted(p.owner for p in parts)
    if may_cut:
        fair = sum(loads) / ranks
        assert max(loads) <= fair * (1 + 1 / 16) + 2 * 1024 * 8


def test_small_tensors_are_not_cut() -> None:
    """The border between two ranks' fair parts lies in the small one."""
    parts = plan_parts([(300_000, 4), (4_000, 4), (300_000, 4)], 2, may_cut=True)
    assert [(p.parameter, p.begin, p.owner) for p in parts] == [(0, 0, 0), (1, 0, 1), (2, 0, 1)]


def look_at_memory() -> None:
    """The parts' states add up to the whole state; a rank's writes are its own until a step."""
    model, optimizer = trained()
    shards = optimizer._shards
    own = sum(part.end - part.begin for part, _ in shards._mine.values())
    every = hvd.allgather(torch.tensor([own])).tolist()
    assert sum(every) == sum(p.numel() for p in model.parameters())
    assert max(every) < sum(every) / hvd.size() * 1.3
    assert shards._state.keys() == {tensor for _, tensor in shards._mine.values()}
    parameter = model[2].weight
    exp_avg = optimizer.state[parameter]["exp_avg"]
    if hvd.rank() == 1:
        with torch.no_grad():
            parameter.fill_(7.0)
            exp_avg.fill_(3.0)
    hvd.barrier()
    assert (parameter == 7.0).all() == (hvd.rank() == 1)
    assert (exp_avg == 3.0).all() == (hvd.rank() == 1)
    assert parameter.untyped_storage().nbytes() == parameter.nbytes  # torch.save() saves it all


def look_at_divided_state() -> None:
    model, optimizer = trained()
    shards = optimizer._shards
    whole = optimizer.state_dict()["state"]
    for index, parameter in enumerate(model.parameters()):
        state = optimizer.state[parameter]
        assert list(state) == list(whole[index])
        part, _ = shards._mine.get(index, (None, None))
        for key, value in state.items():
            expected = whole[index][key]
            if part is None:
                assert value.numel() == 0, (index, key)
            elif not part.is_whole and expected.shape == parameter.shape:
                memory = expected.as_strided((expected.numel(),), (1,))
                assert torch.equal(value, memory[part.begin : part.end]), (index, key)
                for use in (lambda v=value: v[0], lambda v=value: v.__setitem__(0, 1.0)):
                    expect_error("InvalidArgumentError", "has no rows", use)
            else:
                assert torch.equal(value, expected), (index, key)
    assert shards._state.keys() == {tensor for _, tensor in shards._mine.values()}
    text = "copy its state_dict(), on all"
    expect_error("InvalidArgumentError", text, lambda: copy.deepcopy(optimizer))
    text = "only where the ranks of a host share memory"
    expect_error("ValueError", text, lambda: hvd.elastic.TorchState(model, optimizer))


def test_without_shared_memory_each_rank_has_the_state_of_its_part() -> None:
    run(look_at_divided_state, 2, transport="tcp")


def copy_and_average() -> None:
    """Copies have memory of their own: EMA and deepcopy of model and optimizer."""
    model = make_model()
    optimizer = sharded(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    step(model, optimizer, joined_batches(1)[0])
    average.update_parameters(model)
    copied = copy.deepcopy(model)
    state = copy.deepcopy(optimizer).state_dict()
    assert_equal_states(state, optimizer.state_dict())
    with torch.no_grad():
        model[2].weight.zero_()
        optimizer.state[model[2].weight]["exp_avg"].zero_()
    assert copied[2].weight.any()
    assert average.module[2].weight.any()
    assert state["state"][2]["exp_avg"].any()


def save_and_load(path: str) -> None:
    """Training continues exactly: from a checkpoint, and as in Horovod, from rank 0's state."""
    batches = joined_batches(4)
    model, reference = make_model(), make_model()
    optimizer, other = sharded(model), plain(reference)
    for batch in batches[:2]:
        step(model, optimizer, batch)
        step(reference, other, batch)
    state = optimizer.state_dict(root_rank=1)
    assert bool(state["state"]) == (hvd.rank() == 1)
    checkpoint.save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    saved = checkpoint.load(path)
    assert_equal_states(saved["optimizer"], other.state_dict())
    resumed, fresh, told = (make_model(seed=seed) for seed in (9, 8, 3))
    told_by = sharded(told)
    step(told, told_by, batches[0])
    for each in (resumed, fresh, *([told] if hvd.rank() == 0 else [])):
        each.load_state_dict(saved["model"])
    resumed_by = sharded(resumed)
    resumed_by.load_state_dict(saved["optimizer"])
    fresh_by = MAKERS["adam"](fresh.parameters())
    fresh_by.load_state_dict(copy.deepcopy(saved["optimizer"]))
    hvd.DistributedOptimizer(fresh_by, shard_state=True)  # with a state
    if hvd.rank() == 0:
        told_by.load_state_dict(copy.deepcopy(saved["optimizer"]))
    hvd.broadcast_parameters(told.state_dict(), 0)
    hvd.broadcast_optimizer_state(told_by, 0)
    every = {"resumed": (resumed, resumed_by), "fresh": (fresh, fresh_by), "told": (told, told_by)}
    for batch in batches[2:]:
        step(reference, other, batch)
        for name, (each, by) in every.items():
            step(each, by, batch)
            assert_equal(each, reference, name)
    assert_equal_states(told_by.state_dict(), other.state_dict())


@on_both_transports
def test_checkpoints_are_those_of_an_unsharded_optimizer(transport: str, tmp_path: Path) -> None:
    run(save_and_load, 3, args=(str(tmp_path / "checkpoint.pt"),), transport=transport)


def read_late(folder: str) -> None:
    """Rank 0 reads the parameters, in a hook of its step, while rank 1 waits to write its part."""
    model, optimizer = trained()
    waits = Path(folder) / "rank 1 waits"
    before = [parameter.detach().clone() for parameter in model.parameters()]
    seen = []

    def look(*_: object) -> None:
        assert eventually(waits.exists)
        seen.extend(map(torch.equal, before, model.parameters()))

    def watch() -> None:
        assert eventually(has_asked)
        waits.touch()

    optimizer.zero_grad()
    loss_of(model, part(joined_batches(1)[0])).backward()
    if hvd.rank() == 0:
        optimizer.register_step_pre_hook(look)
        optimizer.step()
        assert seen == [True] * len(before)
    else:
        thread = threading.Thread(target=watch)
        thread.start()
        optimizer.step()
        thread.join()
    assert not any(map(torch.equal, before, model.parameters()))


def test_no_rank_writes_while_another_may_read(tmp_path: Path) -> None:
    run(read_late, 2, args=(str(tmp_path),))


def warn() -> None:
    """Rank 0 warns of views of parameters."""
    model, flat = make_model(), nn.Parameter(torch.zeros(3000))
    views = [flat.detach()[:5]]
    optimizer = MAKERS["adam"]([*model.parameters(), flat])
    where = "other tensors lie where parameters [6] of the optimizer do"
    with logged() as log:
        optimizer = hvd.DistributedOptimizer(optimizer, shard_state=True)
    assert (where in " ".join(log)) == (hvd.rank() == 0), log
    assert len(views[0]) == 5
    model[0].weight.data = model[0].weight.data * 0.5
    model[2].weight.data = model[2].weight.data.contiguous()
    with logged() as log:
        step(model, optimizer, joined_batches(1)[0])
    assert not log
    memory = torch.zeros(3001)
    flat.data = memory[1:]
    with logged() as log:
        step(model, optimizer, joined_batches(1)[0])
    assert (where in " ".join(log)) == (hvd.rank() == 0), log


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Batches that a model makes in the workers of a DataLoader."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.model[2].weight.detach().clone()


def load_in_workers() -> None:
    model, optimizer = trained()
    for start in ("fork", "forkserver"):
        loader = torch.utils.data.DataLoader(
            Numbers(model), 1, num_workers=1, multiprocessing_context=start
        )
        for batch in loader:
            assert torch.equal(batch[0], model[2].weight)
        step(model, optimizer, joined_batches(1)[0])  # the next workers see the new weights
    assert not any("sharded" in name for name in os.listdir("/dev/shm"))


@pytest.mark.parametrize("look", [look_at_memory, copy_and_average, warn, load_in_workers])
def test_parameters_and_state_are_there_once_a_host(look: Callable[[], None]) -> None:
    run(look, 2, deadline_s=3 * DEADLINE_S)  # a rank's worker imports torch


# --- errors


class Own(SGD):
    """An optimizer not known to be elementwise."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Renamed(SGD):
    """An optimizer that steps as SGD does."""


def refuse_optimizers() -> None:
    cases: list[tuple[Callable[..., Optimizer], dict[str, Any], str]] = [
        (torch.optim.LBFGS, {}, "LBFGS is none of the optimizers that step each tensor"),
        (lambda p: torch.optim.SparseAdam(list(p)), {}, "SparseAdam is none of the optimizers"),
        (partial(Own, lr=0.1), {}, "Own is none of the optimizers that step each tensor"),
        (partial(Adam, differentiable=True), {}, "a step of differentiable=True"),
        (Adam, {"op": hvd.Adasum}, "shard_state=True does not go with op=Adasum"),
    ]
    for make, options, text in cases:
        optimizer = make(make_model().parameters())
        call = partial(hvd.DistributedOptimizer, optimizer, shard_state=True, **options)
        expect_error("ValueError", text, call)
        hvd.DistributedOptimizer(optimizer)  # it is unchanged
    model = make_model()
    model[2].weight.data = torch.zeros(1, 100).expand(77, 100)
    expect_error("ValueError", "which do not fill its memory", partial(sharded, model))
    hvd.DistributedOptimizer(Renamed(make_model().parameters(), lr=0.1), shard_state=True)
    make = (sharded, plain)[hvd.rank()]
    expect_error("MismatchError", "shard_state=True; rank 1", lambda: make(make_model()))


@on_both_transports
def test_wrong_arguments_are_refused_before_anything_is_sent(transport: str) -> None:
    run(refuse_optimizers, 2, transport=transport)


def refuse_steps() -> None:
    """Ranks that step differently cause an error on all ranks, and no parameter changes."""
    model, optimizer = with_gradients()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def refused(kind: str, text: str) -> None:
        expect_error(kind, text, optimizer.step)
        assert all(map(torch.equal, model.parameters(), before))

    optimizer.param_groups[0]["lr"] = 0.01 + hvd.rank()
    refused("MismatchError", "the ranks step differently: rank 0: 'lr' of group 0 is 0.01; rank 1")
    optimizer.param_groups[0]["lr"] = 0.01
    kept = model[0].bias.grad
    if hvd.rank() == 1:
        model[0].bias.grad = None
    refused("MismatchError", "rank 1: parameters [1] of the optimizer have no gradient")
    model[0].bias.grad = kept
    if hvd.rank() == 1:
        model[0].bias.grad = kept.to_sparse()
    refused("InvalidArgumentError", "is sparse" if hvd.rank() == 1 else "rank 1 cannot step")
    model[0].bias.grad = kept
    own = optimizer.param_groups[0]["params"]
    if hvd.rank():
        optimizer.param_groups[0]["params"] = own[1:]
    refused("InvalidArgumentError", "moved" if hvd.rank() else "2 ranks cannot step")
    optimizer.param_groups[0]["params"] = own
    if hvd.rank() == 1:
        optimizer.load_state_dict(copy.deepcopy(MAKERS["adam"](model.parameters()).state_dict()))
    refused("MismatchError", "'step' of parameter 0 in optimizer.state is taken out")


def convert_differently() -> None:
    """The ranks give a weight other strides."""
    model = make_model()
    optimizer = sharded(model)
    loss_of(model, part(joined_batches(1)[0])).backward()
    weight = model[2].weight
    weight.data = weight.data.clone() if hvd.rank() else weight.data.clone().contiguous()
    kind, text = error_of(optimizer.step)
    told = {
        "MismatchError": "ranks 0 and 1 have parameters of other shapes, strides or dtypes now",
        "InvalidArgumentError": "1 of 3 ranks have given parameters other memory",
    }
    assert told[kind] in text, text


def fail_on_one_rank() -> None:
    _, optimizer = with_gradients()
    if hvd.rank() == 1:
        for state in optimizer._shards._state.values():
            state["exp_avg"] = "no tensor"
        with pytest.raises((AttributeError, TypeError)):
            optimizer.step()
    else:
        expect_error("RingError", "1 other ranks have failed to step their parts", optimizer.step)


def join_early() -> None:
    """A rank that has joined cannot step its part."""
    model, optimizer = trained()
    if hvd.rank() < 2:
        loss_of(model, part(joined_batches(1)[0])).backward()
        expect_error("InvalidArgumentError", "1 ranks have called join()", optimizer.step)
    hvd.join()


@pytest.mark.parametrize("case", [refuse_steps, convert_differently, fail_on_one_rank, join_early])
@on_both_transports
def test_a_step_that_fails_on_one_rank_fails_on_all(
    transport: str, case: Callable[[], None]
) -> None:
    run(case, 3, transport=transport)


def die_in_a_step(place: str, passed: Path) -> str:
    """Rank 1 dies before or after it has stepped its part: the others get an error."""
    _, optimizer = with_gradients()
    all_have_passed(passed, hvd.size())
    if hvd.rank() == 1:
        setattr(optimizer._shards, place, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    text = expect_error("PeerLostError", "rank 1", optimizer.step)
    hvd.shutdown()
    return text


@pytest.mark.parametrize(("place", "transport"), [("_enter", "shm"), ("_leave", "tcp")])
def test_a_rank_that_dies_in_a_step_is_named(transport: str, place: str, tmp_path: Path) -> None:
    found = run(die_in_a_step, 3, args=(place, tmp_path), transport=transport, may_die=[1])
    assert found[0]
    assert found[2]


def write_on_one_rank() -> None:
    """One rank writes alone: an error on all ranks, no step, and the cure works."""
    models = make_model(), make_model()
    optimizer, other = sharded(models[1]), plain(models[0])
    parameters, batches = list(models[1].parameters()), iter(joined_batches(20))
    parameter, is_shared = parameters[2], optimizer._shards.is_shared

    def replaced() -> None:
        state = optimizer.state[parameter]
        state["exp_avg"] = torch.ones_like(state["exp_avg"])

    def in_place() -> None:
        optimizer.state[parameter]["exp_avg"].add_(1)

    writes: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: optimizer.state.pop(parameter),
            "'step' of parameter 2 in optimizer.state is taken out",
        ),
        (
            lambda: optimizer.state[parameter].pop("exp_avg"),
            "'exp_avg' of parameter 2 in optimizer.state is taken out",
        ),
        (replaced, "'exp_avg' of parameter 2 in optimizer.state is written"),
    ]
    if is_shared:  # elsewhere each rank has weights of its own
        writes += [
            (in_place, "'exp_avg' of parameter 2 in optimizer.state is written"),
            (lambda: parameter.data.mul_(0.5), "parameter 2 is written"),
            (lambda: setattr(parameter, "data", parameter * 0.5), "parameter 2 is written"),
        ]
    batch = next(batches)
    for model, by in zip(models, (other, optimizer), strict=True):
        step(model, by, batch)
    for write, text in writes:
        before = [parameter.detach().clone() for parameter in parameters]
        batch = next(batches)
        optimizer.zero_grad()
        loss_of(models[1], part(batch)).backward()
        if hvd.rank() == 1:
            write()
        message = expect_error("MismatchError", text, optimizer.step)
        assert "rank 0: nothing more; rank 1: " in message, message
        assert "write the same on all of them" in message
        if hvd.rank() == 0:
            assert all(map(torch.equal, before, parameters))
        hvd.broadcast_parameters(models[1].state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        optimizer.step()
        step(models[0], other, batch)
        assert_equal(models[1], models[0])
    saved = optimizer.state_dict()
    assert_equal_states(saved, other.state_dict())
    if is_shared:
        return
    if hvd.rank() == 1:
        in_place()
    optimizer.zero_grad()
    loss_of(models[1], part(batch)).backward()
    text = "'exp_avg' of parameter 2 in optimizer.state is changed in place"
    expect_error("MismatchError", text, optimizer.step)
    text = "rank 1 has changed its part of the state, which no other"
    broadcast = partial(hvd.broadcast_optimizer_state, optimizer, 0)
    expect_error("InvalidArgumentError", text, broadcast)
    optimizer.load_state_dict(saved)
    optimizer.step()
    step(models[0], other, batch)
    assert_equal(models[1], models[0])


@on_both_transports
def test_a_write_of_one_rank_is_an_error_on_all(transport: str) -> None:
    run(write_on_one_rank, 3, transport=transport)


def compile_step() -> None:
    models = make_model(), make_model()
    optimizers = plain(models[0]), sharded(models[1])
    steps = optimizers[0].step, torch.compile(lambda: optimizers[1].step(), backend="eager")
    for batch in joined_batches(3):
        for model, optimizer, take in zip(models, optimizers, steps, strict=True):
            optimizer.zero_grad()
            loss_of(model, part(batch)).backward()
            take()
        assert_equal(models[1], models[0])


def put_what_cannot_be_divided() -> None:
    model, optimizer = with_gradients()
    if hvd.rank() == 0:
        optimizer.state[model[2].weight]["exp_avg"] = torch.zeros(7, 7)
    own = "optimizer.state has a tensor of shape [7, 7] as 'exp_avg' of parameter 2"
    text = own if hvd.rank() == 0 else "rank 0 cannot"
    for use in (optimizer.step, optimizer.state_dict):
        expect_error("InvalidArgumentError", text, use)


def test_a_value_that_cannot_be_divided_is_an_error_on_all_ranks() -> None:
    run(put_what_cannot_be_divided, 2, transport="tcp")


def have_no_page_table() -> None:
    """Without /proc/self/pagemap all pages are compared."""
    opened = os.open

    def open_other(path: Any, *args: Any, **more: Any) -> int:
        if path == "/proc/self/pagemap":
            raise PermissionError(path)
        return opened(path, *args, **more)

    os.open = open_other  # type: ignore[assignment]
    try:
        train_beside_unsharded(["multiply", "zero adam", "Average"])
    finally:
        os.open = opened


@pytest.mark.parametrize("case", [compile_step, have_no_page_table])
def test_unusual_surroundings(case: Callable[[], None]) -> None:
    run(case, 2, deadline_s=3 * DEADLINE_S)


# --- ranks of a launcher, each of which orders a set of texts in its own way

BEGUN_ANEW = """
import torch, torch_ring as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(3)])
adam = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(adam, model.named_parameters(), shard_state=True)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    if step == 0:
        optimizer.state.clear()
    with torch.no_grad():
        [parameter.mul_(0.5) for parameter in model.parameters()]
hvd.shutdown()
"""


@pytest.mark.launcher
def test_ranks_whose_sets_have_another_order():
    port = str(free_port())
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        start_program(
            [sys.executable, "-c", BEGUN_ANEW],
            **address,
            RANK=str(rank),
            PYTHONHASHSEED=str(rank + 1),
            PYTHONPATH=str(ROOT),
        )
        for rank in range(2)
    ]
    outputs = [output_of(rank) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
