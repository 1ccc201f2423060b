"""Faulty compressors and wrong use of compressors: an error on all ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pool import run
from torch import Tensor, nn
from torch.optim import SGD
from training import joined_batches, loss_of, make_model, part, train

import torch_ring as hvd


class Faulty(hvd.StatefulCompressor):
    """Does something wrong on rank 1, in the second round of a matrix."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def reduce(self, gradient: Tensor, state: dict[str, Any]) -> Iterator[Any]:
        mean = yield hvd.Reduce(gradient)
        if gradient.dim() < 2:
            return mean
        here = hvd.rank() == 1
        if self.fault == "asks for less" and here:
            return mean
        if self.fault == "asks for more" and not here:
            return mean
        if self.fault == "raises" and here:
            raise KeyError("a secret")
        if self.fault == "returns nothing" and here:
            return None
        if self.fault == "asks nonsense" and here:
            yield gradient
        if self.fault == "another shape" and here:
            yield hvd.Reduce(gradient[0])
        if self.fault == "another kind" and here:
            yield hvd.Gather(gradient)
        yield hvd.Reduce(gradient)
        return mean


FAULTS = {  # the messages of the other ranks, and of rank 1
    "asks for less": [r"rank 0: reduce for '0.weight'.*; rank 1: nothing more"] * 2,
    "asks for more": [r"rank 0: nothing more; rank 1: reduce for '0.weight'"] * 2,
    "another shape": [r"float32 \[16, 8\]; rank 1: reduce for '0.weight' float32 \[8\]"] * 2,
    "another kind": [r"rank 0: reduce for '0.weight'.*; rank 1: gather for '0.weight'"] * 2,
    "raises": [r"failed on rank 1: KeyError: 'a secret'", r"^'a secret'$"],
    "returns nothing": [
        r"failed on rank 1: ValueError: '0.weight'.* None",
        r"^'0.weight': reduce\(\) returned None, not a tensor of shape \[16, 8\]",
    ],
    "asks nonsense": [
        r"failed on rank 1: TypeError: '0.weight'",
        r"^'0.weight': yield Gather or Reduce, not tensor",
    ],
}


def check_faults() -> None:
    kinds = {"raises": KeyError, "returns nothing": ValueError, "asks nonsense": TypeError}
    for fault, messages in FAULTS.items():
        model = nn.Sequential(nn.Linear(8, 16))
        optimizer = hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            compression=Faulty(fault),
        )
        kind: type[Exception] = hvd.MismatchError
        if fault in kinds:
            kind = kinds[fault] if hvd.rank() == 1 else hvd.RingError
        with pytest.raises(kind, match=messages[hvd.rank() == 1]):
            model(torch.ones(2, 8)).sum().backward()
        del optimizer
    assert hvd.allreduce(torch.tensor([2.0 * hvd.rank()])).item() == hvd.size() - 1


@pytest.mark.parametrize(("transport", "size"), [("shm", 3), ("tcp", 2)])
def test_a_faulty_compressor_is_an_error_on_all_ranks(transport, size):
    run(check_faults, size, transport=transport)


class NoGenerator(hvd.StatefulCompressor):
    """Forgets to yield."""

    def reduce(self, gradient: Tensor, state: dict[str, Any]) -> Any:
        return gradient


def check_refusals() -> None:
    model, other = make_model(), make_model()

    def wrap(model: nn.Module, compression: Any) -> torch.optim.Optimizer:
        return hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), compression=compression)

    with pytest.raises(ValueError, match=r"an instance, Int8Compressor\(\), not the class"):
        wrap(model, hvd.Compression.int8)
    for compression in (hvd.Compression.int8(), hvd.Compression.int8):
        with pytest.raises(ValueError, match=r"Int8Compressor .* in DistributedOptimizer only"):
            hvd.allreduce(torch.ones(2), compression=compression)
    with pytest.raises(hvd.MismatchError, match=r"rank=1, seed=0.*rank=2, seed=0"):
        wrap(model, hvd.Compression.powersgd(rank=hvd.rank() + 1))
    shared = hvd.Compression.powersgd()
    optimizer = wrap(model, shared)
    with pytest.raises(ValueError, match="already serves another parameter"):
        wrap(other, shared)
    train(model, optimizer, map(part, joined_batches(steps=1)))
    optimizer = wrap(other, NoGenerator())
    with pytest.raises(TypeError, match=r"reduce\(\) of NoGenerator\(\) is no generator"):
        loss_of(other, torch.ones(2, 8)).backward()


def test_wrong_use_of_compressors():
    run(check_refusals, 2)
