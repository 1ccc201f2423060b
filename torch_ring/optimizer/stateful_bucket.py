"""StatefulBucket: a bucket whose gradients a stateful compressor reduces, round by round."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_ring._C import GradientHooks
from torch_ring.compression.stateful import Gather, Reduce, Request, State, StatefulCompressor
from torch_ring.errors import RingError
from torch_ring.optimizer.buckets import Bucket
from torch_ring.optimizer.compressor_round import Collectives, CompressorRound
from torch_ring.optimizer.compressor_state import state_if_finite

__all__ = ["BucketCompression", "StatefulBucket"]


@dataclass(frozen=True)
class BucketCompression:
    """The stateful compressor of one optimizer, and what it needs to reduce a bucket.

    Attributes:
        compressor: serves this optimizer alone.
        named_parameters: of the optimizer, in the order of their indices.
        collectives: answer its requests.
        scale: multiplies the means: the number of ranks for op=Sum, else 1.
    """

    compressor: StatefulCompressor
    named_parameters: Sequence[tuple[str, Tensor]]
    collectives: Collectives
    scale: int

    def __post_init__(self) -> None:
        self.compressor.serve(dict(self.named_parameters))


class StatefulBucket:
    """A `BucketWire` whose gradients a stateful compressor reduces.

    Args:
        compression: shared by the buckets of an optimizer.
        bucket: this one.
        hooks: of the optimizer's parameters.
    """

    is_launchable = False
    buffer: Tensor | None = None

    def __init__(
        self, compression: BucketCompression, bucket: Bucket, hooks: GradientHooks
    ) -> None:
        self._compression = compression
        self._bucket = bucket
        self._hooks = hooks

    def start(
        self,
        name: Callable[[int], str],
        memory: Tensor,  # noqa: ARG002
        touched: int,
        *,
        blocking: bool,  # noqa: ARG002  every round waits
    ) -> list[Callable[[], bool]]:
        """Start to reduce the touched gradients of the bucket."""
        gradients: dict[str, Tensor] = {}
        for slot in self._bucket.slots:
            if touched >> slot.parameter & 1 and slot.numel:
                parameter_name, _ = self._compression.named_parameters[slot.parameter]
                view = self._hooks.bucket_view(slot.parameter)
                gradients[parameter_name] = torch.view_as_real(view) if view.is_complex() else view
        return [_StatefulReduction(self._compression, name(0), gradients).advance]


class _StatefulReduction:
    """Gradients of one bucket that a stateful compressor reduces in place.

    All generators run to their next request, the requests of all are answered, and so on until
    none is left. The last round is empty, so that a rank that asks once more than the others gets
    an error and does not wait for them.

    Thread: the one that runs backward(); the first round may begin in a thread of autograd.
    Blocking: `advance`.
    """

    def __init__(
        self, compression: BucketCompression, name: str, gradients: Mapping[str, Tensor]
    ) -> None:
        self._collectives = compression.collectives
        self._name = name
        self._rounds = 0
        self._failures: list[Exception] = []  # not more than one, until it is raised
        started = [_CompressedGradient(compression, *item) for item in gradients.items()]
        self._begin((gradient, None) for gradient in started)

    def advance(self) -> bool:
        """Wait for the answers of a round and begin the next; return whether there is a next.

        Raises:
            Exception: what the compressor raised on this rank.
            RingError: it failed on another one.
            MismatchError: the generators ask for different things on two ranks.
        """
        try:
            answers = self._round.answers()
        except RingError as error:
            if self._failures:
                raise self._failures.pop() from error
            raise
        if self._asking:
            self._begin(zip(self._asking, answers, strict=True))
            return True
        return False

    def _begin(self, answers: Iterable[tuple[_CompressedGradient, Any]]) -> None:
        """Resume the generators with their answers, and send their next requests."""
        requests: dict[_CompressedGradient, Request] = {}
        failure = None
        try:
            for gradient, answer in answers:
                request = gradient.resume(answer)
                if request is not None:
                    requests[gradient] = request
        except Exception as error:  # raised with the answers: then the other ranks know it too
            self._failures.append(error)
            requests, failure = {}, f"{type(error).__name__}: {error}"
        self._asking = list(requests)
        by_name = {gradient.name: request for gradient, request in requests.items()}
        self._round = CompressorRound(
            self._collectives, f"{self._name}.{self._rounds}", by_name, failure
        )
        self._rounds += 1


class _CompressedGradient:
    """One gradient and its generator."""

    def __init__(self, compression: BucketCompression, name: str, gradient: Tensor) -> None:
        self.name = name
        self._states = compression.compressor.states
        self._scale = compression.scale
        self._gradient = gradient
        self._state: State = dict(self._states.get(name, {}))
        wide = gradient.float() if gradient.dtype.itemsize < 4 else gradient
        self._generator = compression.compressor.reduce(wide, self._state)
        if not isinstance(self._generator, Generator):
            raise TypeError(
                f"reduce() of {compression.compressor} is no generator: it does not yield"
            )

    def resume(self, answer: Any) -> Request | None:
        """Return the next request; None when the gradient is reduced."""
        try:
            # Autograd may have called us in the program's autocast region.
            with torch.no_grad(), torch.autocast(self._gradient.device.type, enabled=False):
                request = self._generator.send(answer)
        except StopIteration as stop:
            self._finish(stop.value)
            return None
        if not isinstance(request, Gather | Reduce):
            raise TypeError(f"'{self.name}': yield Gather or Reduce, not {request!r}")
        return request

    def _finish(self, mean: Any) -> None:
        if not isinstance(mean, Tensor) or mean.shape != self._gradient.shape:
            got = list(mean.shape) if isinstance(mean, Tensor) else repr(mean)
            raise ValueError(
                f"'{self.name}': reduce() returned {got}, not a tensor of shape "
                f"{list(self._gradient.shape)}"
            )
        before = self._states.get(self.name, {})
        state = state_if_finite(mean, self._state, before)
        if state or before:
            self._states[self.name] = state
        self._gradient.copy_(mean if self._scale == 1 else mean * self._scale)
