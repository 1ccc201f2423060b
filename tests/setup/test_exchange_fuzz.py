# SPDX-License-Identifier: Apache-2.0
"""Mutated and random descriptions and tables: an error of ours, never a crash."""

import json
import random
import zlib

import pytest
from made_up import group, info

from torch_ring.errors import RingError
from torch_ring.setup import peer_info
from torch_ring.setup.frames import Kind, decode, encode
from torch_ring.setup.peer_info import HostInfo, host_info, pack_table, parse_table

CASES = 1000
JUNK = [None, True, -1, 1 << 70, 1.5, "", "x" * 5000, "\0", [], [[]], {}, {"a": 1}, float("nan")]


def mutated(value, dice):
    """Return a JSON value with one of its parts replaced, removed, repeated or added."""
    change = dice.random()
    if isinstance(value, dict) and value and dice.random() < 0.8:
        key = dice.choice(list(value))
        if change < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if change < 0.2:
            return {**value, dice.choice(["more", "rank", ""]): dice.choice(JUNK)}
        return {**value, key: mutated(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        at = dice.randrange(len(value))
        if change < 0.2:
            return value[:at] if change < 0.1 else value + value[at:]
        return [*value[:at], mutated(value[at], dice), *value[at + 1 :]]
    return dice.choice(JUNK)


def damaged(data, dice):
    """Return the bytes with some changed, missing or added."""
    data = bytearray(data)
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(data) + 1)
        change = dice.random()
        if change < 0.5 and at < len(data):
            data[at] ^= 1 << dice.randrange(8)
        elif change < 0.7:
            del data[at:]
        else:
            data[at:at] = dice.randbytes(dice.randrange(1, 20))
        data = data or bytearray(b"\0")
    return bytes(data)


def table_of(size=6):
    return pack_table([group(range(s, s + 3), size, s // 3) for s in range(0, size, 3)])


def refused(read, data, refusal) -> bool:
    try:
        read(data)
    except refusal:
        return True
    return False


def read_host(data):
    found = HostInfo.of_value(peer_info.unpack(data, 6), 6)
    assert len(found.ranks) <= 6
    pack_table([found])


@pytest.mark.parametrize(
    ("good", "read", "refusal"),
    [
        (table_of(), lambda data: parse_table(data, 6), RingError),
        (peer_info.pack(group(range(3), 6).to_value()), read_host, ValueError),
    ],
    ids=["table", "host"],
)
def test_what_was_sent(good, read, refusal):
    dice, accepted = random.Random(1), 0
    read(good)
    value = peer_info.unpack(good, 6)
    for case in range(CASES):
        data = peer_info.pack(mutated(value, dice)) if case % 2 else damaged(good, dice)
        accepted += not refused(read, data, refusal)
    assert accepted < CASES / 2  # mutations that are still valid messages


def test_values_of_ranks():
    dice, good = random.Random(3), [info(1), json.dumps({"A": 1})]
    own = [info(0), json.dumps({"A": 1})]
    for _ in range(CASES):
        refused(lambda sent: host_info(0, 2, {0: own, 1: sent}), mutated(good, dice), RingError)


def test_frames_in_a_store_are_whole():
    good = encode(Kind.VALUE, b"of a host")
    for data in (good[:-1], good + b"x", good[:5], b"", encode(Kind.DATA, b"of a host")):
        with pytest.raises(ValueError, match="no frame"):
            decode(data, [Kind.VALUE])


def test_a_bomb_eats_no_memory():
    bomb = zlib.compress(b'"' + b" " * (64 << 20) + b'"', 9)
    assert len(bomb) < 100_000
    with pytest.raises(ValueError, match=r"more than \d+ bytes"):
        peer_info.unpack(bomb, 8)
    with pytest.raises(RingError, match="another version"):
        parse_table(bomb, 8)


def test_deep_nesting_is_refused():
    for text in (b"[" * 100_000, b'{"a":' * 50_000):
        with pytest.raises(ValueError, match=r"."):
            peer_info.unpack(zlib.compress(text), 100)


def test_a_host_without_a_machine_is_refused():
    value = group(range(1), 1).to_value()
    del value["infos"][0]["machine"]
    with pytest.raises(ValueError, match="it has not one machine"):
        HostInfo.of_value(value, 1)
