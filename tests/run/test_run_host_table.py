"""Slots of hosts that get a process, and their times, without real processes or a clock."""

from __future__ import annotations

import pytest

from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.run.growth import HostTable, Standbys, standby_command
from torch_ring.run.hosts import HostSlots, assign, find_hosts, parse_host_lines

TWO = [HostSlots("a", 1), HostSlots("b", 2)]


def table_of(hosts: list[HostSlots], **more: object) -> HostTable:
    """Return a table in which all slots have a process."""
    return HostTable(assign(hosts, sum(host.slots for host in hosts)), **more)


def places(slots) -> list[tuple[int, str, int]]:
    return [(slot.rank, slot.host, slot.local_rank) for slot in slots]


def test_a_process_that_fails_is_started_again_later_each_time_and_then_no_more():
    table = table_of([HostSlots("a", 2)])
    (_, slot) = assign([HostSlots("a", 2)], 2)
    now, delays = 0.0, []
    assert table.due(now) == []
    for _ in range(10):
        table.fail(slot, 1.0, now)
        at = now if table.due(now) else table.next_at(now)
        delays.append(at - now)
        now = at
        assert places(table.due(now)) == [(1, "a", 1)]
        table.start(slot)
    assert delays == [0, 0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    table.fail(slot, 1.0, now)
    assert (table.due(1e9), table.next_at(now)) == ([], None)


def test_a_process_that_has_lived_long_is_started_at_once():
    table = table_of([HostSlots("a", 1)])
    (slot,) = assign([HostSlots("a", 1)], 1)
    for _ in range(20):
        table.fail(slot, 1200.0, 5.0)
        assert places(table.due(5.0)) == [(0, "a", 0)]
        table.start(slot)


def test_slots_that_come_get_the_next_numbers_and_keep_them():
    table = table_of([HostSlots("a", 1)])
    table.update(TWO)
    assert places(table.due(0.0)) == [(1, "b", 0), (2, "b", 1)]
    assert [slot.local_size for slot in table.due(0.0)] == [2, 2]
    table.update([HostSlots("a", 1)])
    assert table.due(0.0) == []
    table.update([HostSlots("c", 1), *TWO])
    assert places(table.due(0.0)) == [(1, "b", 0), (2, "b", 1), (3, "c", 0)]


def test_slots_that_vanish_are_told_until_their_processes_have_ended():
    table = table_of(TWO)
    table.update([HostSlots("b", 1)])
    assert places(table.vanished()) == [(0, "a", 0), (2, "b", 1)]
    for slot in table.vanished():
        table.end(slot, 0.0)
    assert table.vanished() == table.due(0.0) == []
    table.update(TWO)
    assert places(table.due(0.0)) == [(0, "a", 0), (2, "b", 1)]


def fail_young(table: HostTable, times: int, now: float) -> list[str]:
    said = []
    for _ in range(times):
        slot = assign(TWO, 3)[1]
        said.append(table.fail(slot, 59.0, now))
        table.start(slot)
    table.end(assign(TWO, 3)[1], now)
    return said


def test_a_host_whose_processes_keep_failing_is_left_out_for_good():
    table = table_of(TWO, leaves_out=True)
    assert fail_young(table, 3, 0.0) == [
        "",
        "",
        "b is left out for good (--blacklist-cooldown-range sets a time)",
    ]
    assert table.due(1e9) == []
    assert table.usable_hosts(1e9) == ["a"]


def test_a_host_is_left_out_twice_as_long_each_time():
    table, now, times = table_of(TWO, cooldown_s=(10.0, 35.0), leaves_out=True), 0.0, []
    for _ in range(4):
        said = fail_young(table, 3, now)
        assert said[2].startswith("b is left out for ")
        assert table.due(now) == []
        times.append(table.next_at(now) - now)
        now = table.next_at(now)
        assert [slot.host for slot in table.due(now)] == ["b"]
        table.start(table.due(now)[0])
    assert times == [10, 20, 35, 35]


def test_processes_that_fail_late_do_not_speak_against_their_host():
    table = table_of(TWO, leaves_out=True)
    for lived_s in (59.0, 59.0, 61.0, 59.0, 59.0):
        assert table.fail(assign(TWO, 3)[1], lived_s, 0.0) == ""


def test_a_lost_host_is_left_out():
    table = table_of(TWO, cooldown_s=(10.0, 20.0), leaves_out=True)
    assert table.lose("b", 0.0) == "b is left out for 10 s"
    assert table.usable_hosts(9.0) == ["a"]
    assert table.usable_hosts(10.0) == ["a", "b"]


def test_hosts_that_stay_the_same_are_never_left_out():
    table = table_of(TWO)
    assert fail_young(table, 9, 0.0) == [""] * 9
    assert table.usable_hosts(0.0) == ["a", "b"]


def test_hosts_that_stay_the_same_are_reached_again_later_each_time():
    table, now, waits = table_of(TWO), 0.0, []
    table.end(assign(TWO, 3)[1], 0.0)
    for _ in range(8):
        assert table.lose("b", now) == ""
        assert table.usable_hosts(now) == ["a"]
        waits.append(table.next_at(now) - now)
        now = table.next_at(now)
        assert table.usable_hosts(now) == ["a", "b"]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize("leaves_out", [False, True])
def test_a_host_that_goes_in_peace_is_reached_again_a_minute_after_it_is_lost(leaves_out):
    table = table_of(TWO, leaves_out=leaves_out)
    slots = assign(TWO, 3)
    table.drain("b")
    assert table.usable_hosts(0.0) == ["a"]
    table.end(slots[1], 5.0)
    assert table.fail(slots[2], 1.0, 5.0) == ""
    assert (table.vanished(), table.due(1e9), table.next_at(5.0)) == ([], [], None)
    assert table.lose("b", 10.0) == ""
    assert (table.due(69.0), table.next_at(10.0)) == ([], 70.0)
    assert places(table.due(70.0)) == [(1, "b", 0), (2, "b", 1)]


def test_a_host_that_goes_and_is_listed_anew_can_be_used():
    table = table_of(TWO)
    table.drain("b")
    table.update(TWO)
    assert table.usable_hosts(0.0) == ["a"]
    table.update(TWO[:1])
    table.update(TWO)
    assert table.usable_hosts(0.0) == ["a", "b"]


def test_lines_of_hosts():
    text = "host1\nhost2:4\n\n  [fd00::1]:2 \nhost1:1\n"
    expected = [HostSlots("host1", 4), HostSlots("host2", 4), HostSlots("fd00::1", 2)]
    assert parse_host_lines(text, 3) == expected
    for wrong in ("host1 slots=4", "-oProxyCommand=x", "host:0", "a:b"):
        with pytest.raises(InvalidArgumentError, match=r"is not|must be a whole number"):
            parse_host_lines(wrong, 1)


def test_a_script_finds_hosts():
    found = find_hosts("echo $WHERE:2; echo b", 1, {"WHERE": "a"})
    assert found == [HostSlots("a", 2), HostSlots("b", 1)]
    with pytest.raises(RingError, match=r"failed with exit code 3: no network$"):
        find_hosts("echo no network >&2; exit 3", 1, {})
    with pytest.raises(InvalidArgumentError, match=r"has printed 'what is this' is not a host"):
        find_hosts("echo what is this", 1, {})


def test_a_script_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr("torch_ring.run.hosts._ANSWER_S", 0.2)
    with pytest.raises(RingError, match=r"did not end within 0\.2 s"):
        find_hosts("sleep 1000 & sleep 1000", 1, {"PATH": "/bin:/usr/bin"})


@pytest.mark.parametrize(
    ("command", "flags", "program"),
    [
        ("python train.py --lr 1", "", "train.py --lr 1"),
        ("/opt/bin/python3.11 -u -X dev -Wignore train.py -c", "-u -X dev -Wignore", "train.py -c"),
        ("python3 -Bs -m train -m", "-Bs", "-m train -m"),
        ("python -c pass", "", "-c pass"),
    ],
)
def test_the_command_of_a_standby_process(command, flags, program):
    words = standby_command(command.split())
    assert words[0] == command.split()[0]
    at = words.index("-c")
    assert (words[1:at], words[at + 2 :]) == (flags.split(), program.split())


@pytest.mark.parametrize("command", ["sh train.sh", "python", "python -u", "python -um train"])
def test_a_command_that_cannot_stand_by_is_refused(command):
    with pytest.raises(InvalidArgumentError, match="--standby needs a command"):
        standby_command(command.split())


def test_a_standby_process_is_not_started_twice():
    with pytest.raises(InvalidArgumentError, match="--standby needs TORCH_RING_AS_HOROVOD=1"):
        standby_command(["python", "-u", "-m", "torch_ring.horovod", "train.py"])


def test_standby_processes_are_where_the_fewest_are():
    standbys = Standbys(3)
    assert standbys.wanted([]) == []
    assert standbys.wanted(["a", "b"]) == [(-2, "a"), (-3, "b"), (-4, "a")]
    assert standbys.wanted(["a", "b"]) == []
    assert (standbys.take("a"), standbys.take("c")) == (-2, None)
    assert standbys.wanted(["a", "b"]) == [(-5, "a")]
    standbys.lose("a")
    assert standbys.wanted(["b"]) == [(-6, "b"), (-7, "b")]


def test_standby_processes_that_keep_failing_are_given_up():
    standbys = Standbys(1)
    for _ in range(3):
        ((number, _),) = standbys.wanted(["a"])
        standbys.end(number)
    assert standbys.has_given_up
    assert standbys.wanted(["a"]) == []
