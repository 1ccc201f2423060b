"""explained: the error of a rank that waits for other ranks' gradients, with the likely cause.

The commonest mistake in data-parallel training is that ranks have different numbers of batches. One
rank then waits in backward() while another one has left, or has gone on to something else.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_ring.errors import MismatchError, PeerLostError, RingError

__all__ = ["explained", "require_same_steps"]

_REMEDY = (
    "has it fewer batches, or has it stopped early? Give all ranks equally many (drop_last=True in "
    "the sampler and the loader, or equal shards), or let a rank that has no more call join(); let "
    "all ranks stop together, as any_rank() lets them"
)
_REMEDY_IN_ANOTHER_COLLECTIVE = (
    "If it has as many, look for a collective that only some ranks call, as under "
    "`if rank() == 0:`: all ranks must call it"
)


def explained(error: RingError, purpose: str, done: str) -> RingError | None:
    """Return an error of the same type that says what may be wrong; None if nothing is to be added.

    Args:
        error: of an operation in which the ranks agree on their gradients.
        purpose: begins the error's text, unless the world had failed before the operation began.
        done: what all ranks have done before.
    """
    text = str(error)
    if type(error) is RingError:  # of the set, not of the ranks: shut down, say
        return None
    if purpose not in text:
        rank = purpose.partition(": ")[0]
        text = f"{purpose}: {text.removeprefix(f'{rank}: ')}"
    if "this world has ended" not in text:  # if it has, another operation's error says why
        text += _hint(error, done)
    return type(error)(text) if text != str(error) else None


def require_same_steps(steps: Sequence[int], size: int) -> None:
    """Check that ranks are in the same step.

    Args:
        steps: optimizer steps that each rank has taken; without the ranks that have joined.
        size: the number of all ranks.

    Raises:
        MismatchError: they are not; names two ranks.
    """
    who = "rank" if len(steps) == size else "of the ranks that have not joined, number"
    for rank, other in enumerate(steps):
        if other != steps[0]:
            raise MismatchError(
                f"the ranks are in different steps: {who} 0 has taken {steps[0]} optimizer "
                f"steps, {who} {rank} {other}. Every rank must call step() equally often, and "
                "backward() equally often between two steps (a rank without data may leave "
                "it out). If an exception like KeyboardInterrupt was caught on a rank, it may "
                "have left a step out, and its weights differ: call shutdown() and init(), and "
                "go on from a checkpoint"
            )


def _hint(error: RingError, done: str) -> str:
    if isinstance(error, PeerLostError):
        if " has left" not in str(error):  # it has died
            return ""
        return f". The rank that has left did {done}: {_REMEDY}"
    hint = f". All ranks have done {done}, one does not do the next: {_REMEDY}"
    if isinstance(error, MismatchError):
        hint += f". {_REMEDY_IN_ANOTHER_COLLECTIVE}"
    return hint
