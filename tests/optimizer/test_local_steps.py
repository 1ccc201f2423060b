# SPDX-License-Identifier: Apache-2.0
"""LocalSGD and DiLoCo: quadratic losses, whose parameters follow from a formula on one process."""

import copy
from collections.abc import Collection, Sequence
from functools import partial

import pytest
import torch
from logs import logged, told
from on_ranks import on_ranks
from pool import expect_error, run
from torch.optim import SGD
from training import assert_same_on_all_ranks, take_step, weights
from worlds import on_both_transports

import torch_ring as hvd

RATE, TARGETS, SIZES = 0.125, (1.0, -2.0, 3.0, 0.5), (3, 2, 5, 1, 4)
FRAGMENTS = {1: [[0, 1, 2, 3, 4]], 2: [[0, 1, 2], [3, 4]], 3: [[0, 1], [2], [3, 4]]}
NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def shaped_weights() -> list[torch.nn.Parameter]:
    """Return parameters of several sizes, the same on all ranks."""
    return [torch.nn.Parameter(torch.arange(n, dtype=torch.float64) / 4 + n) for n in SIZES]


class Model:
    """All ranks of DiLoCo on one process, by the papers' formulas."""

    def __init__(
        self, targets: Sequence[float], every: int, fragments: int, delay: int, outer: dict
    ) -> None:
        self.targets = targets
        self.ranks = [[p.detach().clone() for p in shaped_weights()] for _ in targets]
        self.agreed = [p.detach().clone() for p in shaped_weights()]
        self.velocity = [torch.zeros_like(p) for p in self.agreed]
        self.outer, self.every, self.delay = outer, every, delay
        self.parts = FRAGMENTS[fragments]
        self.on_their_way: dict[int, tuple[int, list, list]] = {}
        self.steps = 0

    def step(self, skipping: Collection[int] = ()) -> None:
        for rank, (own, target) in enumerate(zip(self.ranks, self.targets, strict=True)):
            for parameter in own if rank not in skipping else ():
                parameter -= RATE * (parameter - target)
        self.steps += 1
        for number, part in enumerate(self.parts):
            if number in self.on_their_way and self.on_their_way[number][0] == self.steps:
                self.end(number)
            if self.steps % self.every == self.every * (number + 1) // len(self.parts) % self.every:
                sent = [[own[i].clone() for i in part] for own in self.ranks]
                mean = [
                    sum(self.agreed[i] - s[k] for s in sent) / len(sent) for k, i in enumerate(part)
                ]
                self.on_their_way[number] = (self.steps + self.delay, mean, sent)
                if not self.delay:
                    self.end(number)

    def end(self, number: int) -> None:
        _, mean, sent = self.on_their_way.pop(number)
        momentum, rate = self.outer.get("momentum", 0), self.outer["lr"]
        for k, i in enumerate(self.parts[number]):
            self.velocity[i] = momentum * self.velocity[i] + mean[k]
            nesterov = self.outer.get("nesterov", False)
            change = mean[k] + momentum * self.velocity[i] if nesterov else self.velocity[i]
            self.agreed[i] = self.agreed[i] - rate * change
            for own, before in zip(self.ranks, sent, strict=True):
                own[i] += self.agreed[i] - before[k]

    def assert_as(self, parameters, rank: int, where: str = "") -> None:
        for ours, expected in zip(parameters, self.ranks[rank], strict=True):
            torch.testing.assert_close(
                ours.detach(), expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{where}: {text}"
            )


def loss_of(parameters) -> torch.Tensor:
    return sum((p - TARGETS[hvd.rank()]).square().sum() / 2 for p in parameters)


def take_steps(parameters, optimizer, count: int = 1) -> None:
    for _ in range(count):
        take_step(optimizer, loss_of(parameters))


