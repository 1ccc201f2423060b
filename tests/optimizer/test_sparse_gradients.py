# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients: on all ranks, on some of them, with rows or without."""

import pytest
import torch
from pool import error_of, run
from torch import Tensor, nn
from torch.optim import SGD
from worlds import on_both_transports

import torch_ring as hvd

WORDS, WIDTH = 12, 3


def accumulate(options: dict[str, object]) -> None:
    """Backward after backward without a step: reduced gradients are not counted again."""
    words, other = nn.Embedding(WORDS, WIDTH, sparse=True), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(SGD([words.weight, other], lr=1.0), **options)
    share = 1 if options.get("op") == hvd.Sum else hvd.size()
    for step in range(1, 9):
        if step == 4:  # one rank has nothing to add
            (words(torch.tensor([1])) if hvd.rank() == 1 else other).sum().backward()
        else:
            with optimizer.no_sync():
                words(torch.tensor([0])).sum().backward()
            words(torch.tensor([0, 1])).sum().backward()
        gradient = words.weight.grad
        passes = (step - (step > 3)) * hvd.size()
        ones = passes + (step > 3)
        assert gradient.to_dense()[:, 0].tolist() == pytest.approx(
            [2 * passes / share, ones / share] + [0] * (WORDS - 2)
        )
        assert gradient._nnz() <= 2 * hvd.size(), "the sum does not grow"


def mix_kinds(sparse_as_dense: bool) -> None:
    """Some ranks have no gradient, or no rows, or a dense one."""
    words = nn.Embedding(WORDS, WIDTH)
    weight = words.weight
    optimizer = hvd.DistributedOptimizer(
        SGD([weight], lr=1.0), [("words", weight)], sparse_as_dense=sparse_as_dense
    )

    def look(numbers: list[int], sparse: bool) -> Tensor:
        words.sparse = sparse
        return words(torch.tensor(numbers, dtype=torch.int64)).sum() * hvd.size()

    def expect(rows: dict[int, int], sparse: bool) -> None:
        assert weight.grad.is_sparse == sparse
        expected = [rows.get(row, 0) for row in range(WORDS)]
        assert weight.grad.to_dense()[:, 0].tolist() == pytest.approx(expected)
        before = weight.detach().clone()
        optimizer.step()
        torch.testing.assert_close(weight[:, 0], before[:, 0] - torch.tensor(expected))
        optimizer.zero_grad(set_to_none=not sparse)

    for _ in range(2):
        look([5, 6][: hvd.rank() + 1], sparse=True).backward()
        expect({5: hvd.size(), 6: hvd.size() - 1}, sparse=True)
        if hvd.rank() == 1:  # a gradient on one rank only
            look([2], sparse=True).backward()
        optimizer.synchronize()
        expect({2: 1}, sparse=True)
        look([7] if hvd.rank() == 0 else [], sparse=True).backward()
        expect({7: 1}, sparse=True)
        weight.grad = None
        look([8, hvd.rank()], sparse=hvd.rank() == 0).backward()
        expect({8: hvd.size(), **dict.fromkeys(range(hvd.size()), 1)}, sparse=False)
        # By hand, and only found at the step.
        rows = torch.tensor([[hvd.rank()]])
        weight.grad = torch.sparse_coo_tensor(rows, torch.ones(1, WIDTH), weight.shape)
        optimizer.synchronize()
        expect({rank: 1 / hvd.size() for rank in range(hvd.size())}, sparse=True)


def check_kinds() -> None:
    """Check other dtypes, and gradients that are sparse in all dimensions."""
    for dtype in (torch.float64, torch.bfloat16, torch.complex64):
        weight = nn.Parameter(torch.zeros(4, 2, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(SGD([weight], lr=1.0))
        index = torch.tensor([[0, 1]]) if hvd.rank() == 0 else torch.tensor([[1, 0], [0, 0]])
        gathered = torch.gather(weight, 0, index, sparse_grad=True)
        gathered.backward(torch.full_like(gathered, 2))
        assert weight.grad.sparse_dim() == 2
        assert weight.grad.dtype == dtype
        expected = torch.tensor([[2, 2], [1, 1], [0, 0], [0, 0]], dtype=dtype)
        assert torch.equal(weight.grad.to_dense(), expected)
        if not dtype.is_complex:
            optimizer.step()
            assert torch.equal(weight, -expected)


def disagree_about_dimensions() -> None:
    weight = nn.Parameter(torch.zeros(4, 2))
    optimizer = hvd.DistributedOptimizer(SGD([weight], lr=1.0), [("words", weight)])
    dense = torch.eye(4)[:, :2]
    weight.grad = dense.to_sparse(1 + hvd.rank())
    _, text = error_of(optimizer.step)
    assert text == (
        "averaging the sparse gradient of 'words' of backward pass 1: the ranks disagree: "
        "rank 0: sparse_dim 1; rank 1: sparse_dim 2"
    )
    weight.grad = None
    weight[hvd.rank()].sum().backward()  # the job may go on
    assert weight.grad[:2].tolist() == [[0.5, 0.5]] * 2


@pytest.mark.parametrize(
    ("check", "args", "size"),
    [
        (accumulate, ({"op": hvd.Sum},), 3),
        (accumulate, ({"sparse_as_dense": True},), 2),
        (mix_kinds, (False,), 3),
        (mix_kinds, (True,), 2),
        (check_kinds, (), 2),
        (disagree_about_dimensions, (), 2),
    ],
)
@on_both_transports
def test_sparse_gradients(transport, check, args, size):
    run(check, size, args=args, transport=transport)
