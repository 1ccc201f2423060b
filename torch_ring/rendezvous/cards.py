"""pack, unpack, columns, rows: the cards of many ranks as one small value, checked when read.

A card is what a rank tells the others of itself: a dictionary of plain values. The cards of a group
travel as columns, and a column whose values are all the same as one value.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MOST_BYTES_A_CARD", "columns", "pack", "rows", "unpack"]

MOST_BYTES_A_CARD = 4096
"""Bytes that a rank's card has at most, as JSON; a real one has about 200."""

_MOST_BYTES_BESIDE = 1 << 16  # of what is told once: names of keys, settings, failures


def pack(value: Any) -> bytes:
    """Return a JSON value, compressed."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 6)


def unpack(data: bytes, count: int) -> Any:
    """Return the value that was packed; of `data` nothing is believed.

    Args:
        data: what was sent.
        count: the number of ranks whose cards it may have: it bounds the memory that is used.

    Raises:
        ValueError: `data` is damaged, or is larger than so many cards can be.
    """
    most = count * MOST_BYTES_A_CARD + _MOST_BYTES_BESIDE
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(data, most)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not inflate.eof:
        raise ValueError(f"more than {most} bytes" if len(text) == most else "it is cut off")
    if inflate.unused_data:
        raise ValueError("something follows it")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def columns(cards: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns of some cards: a list of one value, or of a value for each card.

    Raises:
        ValueError: the cards have different fields.
    """
    fields = list(cards[0])
    if any(card.keys() != cards[0].keys() for card in cards):
        raise ValueError("the cards have different fields")
    full = {field: [card[field] for card in cards] for field in fields}
    return {
        field: values[:1] if all(_same(value, values[0]) for value in values) else values
        for field, values in full.items()
    }


def rows(packed: Any, count: int) -> dict[str, list[Any]]:
    """Return the full columns, `count` values each, of what `columns` has made.

    Raises:
        ValueError: `packed` is something else.
    """
    if not isinstance(packed, dict):
        raise ValueError("there are no columns")
    full = {}
    for field, values in packed.items():
        if not isinstance(values, list) or len(values) not in (1, count):
            raise ValueError(f"column {field!r:.40} does not have {count} values")
        full[field] = values * count if len(values) < count else values
    return full


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)  # 1 == True