def step_with(optimizer, *gradients: float) -> None:
    """Take a step with gradients of the first parameters, each filled with a number."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, gradient in zip(parameters, gradients, strict=False):
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()


def agreed_by(optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.outer.param_groups for p in group["params"]]


@pytest.mark.parametrize(("transport", "size"), [("shm", 1), ("shm", 4), ("tcp", 3)])
@on_ranks()
def test_parameters_are_those_of_the_papers(transport, size) -> None:
    """LocalSGD averages parameters, which is an outer step at the rate 1."""
    for every, fragments, delay, outer in (
        (1, 1, 0, "LocalSGD"),
        (3, 1, 0, "LocalSGD"),
        (4, 1, 0, None),
        (4, 2, 0, {"lr": 0.5, "momentum": 0.5}),
        (4, 1, 3, None),
        (5, 3, 2, None),
    ):
        by_papers = {"lr": 1.0} if outer == "LocalSGD" else outer or NESTEROV
        model = Model(TARGETS[: hvd.size()], every, fragments, delay, by_papers)
        parameters = shaped_weights()
        optimizer = SGD(parameters, lr=RATE)
        if outer == "LocalSGD":
            assert hvd.LocalSGD(optimizer, every=every) is optimizer
        else:
            options = {"every": every, "fragments": fragments, "delay": delay}
            assert hvd.DiLoCo(optimizer, outer_options=outer, **options) is optimizer
        for number in range(3 * every + 2):
            if number == 2 * every and not delay and optimizer.outer is not None:  # a schedule
                optimizer.outer.param_groups[0]["lr"] /= 2
                model.outer = {**model.outer, "lr": model.outer["lr"] / 2}
            take_steps(parameters, optimizer)
            model.step()
            model.assert_as(parameters, hvd.rank(), f"{every, fragments, delay, outer}")
        optimizer.end_round()
        if not delay:
            assert_same_on_all_ranks(*parameters)


@pytest.mark.parametrize(
    ("fused", "delay", "overflow"), [(False, 2, False), (False, 0, True), (True, 2, True)]
)
@on_ranks(4)
def test_gradients_inside_hosts_and_rounds_between_them(
    fused: bool, delay: int, overflow: bool
) -> None:
    """Two hosts of two ranks: gradients in each, DiLoCo between them.

    A scaler skips the step of a host if one of its ranks has an infinite gradient.
    """
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [2, 3], [0, 2])]
    infinite = {(1, 0), (1, 2), (2, 2), (3, 4), (0, 5), (0, 7), (3, 7)}  # rank, step
    infinite = infinite if overflow else set()
    parameters = shaped_weights()
    inner = SGD(parameters, lr=RATE, fused=fused)
    optimizer = hvd.DiLoCo(
        hvd.DistributedOptimizer(inner, process_set=sets[hvd.rank() // 2]),
        every=3,
        delay=delay,
        process_set=sets[2],
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    # The gradient of a host points to the mean of its targets.
    hosts = [(TARGETS[0] + TARGETS[1]) / 2, (TARGETS[2] + TARGETS[3]) / 2]
    model = Model(hosts, 3, 1, delay, NESTEROV)
    for step in range(11):
        optimizer.zero_grad()
        factor = torch.inf if (hvd.rank(), step) in infinite else 1.0
        scaler.scale(loss_of(parameters) * factor).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        model.step(skipping={rank // 2 for rank, at in infinite if at == step})
        model.assert_as(parameters, hvd.rank() // 2)
    optimizer.end_round()
    if not delay:
        assert_same_on_all_ranks(*parameters)


def compress_in_ways() -> None:
    end = torch.outer(torch.arange(6.0), torch.ones(6))
    expected = end * (1 + hvd.size()) / 2
    for compression in (hvd.Compression.bf16, hvd.Compression.int8(4), hvd.Compression.powersgd(1)):
        matrix = torch.nn.Parameter(torch.zeros(6, 6))
        optimizer = hvd.DiLoCo(
            SGD([matrix], lr=0.5),
            outer_options={"lr": 1.0},
            every=2,
            delay=1,
            compression=compression,
        )
        for _ in range(30):
            matrix.grad = matrix.detach() - end * (1 + hvd.rank())
            optimizer.step()
        optimizer.end_round()
        (agreed,) = agreed_by(optimizer)
        assert_same_on_all_ranks(agreed)
        assert (agreed - expected).abs().max() < 0.05 * expected.max()


def freeze_and_add() -> None:
    """Frozen parameters stay, and added ones take part, though a mean is on its way."""
    base, adapter, later = (torch.nn.Parameter(torch.full((n,), 1.0)) for n in (1000, 2, 3))
    base.requires_grad_(False)
    optimizer = hvd.DiLoCo(
        SGD([adapter, base], lr=0.5), outer_options={"lr": 1.0}, every=2, delay=1
    )
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": [later], "lr": 0.25})
        later.grad = torch.full_like(later, 1.0 + hvd.rank())
        step_with(optimizer, 1.0 + hvd.rank())
    optimizer.end_round()
    assert [p.numel() for p in agreed_by(optimizer)] == [2, 3]
    mean = 1 + (hvd.size() - 1) / 2
    torch.testing.assert_close(adapter.detach(), torch.full((2,), 1 - 5 * 0.5 * mean))
    torch.testing.assert_close(later.detach(), torch.full((3,), 1 - 3 * 0.25 * mean))
    base.requires_grad_(True)
    expect_error("ValueError", "'allreduce.noname.0.1' requires a gradient now", optimizer.step)
    base.requires_grad_(False)
    optimizer.param_groups[0]["params"] += weights(1)
    expect_error("ValueError", "by hand", optimizer.step)


# --- how it is used


def count_what_a_scaler_skips(fused: bool) -> None:
    """A step that one rank's scaler skips counts: the rounds of all ranks end together."""
    skipped = {(0, 1), (1, 1), (1, 2), (0, 4), (1, 5), (1, 9)}
    (parameter,) = weights(0)
    optimizer = hvd.LocalSGD(SGD([parameter], lr=1.0, fused=fused), every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    expected = [0.0] * hvd.size()
    for step in range(1, 13):
        optimizer.zero_grad()
        factor = torch.inf if (hvd.rank(), step) in skipped else 1.0 + hvd.rank()
        scaler.scale(parameter * factor).backward()
        for rank in range(hvd.size()):
            expected[rank] -= 0.0 if (rank, step) in skipped else 1.0 + rank
        if step % 2 == 0:
            expected = [sum(expected) / hvd.size()] * hvd.size()
        assert optimizer._step_supports_amp_scaling is fused  # as others may read it
        scaler.step(optimizer)
        hvd.barrier()  # nothing of the step is left for later
        scaler.update()
        assert parameter.item() == expected[hvd.rank()]


def made(momentum: float = 0.5, **options) -> tuple[list[torch.nn.Parameter], SGD]:
    parameters = shaped_weights()
    return parameters, hvd.DiLoCo(SGD(parameters, lr=RATE, momentum=momentum), every=4, **options)


def train_and_save(path: str) -> list[torch.Tensor]:
    """Save at the end of a round; return the weights of six more steps."""
    parameters, optimizer = made(momentum=0.0)
    take_steps(parameters, optimizer, 8)
    hvd.checkpoint.save(path, [[p.detach() for p in parameters], optimizer.state_dict()])
    take_steps(parameters, optimizer, 6)
    return [p.detach() for p in parameters]


def load_and_train(path: str) -> list[torch.Tensor]:
    values, state = hvd.checkpoint.load(path)
    parameters, optimizer = made(momentum=0.0)
    with torch.no_grad():
        torch._foreach_copy_(parameters, values)
    optimizer.load_state_dict(state)
    assert len(optimizer.outer.state) == len(parameters)  # momentum
    take_steps(parameters, optimizer, 6)
    found = [p.detach().clone() for p in parameters]
    optimizer.end_round()
    assert_same_on_all_ranks(*parameters)
    return found


def test_a_state_that_is_saved(tmp_path):
    """Other ranks can go on from it, and the same ones do so with the same bits."""
    args = (str(tmp_path / "state"),)
    saved = run(train_and_save, 2, args=args)
    for size in (1, 2, 3):
        loaded = run(load_and_train, size, args=args)
        for ours, theirs in zip(loaded, saved if size == 2 else loaded, strict=True):
            assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(("transport", "delay", "root"), [("shm", 0, 1), ("tcp", 2, 0)])
@on_ranks(3)
def test_a_broadcast_state_has_the_round_of_the_root(transport, delay: int, root: int) -> None:
    """One rank loads a state from the middle of a round; all are at other points of theirs."""
    trained, first = made(fragments=2, delay=delay)
    take_steps(trained, first, 7)
    parameters, optimizer = made(fragments=2, delay=delay)
    take_steps(parameters, optimizer, 5)  # with delay=2, a mean is pending
    if hvd.rank() == root:
        with torch.no_grad():
            torch._foreach_copy_(parameters, trained)
        optimizer.load_state_dict(first.state_dict())
        optimizer.outer.param_groups[0]["lr"] = 0.375
    hvd.broadcast_parameters(parameters, root)
    hvd.broadcast_optimizer_state(optimizer, root)
    agreed = agreed_by(optimizer)
    assert_same_on_all_ranks(
        *agreed, *[optimizer.outer.state[p]["momentum_buffer"] for p in agreed]
    )
    assert all(map(torch.equal, agreed, agreed_by(first)))  # all ranks agree on them
    assert optimizer.outer.param_groups[0]["lr"] == 0.375
    assert optimizer.state_dict()["local_steps"]["steps"] == 7
    with logged() as logs:
        take_steps(parameters, optimizer, 6)
        optimizer.end_round()
    assert logs == []
    assert_same_on_all_ranks(*agreed)
    if not delay:
        assert_same_on_all_ranks(*parameters)


def move_by_sam() -> None:
    """Sharpness-aware minimisation moves the weights there and back, before the first step, too.

    They differ between ranks by rounding then.
    """
    (parameter,) = weights(0.7)
    optimizer = hvd.DiLoCo(SGD([parameter], lr=0.5), outer_options={"lr": 1.0}, every=2)
    with logged() as messages:
        for _ in range(4):
            for sign in (1, -1):
                optimizer.zero_grad()
                (parameter**2 / 2).backward()
                parameter.data += sign * (hvd.rank() + 1) / 3
            optimizer.step()
    assert messages == []
    assert_same_on_all_ranks(parameter)
    # In each step the gradient is that of the weight which was moved by 1/3 or 2/3.
    assert parameter.item() == pytest.approx(0.7 / 2**4 - 0.5 * (1 - 1 / 2**4))


class Nested(SGD):
    """Its step calls the base class's, then moves the parameters once more."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(hvd.rank())


def count_a_nested_step_once() -> None:
    (parameter,) = weights(0)
    SGD([parameter], lr=1.0)  # from now on, the base class's step also runs hooks
    optimizer = hvd.LocalSGD(Nested([parameter], lr=1.0), every=2)
    for step in range(1, 5):
        step_with(optimizer, 1)
        agreed = step // 2 * 2 * (-1 + (hvd.size() - 1) / 2)
        assert parameter.item() == agreed + step % 2 * (-1 + hvd.rank())


def drop_a_mean() -> None:
    """A dropped mean is a part of the next one."""
    (parameter,) = weights(0)
    optimizer = hvd.DiLoCo(SGD([parameter], lr=1.0), outer_options={"lr": 1.0}, every=3, delay=2)
    for number, drop in enumerate(
        (lambda: optimizer.load_state_dict(optimizer.state_dict()), optimizer._rounds.follow_world)
    ):
        for _ in range(3):
            step_with(optimizer, 1.0 + hvd.rank())
        drop()
        optimizer.end_round()
        assert parameter.item() == -4.5 * (number + 1)


@pytest.mark.parametrize(
    ("case", "args", "size"),
    [
        (compress_in_ways, (), 3),
        (freeze_and_add, (), 2),
        (count_what_a_scaler_skips, (False,), 2),
        (count_what_a_scaler_skips, (True,), 2),
        (count_a_nested_step_once, (), 2),
        (drop_a_mean, (), 2),
        (move_by_sam, (), 2),
    ],
)
@on_both_transports
def test_rounds(transport, case, args, size):
    run(case, size, args=args, transport=transport)


# --- errors


def refuse() -> None:
    for options, kind, text in (
        ({"every": 0}, "ValueError", "every must be an integer, at least 1, not 0"),
        ({"every": 4, "delay": 4}, "ValueError", "it must be less than every=4"),
        ({"every": 2, "fragments": 3}, "ValueError", "a round has 2 steps"),
        ({"fragments": 6}, "ValueError", "5 parameters require gradients"),
        ({"compression": "int8"}, "ValueError", "as compression=hvd.Compression.int8() would be"),
        ({"outer_options": {"rate": 1}}, "ValueError", "SGD makes no outer optimizer"),
        ({"outer": lambda parameters: parameters}, "TypeError", "outer must make"),
        ({"outer": torch.optim.LBFGS}, "ValueError", "LBFGS cannot be the outer optimizer"),
        ({"process_set": [0, 1]}, "ValueError", "must be a ProcessSet"),
        ({"process_set": hvd.ProcessSet([0])}, "InvalidArgumentError", "has not been added"),
    ):
        expect_error(kind, text, partial(hvd.DiLoCo, SGD(shaped_weights(), lr=1.0), **options))
    saved = hvd.DiLoCo(SGD(shaped_weights(), lr=1.0)).state_dict()
    optimizer = hvd.LocalSGD(SGD(shaped_weights(), lr=1.0))
    text = "is of 5 agreed parameters of shapes [[3], [2], [5]]..."
    expect_error("ValueError", text, partial(optimizer.load_state_dict, saved))
    expect_error("ValueError", "wraps it once", lambda: hvd.DiLoCo(optimizer))
    expect_error("ValueError", "wrap it once", lambda: hvd.DistributedOptimizer(optimizer))
    text = "this SGD is a copy of a LocalSGD ("
    expect_error("InvalidArgumentError", text, copy.deepcopy(copy.deepcopy(optimizer)).step)
    for options, text in (
        ({}, "must have exactly one"),
        ({"op": hvd.Adasum}, "op=Adasum"),
        ({"shard_state": True}, "shard_state=True"),
    ):
        wrapped = hvd.DistributedOptimizer(SGD(shaped_weights(), lr=1.0), **options)
        expect_error("ValueError", text, partial(hvd.LocalSGD, wrapped))
        assert not hasattr(wrapped, "outer")


def differ() -> None:
    rank = hvd.rank()
    optimizer = SGD(shaped_weights(), lr=1.0)
    wrap = partial(hvd.LocalSGD, optimizer, every=2 + rank)
    assert "every=3" in expect_error("MismatchError", "every=2", wrap)
    fewer = SGD(shaped_weights()[rank:], lr=1.0)
    expect_error("MismatchError", "allreduce.noname.0.0", lambda: hvd.DiLoCo(fewer))
    (parameter,) = weights(rank)
    optimizer = hvd.DiLoCo(SGD([parameter], lr=1.0))
    expect_error("MismatchError", "broadcast_parameters", lambda: step_with(optimizer, 1))
    assert parameter.item() == rank


def join_in_a_round() -> None:
    optimizer = hvd.LocalSGD(SGD(weights(1), lr=1.0), every=2)
    step_with(optimizer, 1)
    if hvd.rank() == 0:
        expect_error("MismatchError", "called join()", optimizer.step)
    hvd.join()


def load_on_one_rank() -> None:
    optimizer = hvd.DiLoCo(SGD(weights(1), lr=1.0), every=2)
    for step in range(6):
        step_with(optimizer, 1)
        if step == 1 and hvd.rank() == 1:
            state = optimizer.state_dict()
            state["local_steps"]["agreed"][0] += 1
            optimizer.load_state_dict(state)


def test_different_agreed_parameters_are_told_once():
    (message,) = told(load_on_one_rank, 2)
    assert "do not have the same agreed parameters" in message


def give_sets_that_do_not_fit() -> None:
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [2, 3], [0, 2, 3])]
    own = sets[hvd.rank() // 2]
    inner = hvd.DistributedOptimizer(SGD(shaped_weights(), lr=1.0), process_set=own)
    kind = "MismatchError" if hvd.rank() < 2 else "ValueError"
    expect_error(kind, "has 2 ranks of [2, 3]", lambda: hvd.DiLoCo(inner, process_set=sets[2]))


def begin_differently() -> None:
    """The ranks of each host have the same weights, and the hosts have others."""
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [2], [0, 2])]
    (parameter,) = weights(hvd.rank() // 2)
    inner = hvd.DistributedOptimizer(SGD([parameter], lr=1.0), process_set=sets[hvd.rank() // 2])
    optimizer = hvd.DiLoCo(inner, process_set=sets[2])
    parameter.sum().backward()
    expect_error("MismatchError", "0.0", optimizer.step)


@pytest.mark.parametrize(
    ("case", "size"),
    [
        (refuse, 2),
        (differ, 2),
        (join_in_a_round, 2),
        (give_sets_that_do_not_fit, 4),
        (begin_differently, 3),
    ],
)
def test_errors(case, size):
    run(case, size)
