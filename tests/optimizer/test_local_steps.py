# SPDX-License-Identifier: Apache-2.0
"""LocalSGD and DiLoCo: quadratic losses, whose parameters follow from a formula on one process."""

import copy
from collections.abc import Collection, Sequence
from functools import partial

import pytest
import torch
from logs import logged, told
from pool import expect_error, run
from torch.optim import SGD
from training import assert_same_on_all_ranks, take_step, weights
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.tracing.counters import snapshot

RATE, TARGETS, SIZES = 0.125, (1.0, -2.0, 3.0, 0.5), (3, 2, 5, 1, 4)


def shaped_weights() -> list[torch.nn.Parameter]:
    """Return parameters of several sizes, the same on all ranks."""
    return [torch.nn.Parameter(torch.arange(n, dtype=torch.float64) / 4 + n) for n in SIZES]


def local_step(parameters: list[torch.Tensor], target: float) -> None:
    """Take a step of SGD on the sum of (p - target)**2 / 2, by its formula."""
    for parameter in parameters:
        parameter -= RATE * (parameter - target)


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
        self.parts = {1: [[0, 1, 2, 3, 4]], 2: [[0, 1, 2], [3, 4]], 3: [[0, 1], [2], [3, 4]]}[
            fragments
        ]
        self.on_their_way: dict[int, tuple[int, list, list]] = {}
        self.steps = 0

    def step(self, skipping: Collection[int] = ()) -> None:
        for rank, (own, target) in enumerate(zip(self.ranks, self.targets, strict=True)):
            if rank not in skipping:
                local_step(own, target)
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


NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def take_steps(parameters, optimizer, count: int = 1) -> None:
    target = TARGETS[hvd.rank()]
    for _ in range(count):
        take_step(optimizer, sum((p - target).square().sum() / 2 for p in parameters))


