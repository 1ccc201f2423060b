# SPDX-License-Identifier: Apache-2.0
"""`decide()`: how the ranks go on with the gradients that they have reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_ring._C import GradientReport, NotFinite, PassDecision, PassReport, Worst, decide
from torch_ring.errors import RingError

A, B, C = 1, 2, 4  # parameters 0, 1 and 2, as a bitmap
ALL = A | B | C
PARAMETERS = {0: 3, 1: 3}  # by optimizer


def rank(*gradients: GradientReport, **report: Any) -> PassReport:
    return PassReport(report.pop("steps", 7), gradients, **report)


def of(optimizer: int = 0, due: int = 0, **report: Any) -> GradientReport:
    return GradientReport(optimizer, due, **report)


@dataclass
class Expected:
    """A decision; what is not named is as in a pass of all ranks with nothing left over."""

    reductions: list[tuple[int, int, int]] = field(default_factory=list)  # optimizer, due, sparse
    is_of_step: bool = False
    has_another_round: bool = False
    has_digests: bool = False
    open: set[int] = field(default_factory=set)
    incomplete: set[int] = field(default_factory=set)
    mentioned: set[int] = field(default_factory=lambda: {0})


CASES: dict[str, tuple[list[PassReport], Expected]] = {
    "all dense": ([rank(of(due=ALL))] * 3, Expected([(0, ALL, 0)])),
    "some here, some there": (
        [rank(of(due=A, incomplete=True)), rank(of(due=B, incomplete=True))],
        Expected([(0, A | B, 0)], incomplete={0}),
    ),
    "all of them together": (
        [rank(of(due=A, incomplete=True)), rank(of(due=B | C, incomplete=True))],
        Expected([(0, ALL, 0)]),
    ),
    "a rank without data": ([rank(of(due=ALL)), rank()], Expected([(0, ALL, 0)])),
    "two optimizers": (
        [rank(of(1, A), of(0, B)), rank(of(1, B))],
        Expected([(0, B, 0), (1, A | B, 0)], mentioned={0, 1}),
    ),
    "sparse on all ranks": (
        [rank(of(due=ALL, sparse=A)), rank(of(due=A | B, sparse=A))],
        Expected([(0, ALL, A)]),
    ),
    "sparse here, dense there": (
        [rank(of(due=A | B, sparse=A | B)), rank(of(due=A)), rank(of(due=B, sparse=B))],
        Expected([(0, A | B, B)]),
    ),
    "accumulating beside a due one": (
        [rank(of(due=A)), rank(of(due=A, accumulating=True))],
        Expected([(0, A, 0)], open={0}),
    ),
    "accumulating only": (
        [rank(of(1, ALL)), rank(of(1, ALL), of(accumulating=True))],
        Expected([(1, ALL, 0)], open={0}, mentioned={0, 1}),
    ),
    "another part later": (
        [rank(of(due=ALL)), rank(of(due=ALL, late=True))],
        Expected([(0, ALL, 0)], has_another_round=True, open={0}),
    ),
    "all step": (
        [rank(of(due=A, stepping=True)), rank(of(due=B, stepping=True))],
        Expected([(0, A | B, 0)], is_of_step=True),
    ),
    "all step, without gradients": (
        [rank(of(stepping=True, incomplete=True))] * 2,
        Expected(is_of_step=True, incomplete={0}),
    ),
    "one steps without data": (
        [rank(of(due=ALL)), rank(of(stepping=True))],
        Expected([(0, ALL, 0)]),
    ),
    "one steps with a gradient set by hand": (
        [rank(of(due=A)), rank(of(due=A | B, stepping=True)), rank(of(due=A))],
        Expected([(0, A, 0)], open={0}),
    ),
    "one steps with a gradient set by hand, in a planned pass": (
        [rank(of(due=A), plan=1), rank(of(due=A | B, stepping=True), plan=1)],
        Expected([(0, A | B, 0)]),
    ),
    "one steps with such a gradient of another optimizer": (
        [rank(of(due=ALL)), rank(of(1, B, stepping=True))],
        Expected([(0, ALL, 0)], open={1}, mentioned={0, 1}),
    ),
    "nothing but a digest": (
        [rank(of(digest=b"12345678"))] * 2,
        Expected(mentioned=set(), has_digests=True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_decisions(case):
    reports, expected = CASES[case]
    decision = decide(reports, len(reports), PARAMETERS)
    found = [(each.optimizer, each.touched, each.sparse) for each in decision.reductions]
    assert found == expected.reductions
    names = ("is_of_step", "has_another_round", "has_digests", "open", "incomplete", "mentioned")
    for name in names:
        assert getattr(decision, name) == getattr(expected, name), name
    assert not decision.given_up
    assert decision.out_of_step is None


def test_without_a_report_there_is_no_decision():
    with pytest.raises(RingError, match="no rank has reported"):
        decide([], 2, PARAMETERS)


def test_the_first_rank_that_is_out_of_step_is_named():
    assert decide([rank(steps=n) for n in (4, 4, 5, 3)], 4, {}).out_of_step == 2


@pytest.mark.parametrize(
    ("gave_up", "ends"), [([False] * 2, False), ([True] * 2, False), ([False, True], True)]
)
def test_a_pass_that_only_some_ranks_have_given_up_ends_the_job(gave_up, ends):
    reports = [rank(of(due=A), gave_up=each) for each in gave_up]
    assert decide(reports, 2, PARAMETERS).given_up == ends


def test_the_order_is_that_of_rank_0_unless_a_rank_has_joined():
    reports = [rank(of(due=ALL, order=(2, 0, 1))), rank(of(due=ALL, order=(0, 1, 2)))]
    assert decide(reports, 2, PARAMETERS).reductions[0].order == [2, 0, 1]
    joined = decide(reports, 3, PARAMETERS)
    assert not joined.is_whole
    assert joined.reductions[0].order == []


def test_gradients_that_are_not_finite_count_where_they_are_reduced():
    found = [NotFinite(0, 0, Worst.nan, False), NotFinite(1, 1, Worst.infinite, True)]
    reports = [
        rank(of(due=A, not_finite=found[:1])),
        rank(of(due=B, stepping=True, not_finite=found[1:])),
    ]
    assert decide(reports, 2, PARAMETERS).reductions[0].not_finite == found[:1]


@pytest.mark.parametrize(
    ("reports", "carried", "unlike"),
    [
        ([rank(of(due=ALL, carried=A))] * 2, A, 0),
        ([rank(of(due=ALL, carried=A | B)), rank(of(due=ALL, carried=B | C))], ALL, A | C),
        ([rank(of(due=ALL, carried=A)), rank()], A, A),  # it may have that averaged gradient
        ([rank(of(due=ALL, carried=A)), rank(of(due=B, carried=A))], A, 0),
        ([rank(of(due=ALL)), rank(of(due=B, carried=A))], 0, 0),  # its averaged gradient is gone
        ([rank(of(due=A, carried=A | B))] * 2, A, 0),  # B stays as it is
        ([rank(of(due=ALL, carried=A | B, unsure=A)), rank(of(due=ALL, carried=A | B))], A | B, A),
        ([rank(of(due=ALL)), rank(of(due=ALL))], 0, 0),
    ],
)
def test_averaged_parts_that_not_all_ranks_report_are_averaged_again(reports, carried, unlike):
    (reduction,) = decide(reports, 2, PARAMETERS).reductions
    assert (reduction.carried, reduction.unlike) == (carried, unlike)


bitmaps = st.integers(0, 2**20 - 1)
NOT_FINITE = [NotFinite(0, 5, Worst.nan, True), NotFinite(19, 1, Worst.infinite, False)]


@st.composite
def gradient_reports(draw: st.DrawFn, optimizer: int) -> GradientReport:
    due, carried = draw(bitmaps), draw(bitmaps)
    return GradientReport(
        optimizer,
        due,
        sparse=due & draw(bitmaps),
        accumulating=draw(st.booleans()),
        incomplete=draw(st.booleans()),
        stepping=draw(st.booleans()),
        late=draw(st.booleans()),
        carried=carried,
        unsure=carried & draw(bitmaps),
        order=draw(st.lists(st.integers(0, 19), max_size=4)),
        digest=draw(st.sampled_from([b"", b"12345678"])),
        not_finite=draw(st.lists(st.sampled_from(NOT_FINITE), max_size=2)),
    )


@st.composite
def pass_reports(draw: st.DrawFn) -> list[PassReport]:
    reports = []
    for _ in range(draw(st.integers(1, 4))):
        optimizers = draw(st.sets(st.integers(0, 3)))
        gradients = [draw(gradient_reports(optimizer)) for optimizer in sorted(optimizers)]
        reports.append((draw(st.integers(0, 1)), gradients, draw(st.booleans())))
    plan = draw(st.integers(0, 1))
    return [PassReport(steps, each, gave_up=up, plan=plan) for steps, each, up in reports]


def test_other_bytes_are_no_reports():
    report = rank(of(due=A, order=(2, 0), digest=b"12345678", not_finite=NOT_FINITE), plan=9)
    encoded = report.encode()
    longer = (len(encoded) + 1).to_bytes(4, "little") + encoded[4:] + b"\0"
    for other in (longer, *(encoded[:size] for size in range(1, len(encoded)))):
        with pytest.raises(RingError, match="other bytes than its parts"):
            PassReport.decode_all(other)


def values(decision: PassDecision) -> list[object]:
    reductions = [
        (e.optimizer, e.touched, e.sparse, e.carried, e.unlike, e.order)
        for e in decision.reductions
    ]
    names = ["given_up", "is_of_step", "is_whole", "has_another_round"]
    names += ["open", "incomplete", "mentioned"]
    return [reductions, *(getattr(decision, name) for name in names)]


@given(pass_reports(), st.data())
def test_decisions_of_random_reports(reports, data):
    size = len(reports) + data.draw(st.integers(0, 1))  # a rank may have joined
    parameters = dict.fromkeys(range(4), 20)
    # Every rank has decoded the same bytes; equal reports may be one object or several.
    decoded = PassReport.decode_all(b"".join(report.encode() for report in reports))
    assert decoded == reports
    decision = decide(reports, size, parameters)
    assert values(decide(decoded, size, parameters)) == values(decision)
    touched = {each.optimizer: each.touched for each in decision.reductions}
    assert list(touched) == sorted(touched)
    assert decision.is_whole == (size == len(reports))
    assert decision.is_whole or not any(each.order for each in decision.reductions)
    steps = [report.steps for report in reports]
    others = [index for index, each in enumerate(steps) if each != steps[0]]
    assert decision.out_of_step == (others[0] if others else None)
    all_step = all(report.is_of_step for report in reports)
    assert decision.is_of_step == all_step
    for report in reports:
        for each in report.gradients:
            reduced = touched.get(each.optimizer, 0)
            # A due gradient is reduced now, or a later round or pass does it.
            assert each.due & ~reduced == 0 or each.optimizer in decision.open
            if all_step or not report.is_of_step or report.plan:
                assert each.due & ~reduced == 0
    for each in decision.reductions:
        mine = [g for report in reports for g in report.gradients if g.optimizer == each.optimizer]
        due = dense = 0
        for gradients in mine:
            due |= gradients.due
            dense |= gradients.due & ~gradients.sparse
        assert each.touched & ~due == 0, "no rank has it"
        assert each.sparse == each.touched & ~dense
        states = [(each.carried & g.carried, each.carried & g.unsure) for g in mine]
        if len(mine) == len(reports) and len(set(states)) == 1:
            assert each.unlike == each.carried & ~(states[0][0] & ~states[0][1])
        assert each.unlike & ~each.carried == each.carried & ~each.touched == 0
    # No step goes on while a rank has gradients for a later pass.
    left = {each.optimizer for r in reports for each in r.gradients if each.accumulating}
    assert left <= decision.open
    # The order of the ranks decides only whose order of gradients counts.
    turned = decide(data.draw(st.permutations(reports)), size, parameters)
    assert [(e.optimizer, e.touched, e.sparse, e.carried, e.unlike) for e in turned.reductions] == [
        (e.optimizer, e.touched, e.sparse, e.carried, e.unlike) for e in decision.reductions
    ]
    assert values(turned)[1:] == values(decision)[1:]
