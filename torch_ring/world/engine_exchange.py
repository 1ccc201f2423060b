"""EngineExchange: values that all ranks exchange through the world's engine.

A store may be gone when a process set is made, so the world's engine carries the exchange.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_ring._C import Engine, Work

__all__ = ["EngineExchange"]

_NAME = "torch_ring.process_sets"


class EngineExchange:
    """One rank's side of exchanges among all ranks of a world.

    All ranks call the same methods in the same order. An interrupt (Ctrl-C) does not put them out
    of step: the exchange is finished first, since the other ranks have it already.

    A context manager: at its end it raises the exception of an interrupt that came meanwhile.

    Args:
        engine: the world's engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._interrupt: BaseException | None = None

    def __enter__(self) -> EngineExchange:
        return self

    def __exit__(self, *_: object) -> None:
        if self._interrupt is not None:
            raise self._interrupt

    def numbers(self, *values: int) -> list[list[int]]:
        """Return what all ranks give, by rank; 64-bit numbers, equally many on each.

        Raises:
            MismatchError: the other ranks do something else; the job may go on.
            PeerLostError, TimeoutError: as the world's engine raises them.
        """
        own = torch.tensor([values], dtype=torch.int64, device="cpu")
        gathered = self._finish(lambda: self._engine.allgather(own, f"{_NAME}.numbers"))
        numbers: list[list[int]] = gathered.tolist()
        return numbers

    def texts(self, text: str) -> list[str]:
        """Return the texts that all ranks give, by rank. Raises what `numbers` raises."""
        own = text.encode()
        sizes = [size for (size,) in self.numbers(len(own))]
        payload = torch.frombuffer(bytearray(own or b"\0"), dtype=torch.uint8)[: len(own)]
        gathered = self._finish(lambda: self._engine.allgather(payload, f"{_NAME}.texts"))
        parts = torch.split(gathered, sizes)
        return [bytes(part.numpy()).decode() for part in parts]

    def _finish(self, start: Callable[[], Work]) -> torch.Tensor:
        work = start()
        try:
            return _result(work)
        except Exception:
            raise
        except BaseException as interrupt:
            self._interrupt = interrupt
            return _result(work)


def _result(work: Work) -> torch.Tensor:
    result: torch.Tensor = work.wait()
    return result
