"""The sets of gradients that planned passes compare, without ranks."""

from __future__ import annotations

from torch_ring.optimizer.planned_pass import Gradients, union_of, without

A: Gradients = {0: 0b1}
B: Gradients = {0: 0b11}
C: Gradients = {0: 0b1, 1: 0b1}


def test_sets_of_gradients():
    assert union_of([A, B, C]) == {0: 0b11, 1: 0b1}
    assert union_of([]) == {}
    assert without(C, A) == {1: 0b1}
    assert without(B, A) == {0: 0b10}
    assert without(A, B) == {}