def step_with(optimizer, *gradients: float) -> None:
    """Take a step with gradients of the first parameters, each filled with a number."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, gradient in zip(parameters, gradients, strict=False):
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()


def assert_as_modelled(parameters, model: Model, rank: int, where: str = "") -> None:
    for ours, expected in zip(parameters, model.ranks[rank], strict=True):
        torch.testing.assert_close(
            ours.detach(), expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{where}: {text}"
        )


def check_diloco() -> None:
    for every, fragments, delay, outer in (
        (1, 1, 0, {"lr": 1.0}),
        (4, 1, 0, None),
        (4, 2, 0, {"lr": 0.5, "momentum": 0.5}),
        (5, 3, 0, None),
        (4, 1, 3, None),
        (5, 3, 2, None),
        (3, 2, 1, {"lr": 1.0}),
    ):
        model = Model(TARGETS[: hvd.size()], every, fragments, delay, outer or NESTEROV)
        parameters = shaped_weights()
        optimizer = SGD(parameters, lr=RATE)
        options = {"every": every, "fragments": fragments, "delay": delay}
        assert hvd.DiLoCo(optimizer, outer_options=outer, **options) is optimizer
        for number in range(3 * every + 2):
            if number == 2 * every and not delay:  # a schedule
                optimizer.outer.param_groups[0]["lr"] /= 2
                model.outer = {**model.outer, "lr": model.outer["lr"] / 2}
            take_steps(parameters, optimizer)
            model.step()
            assert_as_modelled(parameters, model, hvd.rank(), f"{options}, {outer}")
        optimizer.end_round()
        if not delay:
            assert_same_on_all_ranks(*parameters)


def check_local_sgd() -> None:
    """It averages parameters, which is an outer step at the rate 1."""
    for every in (1, 3):
        model = Model(TARGETS[: hvd.size()], every, 1, 0, {"lr": 1.0})
        parameters = shaped_weights()
        optimizer = hvd.LocalSGD(SGD(parameters, lr=RATE), every=every)
        assert optimizer.outer is None
        for step in range(1, 2 * every + 2):
            take_steps(parameters, optimizer)
            model.step()
            assert_as_modelled(parameters, model, hvd.rank(), f"every={every}")
            if step % every == 0:
                assert_same_on_all_ranks(*parameters)


@pytest.mark.parametrize("check", [check_diloco, check_local_sgd])
@pytest.mark.parametrize(("transport", "size"), [("shm", 1), ("shm", 4), ("tcp", 3)])
def test_parameters_are_those_of_the_papers(transport, size, check):
    run(check, size, transport=transport)


def train_on_hosts(fused: bool, delay: int, overflow: bool) -> None:
    """Two hosts of two ranks: gradients in each, DiLoCo between them.

    A scaler skips the step of a host if one of its ranks has an infinite gradient.
    """
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [2, 3], [0, 2])]
    infinite = {(1, 0), (1, 2), (2, 2), (3, 4), (0, 5), (0, 7), (3, 7)}  # rank, step
    infinite = infinite if overflow else set()
    parameters = shaped_weights()
    optimizer = hvd.DiLoCo(
        hvd.DistributedOptimizer(
            SGD(parameters, lr=RATE, fused=fused), process_set=sets[hvd.rank() // 2]
        ),
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
        loss = sum((p - TARGETS[hvd.rank()]).square().sum() / 2 for p in parameters)
        scaler.scale(loss * factor).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        model.step(skipping={rank // 2 for rank, at in infinite if at == step})
        assert_as_modelled(parameters, model, hvd.rank() // 2)
    skipped = (4, 3)[hvd.rank() // 2] if overflow else 0
    assert scaler.get_scale() == 2.0 ** (10 - skipped)
    optimizer.end_round()
    if not delay:
        assert_same_on_all_ranks(*parameters)


@pytest.mark.parametrize(
    ("fused", "delay", "overflow"), [(False, 2, False), (False, 0, True), (True, 2, True)]
)
def test_gradients_inside_hosts_and_rounds_between_them(fused, delay, overflow):
    run(train_on_hosts, 4, args=(fused, delay, overflow))


# --- sent data


def compress_in_ways() -> None:
    start, end = torch.zeros(6, 6), torch.outer(torch.arange(6.0), torch.ones(6))
    expected = end * (1 + hvd.size()) / 2
    for compression in (hvd.Compression.bf16, hvd.Compression.int8(4), hvd.Compression.powersgd(1)):
        matrix = torch.nn.Parameter(start.clone())
        optimizer = hvd.DiLoCo(
            SGD([matrix], lr=0.5),
            outer_options={"lr": 1.0},
            every=2,
            delay=1,
            compression=compression,
            named_parameters=[("matrix", matrix)],
        )
        for _ in range(30):
            matrix.grad = matrix.detach() - end * (1 + hvd.rank())
            optimizer.step()
        optimizer.end_round()
        (agreed,) = optimizer.outer.param_groups[0]["params"]
        assert_same_on_all_ranks(agreed)
        assert (agreed - expected).abs().max() < 0.05 * expected.max()
        if compression is not hvd.Compression.bf16:  # it has a state of the parameter
            assert set(compression.states) == {"matrix"}


@on_both_transports
def test_compressed_differences_lead_to_the_mean(transport):
    run(compress_in_ways, 3, transport=transport)


def what_is_sent(fragments: int) -> tuple[int, int]:
    """Return the number of allreduces in 16 steps, and their bytes."""
    parameters = [torch.nn.Parameter(torch.zeros(1 << 16)) for _ in range(2)]
    optimizer = hvd.DiLoCo(SGD(parameters, lr=1.0), every=8, fragments=fragments)
    before = snapshot().sets[0].operations.get("allreduce")
    for _ in range(16):
        step_with(optimizer, 1, 1)
    after = snapshot().sets[0].operations["allreduce"]
    return after.operations - (before.operations if before else 0), after.bytes


def test_a_round_sends_each_parameter_once():
    assert run(what_is_sent, 2, args=(1,)) == [(2, 2 * 2 * 4 << 16)] * 2
    assert run(what_is_sent, 2, args=(2,)) == [(4, 2 * 2 * 4 << 16)] * 2


def frozen_parameters_stay_and_added_ones_take_part() -> None:
    base, adapter, later = (torch.nn.Parameter(torch.full((n,), 1.0)) for n in (1000, 2, 3))
    base.requires_grad_(False)
    optimizer = hvd.DiLoCo(SGD([adapter, base], lr=0.5), outer_options={"lr": 1.0}, every=2)
    optimizer.add_param_group({"params": [later], "lr": 0.25})
    assert [p.numel() for g in optimizer.outer.param_groups for p in g["params"]] == [2, 3]
    for _ in range(4):
        later.grad = torch.full_like(later, 1.0 + hvd.rank())
        step_with(optimizer, 1.0 + hvd.rank())
    mean = 1 + (hvd.size() - 1) / 2
    torch.testing.assert_close(adapter.detach(), torch.full((2,), 1 - 4 * 0.5 * mean))
    torch.testing.assert_close(later.detach(), torch.full((3,), 1 - 4 * 0.25 * mean))
    base.requires_grad_(True)
    expect_error("ValueError", "'allreduce.noname.0.1' requires a gradient now", optimizer.step)
    base.requires_grad_(False)
    optimizer.param_groups[0]["params"] += weights(1)
    expect_error("ValueError", "by hand", optimizer.step)


def add_while_a_mean_is_on_its_way() -> None:
    first, second = weights(0, 0)
    optimizer = hvd.DiLoCo(SGD([first], lr=1.0), outer_options={"lr": 1.0}, every=3, delay=2)
    for step in range(1, 8):
        step_with(optimizer, hvd.rank() * 2.0, hvd.rank() * 4.0)
        if step == 3:
            optimizer.add_param_group({"params": [second]})
    optimizer.end_round()
    assert first.item() == -7 * (hvd.size() - 1)
    assert second.item() == -4 * 2 * (hvd.size() - 1)


# --- how it is used


def steps_that_a_scaler_skips_count(fused: bool) -> None:
    """A step that one rank's scaler skips counts: the rounds of all ranks end together.

    Of two optimizers, as in a GAN.
    """
    everys = (2, 3)
    skipped = {(0, 1), (1, 1), (1, 2), (0, 4), (1, 5), (1, 9)}, {(1, 6), (0, 7), (1, 7), (0, 8)}
    parameters = weights(0, 0)
    optimizers = [
        hvd.LocalSGD(SGD([parameter], lr=1.0, fused=fused), every=every)
        for parameter, every in zip(parameters, everys, strict=True)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    own = [[0.0] * hvd.size() for _ in parameters]
    for step in range(1, 13):
        for number in (0, 1):
            optimizers[number].zero_grad()
            is_skipped = (hvd.rank(), step) in skipped[number]
            factor = torch.inf if is_skipped else 1.0 + number + hvd.rank()
            scaler.scale(parameters[number] * factor).backward()
            for rank in range(hvd.size()):
                if (rank, step) not in skipped[number]:
                    own[number][rank] -= 1.0 + number + rank
            if step % everys[number] == 0:
                own[number] = [sum(own[number]) / hvd.size()] * hvd.size()
        for optimizer in optimizers:
            assert optimizer._step_supports_amp_scaling is fused  # as others may read it
            scaler.step(optimizer)
            hvd.barrier()  # nothing of the step is left for later
        scaler.update()
        assert [p.item() for p in parameters] == [each[hvd.rank()] for each in own]


def copies_name_their_wrapper() -> None:
    """A copy steps once wrapped; before, its error names the function that wrapped the original."""
    (parameter,) = weights(0)
    optimizer = SGD([parameter], lr=1.0)
    for wrap in ("DiLoCo", "LocalSGD", "DistributedOptimizer"):
        optimizer = copy.deepcopy(copy.deepcopy(getattr(hvd, wrap)(optimizer)))
        text = expect_error(
            "InvalidArgumentError", f"this SGD is a copy of a {wrap} (", optimizer.step
        )
        assert f"optimizer = hvd.{wrap}(optimizer)" in text
    hvd.LocalSGD(optimizer, every=1)
    step_with(optimizer, 2.0 * hvd.rank())
    assert (optimizer.param_groups[0]["params"][0].item(), parameter.item()) == (1 - hvd.size(), 0)


def made(
    momentum: float = 0.5, **options
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    parameters = shaped_weights()
    inner = SGD(parameters, lr=RATE, momentum=momentum)
    return parameters, hvd.DiLoCo(inner, every=4, **options)


def train_and_save(path: str, steps: int, **options) -> tuple:
    parameters, optimizer = made(**options)
    take_steps(parameters, optimizer, steps)
    hvd.checkpoint.save(path, [[p.detach() for p in parameters], optimizer.state_dict()])
    return parameters, optimizer


def resumed(path: str, **options) -> tuple:
    values, state = hvd.checkpoint.load(path)
    parameters, optimizer = made(**options)
    with torch.no_grad():
        torch._foreach_copy_(parameters, values)
    optimizer.load_state_dict(state)
    return parameters, optimizer, state


def save_in_a_round(path: str) -> None:
    train_and_save(path, 6, fragments=2)


def load_and_train(path: str) -> None:
    parameters, optimizer, state = resumed(path, fragments=2)
    agreed = [p for g in optimizer.outer.param_groups for p in g["params"]]
    assert_same_on_all_ranks(*agreed)
    for ours, saved in zip(agreed, state["local_steps"]["agreed"], strict=True):
        assert torch.equal(ours, saved)
    assert len(optimizer.outer.state) == len(agreed)  # momentum
    take_steps(parameters, optimizer, 5)
    optimizer.end_round()
    assert_same_on_all_ranks(*parameters)


@pytest.mark.parametrize("size", [1, 3])
def test_a_state_that_is_saved(tmp_path, size):
    """It goes on with other ranks, and with the same bits on the same ones."""
    path = str(tmp_path / "state")
    run(save_in_a_round, 2, args=(path,))
    run(load_and_train, size, args=(path,))
    run(resume_bits, size, args=(path,))


def resume_bits(path: str) -> None:
    """A state from the end of a round continues with the bits of an uninterrupted run."""
    parameters, optimizer = train_and_save(path, 8, momentum=0.0)
    again, other, _ = resumed(path, momentum=0.0)
    take_steps(parameters, optimizer, 6)
    take_steps(again, other, 6)
    assert all(map(torch.equal, parameters, again))


def broadcast_a_round(delay: int, root: int) -> None:
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
    agreed = [p for group in optimizer.outer.param_groups for p in group["params"]]
    momentum = [optimizer.outer.state[p]["momentum_buffer"] for p in agreed]
    assert_same_on_all_ranks(*agreed, *momentum)
    theirs = [p for group in first.outer.param_groups for p in group["params"]]
    assert all(map(torch.equal, agreed, theirs))  # all ranks agree on them
    assert optimizer.outer.param_groups[0]["lr"] == 0.375
    assert optimizer._rounds.state()["steps"] == 7
    with logged() as logs:
        take_steps(parameters, optimizer, 6)
        optimizer.end_round()
    assert logs == []
    assert_same_on_all_ranks(*agreed)
    if not delay:
        assert_same_on_all_ranks(*parameters)


@pytest.mark.parametrize(("transport", "delay", "root"), [("shm", 0, 1), ("tcp", 2, 0)])
def test_a_broadcast_state_has_the_round_of_the_root(transport, delay, root):
    run(broadcast_a_round, 3, args=(delay, root), transport=transport)


def broadcast_of_a_rank_without_rounds() -> None:
    """Rank 2 takes part in no agreement: the others begin a round with its parameters."""
    pair = hvd.add_process_set([0, 1])
    (parameter,) = weights(0)
    optimizer = hvd.DiLoCo(
        SGD([parameter], lr=1.0), outer_options={"lr": 1.0}, every=3, process_set=pair
    )
    for step in range(5):
        if step == 2:
            hvd.broadcast_parameters([parameter], 2)
            hvd.broadcast_optimizer_state(optimizer, 2)
            assert parameter.item() == -6
        step_with(optimizer, 1.0 + hvd.rank())
    assert parameter.item() == (-6 - 4.5 if hvd.rank() < 2 else -6 - 9)


# --- refused arguments


def refused() -> None:
    for options, kind, text in (
        ({"every": 0}, "ValueError", "every must be an integer, at least 1, not 0"),
        ({"every": 2.5}, "ValueError", "every must be"),
        ({"delay": -1}, "ValueError", "delay must be an integer, at least 0"),
        ({"every": 4, "delay": 4}, "ValueError", "it must be less than every=4"),
        ({"every": 2, "fragments": 3}, "ValueError", "a round has 2 steps"),
        ({"fragments": 6}, "ValueError", "5 parameters require gradients"),
        ({"compression": "int8"}, "ValueError", "as compression=hvd.Compression.int8() would be"),
        ({"compression": hvd.Compression.int8}, "ValueError", "=hvd.Compression.int8 is no comp"),
        ({"outer_options": {"rate": 1}}, "ValueError", "SGD makes no outer optimizer"),
        ({"outer": lambda parameters: parameters}, "TypeError", "outer must make"),
        ({"outer": torch.optim.LBFGS}, "ValueError", "LBFGS cannot be the outer optimizer"),
        ({"process_set": [0, 1]}, "ValueError", "must be a ProcessSet"),
        ({"process_set": hvd.ProcessSet([0])}, "InvalidArgumentError", "has not been added"),
    ):
        expect_error(kind, text, partial(hvd.DiLoCo, SGD(shaped_weights(), lr=1.0), **options))
    expect_error("TypeError", "", lambda: hvd.LocalSGD(SGD))
    optimizer = hvd.LocalSGD(SGD(shaped_weights(), lr=1.0))
    expect_error("ValueError", "wraps it once", lambda: hvd.DiLoCo(optimizer))
    expect_error("ValueError", "wrap it once", lambda: hvd.DistributedOptimizer(optimizer))
    for options, text in (
        ({}, "must have exactly one"),
        ({"op": hvd.Adasum}, "op=Adasum"),
        ({"shard_state": True}, "shard_state=True"),
    ):
        wrapped = hvd.DistributedOptimizer(SGD(shaped_weights(), lr=1.0), **options)
        expect_error("ValueError", text, partial(hvd.LocalSGD, wrapped))
        assert not hasattr(wrapped, "outer")


def different() -> None:
    rank = hvd.rank()
    text = expect_error(
        "MismatchError",
        "every=2",
        lambda: hvd.LocalSGD(SGD(shaped_weights(), lr=1.0), every=2 + rank),
    )
    assert "every=3" in text
    fewer = SGD(shaped_weights()[rank:], lr=1.0)
    expect_error("MismatchError", "allreduce.noname.0.0", lambda: hvd.DiLoCo(fewer))
    (parameter,) = weights(rank)
    optimizer = hvd.DiLoCo(SGD([parameter], lr=1.0))
    expect_error("MismatchError", "broadcast_parameters", lambda: step_with(optimizer, 1))
    assert parameter.item() == rank


def move_by_sam(kind: str, on_hosts: bool = False) -> None:
    """Sharpness-aware minimisation moves the weights there and back, before the first step, too.

    They differ between ranks by rounding then; the way there counts as a move of the target.
    """
    moves = [(rank + 1) / 3 for rank in range(hvd.size())]
    targets = [TARGETS[rank] - move for rank, move in enumerate(moves)]
    parameters = shaped_weights()
    sgd = SGD(parameters, lr=RATE)
    options = {"outer_options": {"lr": 1.0}} if kind == "DiLoCo" else {}
    if on_hosts:  # all ranks are one host's, and rank 0 alone takes part in agreements
        sgd = hvd.DistributedOptimizer(sgd)
        options["process_set"] = hvd.add_process_set([0])
        targets = [sum(targets) / hvd.size()] * hvd.size()
    optimizer = getattr(hvd, kind)(sgd, every=2, **options)
    for parameter in parameters:
        parameter.data += hvd.rank()
    hvd.broadcast_parameters(parameters, root_rank=0)
    model = Model(targets, 2, 1, 0, {"lr": 1.0})
    for _ in range(4):
        for sign in (1, -1):
            optimizer.zero_grad()
            sum((p - TARGETS[hvd.rank()]).square().sum() / 2 for p in parameters).backward()
            for parameter in parameters:
                parameter.data += sign * moves[hvd.rank()]
        optimizer.step()
        model.step()
        assert_as_modelled(parameters, model, hvd.rank(), kind)
    assert_same_on_all_ranks(*parameters)


@pytest.mark.parametrize(
    ("kind", "on_hosts"), [("LocalSGD", False), ("DiLoCo", False), ("DiLoCo", True)]
)
def test_sam_moves_the_weights_before_the_first_step(kind, on_hosts):
    assert "agreed parameters" not in "".join(told(move_by_sam, 2, kind, on_hosts))


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


def load_another_models_state() -> None:
    saved = hvd.DiLoCo(SGD(shaped_weights(), lr=1.0)).state_dict()
    larger = [torch.nn.Parameter(torch.zeros(n + 1)) for n in SIZES]
    for other in (hvd.DiLoCo(SGD(larger, lr=1.0)), hvd.LocalSGD(SGD(shaped_weights(), lr=1.0))):
        text = "is of 5 agreed parameters of shapes [[3], [2], [5]]..."
        expect_error("ValueError", text, partial(other.load_state_dict, saved))


def sets_that_do_not_fit() -> None:
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
        (refused, 2),
        (different, 2),
        (join_in_a_round, 2),
        (load_another_models_state, 2),
        (sets_that_do_not_fit, 4),
        (begin_differently, 3),
    ],
)
def test_errors(case, size):
    run(case, size)


class Nested(SGD):
    """Its step calls the base class's, then moves the parameters once more."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(hvd.rank())


def a_step_that_calls_its_base_class_is_one() -> None:
    (parameter,) = weights(0)
    SGD([parameter], lr=1.0)  # from now on, the base class's step also runs hooks
    optimizer = hvd.LocalSGD(Nested([parameter], lr=1.0), every=2)
    for step in range(1, 5):
        step_with(optimizer, 1)
        agreed = step // 2 * 2 * (-1 + (hvd.size() - 1) / 2)
        assert parameter.item() == agreed + step % 2 * (-1 + hvd.rank())


def a_dropped_mean_loses_nothing() -> None:
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
        (frozen_parameters_stay_and_added_ones_take_part, (), 2),
        (add_while_a_mean_is_on_its_way, (), 2),
        (steps_that_a_scaler_skips_count, (False,), 2),
        (steps_that_a_scaler_skips_count, (True,), 2),
        (copies_name_their_wrapper, (), 2),
        (a_step_that_calls_its_base_class_is_one, (), 2),
        (a_dropped_mean_loses_nothing, (), 2),
        (broadcast_of_a_rank_without_rounds, (), 3),
    ],
)
@on_both_transports
def test_rounds(transport, case, args, size):
    run(case, size, args=args, transport=transport)
