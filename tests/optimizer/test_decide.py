# SPDX-License-Identifier: Apache-2.0
"""`decide()`: how the ranks go on with the gradients that they have reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from torch_ring._C import GradientReport, NotFinite, PassReport, Worst, decide
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
    "some here, some there": (
        [rank(of(due=A, incomplete=True)), rank(of(due=B, incomplete=True))],
        Expected([(0, A | B, 0)], incomplete={0}),
    ),
    "all of them together": (
        [rank(of(due=A, incomplete=True)), rank(of(due=B | C, incomplete=True))],
        Expected([(0, ALL, 0)]),
    ),
    "a rank without data": ([rank(of(due=ALL)), rank()], Expected([(0, ALL, 0)])),
    "sparse here, dense there": (
        [rank(of(due=A | B, sparse=A | B)), rank(of(due=A)), rank(of(due=B, sparse=B))],
        Expected([(0, A | B, B)]),
    ),
    "accumulating beside two that are due": (
        [rank(of(1, A), of(0, B)), rank(of(1, B), of(accumulating=True))],
        Expected([(0, B, 0), (1, A | B, 0)], open={0}, mentioned={0, 1}),
    ),
    "another part later": (
        [rank(of(due=ALL)), rank(of(due=ALL, late=True))],
        Expected([(0, ALL, 0)], has_another_round=True, open={0}),
    ),
    "all step": (
        [rank(of(due=A, stepping=True)), rank(of(due=B, stepping=True))],
        Expected([(0, A | B, 0)], is_of_step=True),
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


@pytest.mark.parametrize(
    ("gave_up", "ends"), [([False] * 2, False), ([True] * 2, False), ([False, True], True)]
)
def test_a_pass_that_only_some_ranks_have_given_up_ends_the_job(gave_up, ends):
    reports = [rank(of(due=A), gave_up=each) for each in gave_up]
    assert decide(reports, 2, PARAMETERS).given_up == ends


def test_the_order_is_that_of_rank_0_unless_a_rank_has_joined():
    reports = [rank(of(due=ALL, order=(2, 0, 1))), rank(of(due=ALL, order=(0, 1, 2)))]
    assert decide(reports, 2, PARAMETERS).reductions[0].order == [2, 0, 1]
    assert decide(reports, 3, PARAMETERS).reductions[0].order == []


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
    ],
)
def test_averaged_parts_that_not_all_ranks_report_are_averaged_again(reports, carried, unlike):
    (reduction,) = decide(reports, 2, PARAMETERS).reductions
    assert (reduction.carried, reduction.unlike) == (carried, unlike)


def test_reports_are_read_as_they_were_written():
    found = [NotFinite(0, 5, Worst.nan, True), NotFinite(19, 1, Worst.infinite, False)]
    full = {"due": ALL, "sparse": A, "carried": B | C, "unsure": C, "order": (2, 0)}
    full |= {"digest": b"12345678", "not_finite": found}
    flags = ("accumulating", "incomplete", "stepping", "late")
    reports = [rank(of(n, **full, **{flag: True}), plan=9) for n, flag in enumerate(flags)]
    reports += [rank(of(3), of(9, due=1 << 70), steps=1 << 40), rank(gave_up=True), rank()]
    encoded = [report.encode() for report in reports]
    assert PassReport.decode_all(b"".join(encoded)) == reports
    longer = (len(encoded[0]) + 1).to_bytes(4, "little") + encoded[0][4:] + b"\0"
    for other in (longer, *(encoded[0][:size] for size in range(1, len(encoded[0])))):
        with pytest.raises(RingError, match="other bytes than its parts"):
            PassReport.decode_all(other)
