# SPDX-License-Identifier: Apache-2.0
"""Values of the store: each counts only under the name at which a rank has stored it."""

import threading

import pytest
from made_up import exchange_on, group
from threads import run_on_ranks
from torch.distributed import FileStore, HashStore

from torch_ring.errors import RingError
from torch_ring.setup.failure import Failure
from torch_ring.setup.frames import Kind, decode, encode
from torch_ring.setup.job_key import AuthenticatedStore, JobKey
from torch_ring.setup.peer_info import HostInfo, pack, unpack

KEY = JobKey("a secret", "job 1")
NOT_OURS = "is not from a rank of this job: is TORCH_RING_SECRET the same on all ranks"


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (JobKey("a secret", "job 1"), "0/value/2"),
        (JobKey("a secret", "job 2"), "0/value/1"),
        (JobKey("another", "job 1"), "0/value/1"),
        (JobKey("", "job 1"), "0/value/1"),
    ],
    ids=["another name", "another job", "another secret", "no secret"],
)
def test_a_value_of_elsewhere_is_refused(other, name):
    store = HashStore()
    AuthenticatedStore(store, other).set(name, b"value")
    store.set("0/value/1", store.get(name))
    with pytest.raises(RingError, match=f"'0/value/1' in the store {NOT_OURS}"):
        AuthenticatedStore(store, KEY).get("0/value/1")


def test_a_changed_value_is_refused():
    store = HashStore()
    ours = AuthenticatedStore(store, KEY)
    ours.set("a", b"value")
    good = store.get("a")
    assert AuthenticatedStore(store, KEY).get("a") == b"value"
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        store.set("a", bytes(data))
        with pytest.raises(RingError, match=NOT_OURS):
            ours.get("a")
    for data in (b"", good[:-1], good[:31], good + b"x"):
        store.set("a", data)
        with pytest.raises(RingError, match=NOT_OURS):
            ours.get("a")


def test_the_key_of_a_world_follows_from_the_secret_and_from_all_that_was_told():
    keys = [
        KEY.of_world(b"table", b"machines"),
        KEY.of_world(b"Table", b"machines"),
        KEY.of_world(b"tablem", b"achines"),
        JobKey("another", "job 1").of_world(b"table", b"machines"),
        JobKey("a secret", "job 2").of_world(b"table", b"machines"),
        KEY.tag("table", b"machines"),
    ]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}
    assert KEY.of_world(b"table", b"machines") == keys[0]


# --- whole exchanges over a store into which a stranger writes


def meet(store, rank, key, timeout_s=5.0):
    """Take part as a host of one rank, of three; return the addresses of all."""
    side = exchange_on(AuthenticatedStore(store, key), range(rank, rank + 1), 3, timeout_s)
    try:
        values = side.gather(group(range(rank, rank + 1), 3, rank).to_value())
    except RingError as error:
        side.fail(Failure.of_all(error))
        raise
    return [value["infos"][0]["addresses"][0] for value in values]


class Meddled(HashStore):
    """A store; a stranger changes its values as soon as they are stored."""

    def __init__(self, change):
        super().__init__()
        self.change, self.values, self.lock = change, {}, threading.Lock()

    def set(self, key, value):
        with self.lock:
            self.values[key] = value
            super().set(key, self.change(key, value, self.values))


def redirected(key, value, values):
    """Change the address in rank 1's value, and not its tag."""
    if "value/" not in key:
        return value
    info = HostInfo.of_value(unpack(decode(value[32:], [Kind.VALUE])[1], 3), 3)
    for each in info.infos:
        each["addresses"] = ["10.6.6.6"]
    return value[:32] + encode(Kind.VALUE, pack(info.to_value()))


def swapped(key, value, values):
    """Return the first group's value in place of any group's."""
    return next(v for k, v in values.items() if "value/" in k) if "value/" in key else value


def forged(key, value, values):
    """Replace the values by a made-up failure."""
    text = encode(Kind.FAILURE, b"Please type your password at evil.example")
    return JobKey("", "job 1").tag(key, text) + text if "/values/" in key else value


@pytest.mark.parametrize("change", [redirected, swapped, forged])
def test_a_store_that_meddles_is_noticed_under_a_secret(change):
    store = Meddled(change)
    errors = run_on_ranks(3, lambda rank: meet(store, rank, KEY))
    refused = [error for error in errors if isinstance(error, RingError)]
    assert refused, errors
    assert len(refused) == 3 or change is not redirected  # some have read unchanged values
    for error in refused:
        assert "evil" not in str(error)
        assert "10.6.6.6" not in str(error)
    assert any(NOT_OURS in str(error) for error in refused), refused


def test_the_own_value_is_checked_even_without_a_secret():
    """A stranger can forge values then; a rank whose value it changes still sees that."""

    def change(key, value, values):
        if "/values/" not in key:
            return value
        payload = decode(value[32:], [Kind.VALUES])[1]
        found = unpack(payload[2:], 3)
        for each in found:
            if each["leader"] == 1:
                each["infos"][0]["addresses"] = ["10.6.6.6"]
        data = encode(Kind.VALUES, payload[:2] + pack(found))
        return JobKey().tag(key, data) + data

    store = Meddled(change)
    errors = run_on_ranks(3, lambda rank: meet(store, rank, JobKey()))
    assert isinstance(errors[1], RingError)
    assert "have another one of rank 1 than it has sent" in str(errors[1])


def test_a_damaged_counter_of_a_file_is_an_error_of_ours(tmp_path):
    store = FileStore(str(tmp_path / "store"), -1)
    store.set("0/places", b"many")
    with pytest.raises(RingError, match="'0/places' in the store is damaged"):
        exchange_on(AuthenticatedStore(store, KEY), range(1), 2)
