# SPDX-License-Identifier: Apache-2.0
"""Compressors without a network: the tests answer the requests of their generators."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from training_compressors import COMPRESSORS

import torch_ring as hvd
from torch_ring.compression.int8 import dequantize, quantize


def run_exchange(
    compressor: hvd.StatefulCompressor, gradients: list[Tensor], states: list[dict[str, Any]]
) -> list[Tensor]:
    """Run the generators of some ranks, one gradient on each, and return their results."""
    running = [
        compressor.reduce(gradient.clone(), state)
        for gradient, state in zip(gradients, states, strict=True)
    ]
    answers: list[Any] = [None] * len(running)
    while True:
        requests, results = [], []
        for generator, answer in zip(running, answers, strict=True):
            try:
                requests.append(generator.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            assert not requests, "a rank asks more often than another"
            return results
        if isinstance(requests[0], hvd.Reduce):
            mean = torch.stack([request.tensors[0] for request in requests]).mean(0)
            answers = [mean.clone() for _ in running]
        else:
            answers = [[request.tensors for request in requests] for _ in running]


@pytest.mark.parametrize("name", COMPRESSORS)
def test_sent_and_error_add_up_to_the_gradients(name):
    """Each rank keeps the unsent part as its error; all ranks get the same bits."""
    compressor = COMPRESSORS[name]()
    generator = torch.Generator().manual_seed(3)
    states: list[dict[str, Any]] = [{} for _ in range(3)]
    arrived, true = torch.zeros(12, 5, 2), torch.zeros(12, 5, 2)
    worst = 0.0
    for _ in range(8):
        gradients = [torch.randn(12, 5, 2, generator=generator) for _ in states]
        first, *others = run_exchange(compressor, gradients, states)
        assert all(torch.equal(first, other) for other in others)
        mean = torch.stack(gradients).mean(0)
        worst = max(worst, (first - mean).abs().max().item())
        arrived += first
        true += mean
        owed = torch.stack([state["error"] for state in states]).mean(0)
        torch.testing.assert_close(arrived + owed, true, rtol=1e-5, atol=1e-5)
    assert worst > 1e-3, "nothing was lost, so that nothing was tested"


@pytest.mark.parametrize(("numel", "dtype"), [(17, torch.float64), (160, torch.float32)])
def test_quantize(numel, dtype):
    tensor = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(1))
    codes, scales = quantize(tensor, 16)
    assert codes.dtype == torch.int8
    assert codes.numel() < numel + 16
    assert scales.numel() == -(-numel // 16)
    error = (dequantize(codes, scales, tensor.shape) - tensor).abs()
    allowed = scales.expand_as(codes).flatten()[:numel] / 2
    assert (error <= allowed * 1.0001).all()
    for begin in range(0, numel, 16):  # a scale is that of the largest of its own elements
        largest = tensor[begin : begin + 16].abs().argmax()
        assert error[begin + largest] <= 1e-6


def test_quantize_keeps_zero_and_tiny_numbers():
    """Numbers too small for a division may be lost, but do not grow."""
    for value, error in ((0.0, 0.0), (2.7e-43, 3e-43), (1e-38, 1e-38), (3e-36, 1e-38)):
        tensor = torch.full((20,), value)
        back = dequantize(*quantize(tensor, 8), tensor.shape)
        assert (back - tensor).abs().max() <= error


def test_quantize_does_not_hide_overflow():
    for value in (torch.inf, -torch.inf, torch.nan):
        tensor = torch.ones(20)
        tensor[3] = value
        back = dequantize(*quantize(tensor, 8), tensor.shape)
        assert not back[3].isfinite()
        assert torch.equal(back[8:], tensor[8:])


def test_casts_leave_integers_as_they_are():
    numbers = torch.tensor([100_001])
    for cast in (hvd.Compression.fp16, hvd.Compression.bf16):
        assert torch.equal(cast.decompress(*cast.compress(numbers)), numbers)


def low_rank_matrix(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(12, rank, generator=generator) @ torch.randn(rank, 20, generator=generator)


def test_powersgd_is_exact_for_a_mean_of_its_rank():
    """A rank's error has nothing left in the space that was sent."""
    mean, besides = low_rank_matrix(2), low_rank_matrix(12)
    states: list[dict[str, Any]] = [{}, {}]
    compressor = hvd.Compression.powersgd(rank=2)
    results = run_exchange(compressor, [mean + besides, mean - besides], states)
    assert (mean.T @ besides).abs().max() > 1
    for result, state in zip(results, states, strict=True):
        torch.testing.assert_close(result, mean, rtol=1e-4, atol=1e-4)
        assert (mean.T @ state["error"]).abs().max() < 1e-3


