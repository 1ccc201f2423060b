# SPDX-License-Identifier: Apache-2.0
"""StatefulCompressor: the interface of compressors with a state and a wire format of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, NoReturn, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from torch import Tensor

__all__ = ["ErrorFeedback", "Gather", "Reduce", "Request", "State", "StatefulCompressor"]

State: TypeAlias = dict[str, Any]
"""A compressor's state for one parameter; empty at first; every rank has its own."""


class Gather:
    """Asks for the `tensors` of all ranks.

    ``yield Gather(a, b)`` gives a list with a tuple ``(a, b)`` for each rank, in rank order.

    Args:
        tensors: any number of them, of any shapes and dtypes, which may differ between ranks.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors


class Reduce:
    """Asks for the mean of `tensor` over all ranks.

    ``yield Reduce(a)`` gives a new tensor of the shape and dtype of `a`, equal on all ranks bit by
    bit.

    Args:
        tensor: of floating point; the same shape and dtype on every rank.

    Raises:
        ValueError: `tensor` is not of floating point.
    """

    def __init__(self, tensor: Tensor) -> None:
        if not tensor.is_floating_point():
            raise ValueError(f"Reduce makes a mean, which {tensor.dtype} cannot hold")
        self.tensors = (tensor,)


Request: TypeAlias = Gather | Reduce

CompressorT = TypeVar("CompressorT", bound="StatefulCompressor")


class StatefulCompressor(ABC):
    """The interface of a compressor that computes a gradient's mean over the ranks.

    Give an instance to ``DistributedOptimizer(compression=...)``, one to each optimizer. The
    requests of all gradients of a bucket travel together, in one round for each ``yield``.

    A subclass keeps its settings in attributes: the ranks check that theirs are equal.
    """

    states: dict[str, State]
    """The states by parameter name."""

    _served: WeakValueDictionary[str, Tensor]

    def __new__(cls: type[CompressorT], *_args: Any, **_kwargs: Any) -> CompressorT:
        """Make the attributes even if a subclass's `__init__` does not call this class's."""
        self = super().__new__(cls)
        self.states = {}
        self._served = WeakValueDictionary()
        return self

    @abstractmethod
    def reduce(self, gradient: Tensor, state: State) -> Generator[Request, Any, Tensor]:
        """Return the mean of `gradient` over all ranks, or an approximation.

        A generator: ``answer = yield Gather(...)`` or ``yield Reduce(...)``, as often as it takes,
        but equally often on all ranks. The result must be the same on all ranks, so compute it from
        the answers alone. With op=Sum it is multiplied by the number of ranks afterwards.

        Args:
            gradient: this rank's gradient in the shape of the parameter, float32 or float64; a
                complex one has a last dimension of 2. It may be overwritten: clone it to keep it.
            state: this parameter's state. Changes are kept if the result is finite; otherwise
                ``GradScaler`` skips the step. So replace tensors, do not write into them. On a
                device the host waits for the result unless the changes are tensors there, of the
                same shapes as before.

        Returns:
            The mean, in the shape and dtype of `gradient`.

        Raises:
            Exception: any exception ends the backward pass on all ranks.
        """

    def state_dict(self) -> dict[str, State]:
        """Return the states by parameter name. They are this rank's alone."""
        return {name: dict(state) for name, state in self.states.items()}

    def load_state_dict(self, state_dict: Mapping[str, State]) -> None:
        """Continue with the states of an earlier run.

        Args:
            state_dict: the states that `state_dict` returned on this rank.
        """
        self.states = {name: dict(state) for name, state in state_dict.items()}

    def serve(self, parameters: Mapping[str, Tensor]) -> None:
        """Keep the states of some parameters from now on. An optimizer calls it.

        Args:
            parameters: by name.

        Raises:
            ValueError: the compressor already serves another parameter of the same name.
        """
        for name, parameter in parameters.items():
            if self._served.get(name, parameter) is not parameter:
                raise ValueError(
                    f"{self} already serves another parameter named '{name}': give every "
                    "optimizer a compressor of its own"
                )
        self._served.update(parameters)

    @classmethod
    def compress(cls, tensor: Tensor) -> NoReturn:  # noqa: ARG003
        """Refuse: operations other than an optimizer's call this method.

        Args:
            tensor: ignored.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{cls.__name__} keeps a state for each parameter, so that it works in "
            "DistributedOptimizer only"
        )

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> NoReturn:  # noqa: ARG003
        """Refuse, like `compress`.

        Args:
            tensor: ignored.
            ctx: ignored.

        Raises:
            ValueError: always.
        """
        cls.compress(tensor)

    def __repr__(self) -> str:
        settings = ", ".join(
            f"{key}={value!r}"
            for key, value in vars(self).items()
            if not key.startswith("_") and isinstance(value, bool | int | float | str | None)
        )
        return f"{type(self).__qualname__}({settings})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the served parameters: a copy serves other parameters."""
        return {key: value for key, value in vars(self).items() if key != "_served"}


class ErrorFeedback(StatefulCompressor):
    """Adds the compression error of earlier gradients to each gradient, so that it arrives later.

    On each rank, the sum of all sent tensors and of the current error is the sum of all gradients.

    Source: F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014; S. P. Karimireddy et al.,
    "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
    """

    @abstractmethod
    def send(
        self, gradient: Tensor, state: State
    ) -> Generator[Request, Any, tuple[Tensor, Tensor]]:
        """Return the mean over ranks of the sent parts of gradients, and this rank's sent part.

        A generator with requests, like `reduce`: equally many on all ranks, and the mean computed
        from their answers alone.

        Args:
            gradient: this rank's gradient plus the error of the earlier ones, in the shape of the
                parameter, float32 or float64. It must not be overwritten.
            state: this parameter's state. Replace its tensors, do not write into them.

        Returns:
            The mean of the parts that the ranks have sent, and the part of `gradient` that this
            rank has sent; both in the shape of `gradient`. The rest of it is the next error.

        Raises:
            Exception: any exception ends the backward pass on all ranks.
        """

    def reduce(self, gradient: Tensor, state: State) -> Generator[Request, Any, Tensor]:
        """Return the mean of the gradients' parts that the ranks send, by `send`.

        Args:
            gradient: this rank's gradient, in the shape of the parameter.
            state: this parameter's state; its entry ``"error"`` is the sum not sent so far.

        Returns:
            The mean over the ranks.

        Raises:
            ValueError: the state is that of a parameter of another shape.
        """
        owed = state.get("error")
        if owed is not None:
            if owed.shape != gradient.shape:
                raise ValueError(
                    f"its state is of shape {list(owed.shape)}, its gradient of "
                    f"{list(gradient.shape)}: load_state_dict() was given another model's"
                )
            # The error is on another device if the state was loaded on the host, or the model
            # moved.
            gradient = gradient + owed.to(gradient.device, non_blocking=True)
        mean, sent = yield from self.send(gradient, state)
        state["error"] = gradient - sent
        return mean