def test_powersgd_warm_start_improves_from_step_to_step():
    """Warm start: the power iteration continues to the best approximation."""
    compressor, state = hvd.Compression.powersgd(rank=2), {}
    gradient = low_rank_matrix(12)
    losses = []
    for _ in range(30):
        state.pop("error", None)
        run_exchange(compressor, [gradient], [state])
        losses.append(state["error"].norm())
    best = torch.linalg.svdvals(gradient)[2:].norm()
    assert losses[0] > best * 1.02
    torch.testing.assert_close(losses[-1], best, rtol=1e-3, atol=0)


def test_powersgd_sends_small_tensors_whole():
    for shape in ((), (7,), (40, 2)):
        gradients = [torch.randn(shape), torch.randn(shape)]
        states: list[dict[str, Any]] = [{}, {}]
        results = run_exchange(hvd.Compression.powersgd(rank=4), gradients, states)
        torch.testing.assert_close(results[0], (gradients[0] + gradients[1]) / 2)
        assert states == [{}, {}]


def test_powersgd_survives_zero_gradients():
    compressor, state = hvd.Compression.powersgd(rank=2), {}
    gradient = low_rank_matrix(2)
    (result,) = run_exchange(compressor, [torch.zeros(12, 20)], [state])
    assert not result.any()
    total = sum(run_exchange(compressor, [gradient], [state])[0] for _ in range(3))
    torch.testing.assert_close(total, 3 * gradient, rtol=1e-3, atol=1e-3)


def test_invalid_settings_are_refused():
    for make in (
        lambda: hvd.Compression.int8(elements_per_scale=0),
        lambda: hvd.Compression.powersgd(rank=0),
        lambda: hvd.Reduce(torch.ones(2, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError, match=r"must be at least 1, not 0|int64 cannot hold"):
            make()
    for shape in ((4,), (3, 1)):
        with pytest.raises(ValueError, match="another model's"):
            run_exchange(hvd.Compression.int8(), [torch.ones(3)], [{"error": torch.ones(shape)}])


def test_copies_serve_other_parameters():
    """A compressor and its states can be pickled and copied; a copy may serve other parameters."""
    compressor = hvd.Compression.powersgd(rank=3)
    parameter, other = torch.ones(2), torch.zeros(2)
    compressor.serve({"weight": parameter})
    compressor.serve({"weight": parameter})
    compressor.states["weight"] = {"error": torch.ones(2)}
    with pytest.raises(ValueError, match=r"PowerSGDCompressor\(rank=3, seed=0\).*'weight'"):
        compressor.serve({"weight": other})
    for copied in (copy.deepcopy(compressor), pickle.loads(pickle.dumps(compressor))):
        copied.serve({"weight": other})
        assert repr(copied) == repr(compressor)
        assert copied.states["weight"]["error"].tolist() == [1, 1]


class Topk(hvd.StatefulCompressor):
    def reduce(self, gradient: torch.Tensor, state: dict[str, Any]) -> Any:
        return gradient


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("int8", "='int8' is no compressor, as compression=hvd.Compression.int8() would be"),
        (Topk, "=Topk is no compressor, as compression=Topk() would be"),
        (torch.float16, "=torch.float16 is no compressor, as compression=hvd.Compression.fp16"),
    ],
)
def test_a_wrong_value_is_named_as_it_was_typed(given: Any, text: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=re.escape(f"compression{text}")):
        hvd.DistributedOptimizer(torch.optim.SGD([parameter]), compression=given)


def test_a_collective_names_it_too() -> None:
    for call in (hvd.allreduce, hvd.reducescatter):
        with pytest.raises(ValueError, match=r"^compression='fp16' is no compressor, as"):
            call(torch.ones(2), compression="fp16")
