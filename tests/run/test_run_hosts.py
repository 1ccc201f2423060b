# SPDX-License-Identifier: Apache-2.0
"""Hosts, slots and ranks: as users and resource managers write them, and over time."""

from __future__ import annotations

import socket

import pytest

from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.run.growth import HostTable, Standbys, standby_command
from torch_ring.run.hosts import (
    HostSlots,
    assign,
    cluster_hosts,
    expand_tasks,
    find_hosts,
    is_this_host,
    parse_hosts,
    read_hostfile,
)
from torch_ring.run.job_settings import JobSpec, rank_environment, slots_of
from torch_ring.run.options import Options
from torch_ring.setup.launchers import expand_hostlist


def test_hosts_of_an_option():
    for text, hosts in (
        ("a:4, b ,c:1", [HostSlots("a", 4), HostSlots("b", 1), HostSlots("c", 1)]),
        ("a:1,b:2,a:3", [HostSlots("a", 4), HostSlots("b", 2)]),
        ("me@10.0.0.1:2", [HostSlots("me@10.0.0.1", 2)]),
        ("[fd00::1]:2,[::1]", [HostSlots("fd00::1", 2), HostSlots("::1", 1)]),
    ):
        assert parse_hosts(text) == hosts


def test_a_host_file(tmp_path):
    file = tmp_path / "hosts"
    file.write_text(
        "# ours\nnode1 slots=4\nnode2:3\n\nnode3   # one\nnode4 max_slots=9 slots=2\n"
        "node3\n[fd00::1]\n"
    )
    names = [("node1", 4), ("node2", 3), ("node3", 2), ("node4", 2), ("fd00::1", 1)]
    assert read_hostfile(str(file)) == [HostSlots(*each) for each in names]
    for text, message in (
        ("", "names no host"),
        ("a slots=x", "line 1 of the host file .*'x' slots"),
        ("a\n-o1", "line 2 .*'-o1' is not the name of a host"),
    ):
        file.write_text(text)
        with pytest.raises(InvalidArgumentError, match=message):
            read_hostfile(str(file))
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_hostfile(str(tmp_path / "none"))


def test_lines_of_hosts():
    text = "host1\nhost2:4\n\n  [fd00::1]:2 \nhost1:1\n"
    expected = [HostSlots("host1", 4), HostSlots("host2", 4), HostSlots("fd00::1", 2)]
    assert parse_hosts(text, "\n", 3) == expected


NO_HOSTS = ["", "a:", "a:x", "a:1,,b:1", "a:0", "-oProxyCommand=x:1", "-v", "a b", "a slots=4"]
NO_LISTS = ["", ",", "a[", "a]", "a[1", "a[x]", "a[3-1]", "a[]", "a[0-99999999]"]
NO_TASKS = ["4(x2)", "1,2", "x", "0(x3)", ""]


@pytest.mark.parametrize(
    ("read", "texts", "message"),
    [
        (parse_hosts, NO_HOSTS, None),
        (expand_hostlist, NO_LISTS, "is not a list of hosts"),
        (lambda text: expand_tasks(text, 3), NO_TASKS, "how many tasks each of the 3 nodes has"),
    ],
    ids=["-H", "hosts of Slurm", "tasks of Slurm"],
)
def test_texts_that_name_no_hosts(read, texts, message):
    for text in texts:
        with pytest.raises(InvalidArgumentError, match=message):
            read(text)


def test_this_host_is_known_by_its_names():
    assert is_this_host("localhost")
    assert is_this_host("127.0.0.1")
    assert is_this_host(socket.gethostname())
    assert not is_this_host("no-such-host.invalid")
    assert not is_this_host("me@localhost")  # another user, perhaps


# --- Slurm and others


def test_lists_of_slurm():
    for text, names in (
        ("gpu[07-10,12]", ["gpu07", "gpu08", "gpu09", "gpu10", "gpu12"]),
        ("gpu[3,5],login", ["gpu3", "gpu5", "login"]),
        ("a-b[098-101]", ["a-b098", "a-b099", "a-b100", "a-b101"]),
        ("r[2-3]n[1,4].x,other", ["r2n1.x", "r2n4.x", "r3n1.x", "r3n4.x", "other"]),
    ):
        assert expand_hostlist(text) == names
    assert expand_tasks("4(x2),3", 3) == [4, 4, 3]
    assert expand_tasks("2", 3) == [2, 2, 2]


def test_the_hosts_of_a_job(tmp_path):
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "gpu[1-2],big",
        "SLURM_TASKS_PER_NODE": "4(x2),8",
    }
    hosts = [HostSlots("gpu1", 4), HostSlots("gpu2", 4), HostSlots("big", 8)]
    assert cluster_hosts(slurm) == (hosts, "SLURM_JOB_NODELIST")
    assert cluster_hosts({}) is None
    file = tmp_path / "hostfile"
    file.write_text("worker-0.job slots=2\nworker-1.job slots=2\n")  # Kubernetes' MPIJob
    variable = "OMPI_MCA_orte_default_hostfile"
    workers = [HostSlots("worker-0.job", 2), HostSlots("worker-1.job", 2)]
    assert cluster_hosts({variable: str(file)}) == (workers, variable)
    file.write_text("n1\nn1\nn2\n")  # PBS: a line for each slot
    assert cluster_hosts({"PBS_NODEFILE": str(file)}) == (
        [HostSlots("n1", 2), HostSlots("n2", 1)],
        "PBS_NODEFILE",
    )


def test_where_a_job_runs():
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}

    said: list[str] = []

    def hosts_of(size, hosts, environment):
        options = Options(num_proc=size, hosts=hosts)
        return [slot.host for slot in slots_of(options, environment, said.append)]

    assert hosts_of(None, None, slurm) == ["n1", "n1", "n2", "n2"]
    assert hosts_of(3, None, slurm) == ["n1", "n1", "n2"]
    assert said == [
        f"the ranks run on hosts of this job (SLURM_JOB_NODELIST): {hosts}; -H chooses others"
        for hosts in ("n1:2, n2:2", "n1:2, n2:1")
    ]
    assert hosts_of(2, "a:1,b:1", slurm) == ["a", "b"]
    assert hosts_of(3, None, {}) == ["localhost"] * 3
    assert hosts_of(None, "a:2", {}) == ["a", "a"]
    assert len(said) == 2
    with pytest.raises(InvalidArgumentError, match=r"only 4 slots .*\(SLURM_JOB_NODELIST\)"):
        hosts_of(5, None, slurm)
    with pytest.raises(InvalidArgumentError, match="how many ranks"):
        hosts_of(None, None, {})


def test_a_launcher_that_another_one_has_started_is_refused(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(InvalidArgumentError, match="Open MPI has started this launcher as rank 1"):
        slots_of(Options(num_proc=2), {}, print)


# --- ranks


@pytest.mark.parametrize("counts", [[4], [3, 1, 2], [1, 4]])
@pytest.mark.parametrize("left_over", [0, 1])
def test_ranks_fill_hosts(counts, left_over):
    size = max(1, sum(counts) - left_over)
    slots = assign([HostSlots(f"h{i}", count) for i, count in enumerate(counts)], size)
    assert [slot.rank for slot in slots] == list(range(size))
    assert {slot.size for slot in slots} == {size}
    assert [slot.host for slot in slots] == sorted(slot.host for slot in slots)
    assert {slot.nodes for slot in slots} == {len({slot.host for slot in slots})}
    for slot in slots:
        local = [other for other in slots if other.host == slot.host]
        assert (slot.local_rank, slot.local_size) == (local.index(slot), len(local))
        across = [other for other in slots if other.local_rank == slot.local_rank]
        assert (slot.cross_rank, slot.cross_size) == (across.index(slot), len(across))
        assert slot.host == f"h{slot.node}"
        assert len(local) <= counts[slot.node]


def test_ranks_that_do_not_fit():
    for size, message in ((4, r"-np 4: there are only 3 slots \(a:2, b:1\)"), (0, "must be 1 or")):
        with pytest.raises(InvalidArgumentError, match=message):
            assign([HostSlots("a", 2), HostSlots("b", 1)], size)


def test_the_variables_of_a_rank():
    slots = assign([HostSlots("a", 2), HostSlots("b", 1)], 3)
    environment = {"PATH": "/bin", "HOME": "/me", "GONE": "1", "X": "0", "SSH_AUTH_SOCK": "/s"}
    environment |= {"TMPDIR": "/x", "TERM": "xterm", "XDG_RUNTIME_DIR": "/run", "LC_ALL": "C"}
    options = Options(network_interface="eth0,eth1")
    more = {"variables": {"X": "option"}, "unset": frozenset({"GONE"}), "run_id": "id"}
    job = JobSpec(options, slots, environment, "secret", **more)
    store = "10.0.0.1", 12345
    of_b = rank_environment(slots[2], job, store, is_local=False)
    assert of_b == {
        "PATH": "/bin",
        "LC_ALL": "C",
        "PYTHONUNBUFFERED": "1",
        "X": "option",
        "TORCH_RING_RUN_ID": "id",
        "TORCH_RING_SECRET": "secret",
        "TORCH_RING_INTERFACE": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0,eth1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "12345",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "HOROVOD_HOSTNAME": "b",
        "HOROVOD_RANK": "2",
        "HOROVOD_SIZE": "3",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
    }
    of_a = rank_environment(slots[0], job, store, is_local=True)
    assert (of_a["HOME"], of_a["SSH_AUTH_SOCK"], of_a["HOROVOD_CROSS_SIZE"]) == ("/me", "/s", "2")
    assert "secret" not in repr(job)


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
    for lived_s in (1200.0, *[1.0] * 10):  # one that has lived long is started at once
        table.fail(slot, lived_s, now)
        at = now if table.due(now) else table.next_at(now)
        delays.append(at - now)
        now = at
        assert places(table.due(now)) == [(1, "a", 1)]
        table.start(slot)
    assert delays == [0, 0, 0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    table.fail(slot, 1.0, now)
    assert (table.due(1e9), table.next_at(now)) == ([], None)


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
    for lived_s in (59.0, 59.0, 61.0):  # one has lived long: it speaks for its host
        assert table.fail(assign(TWO, 3)[1], lived_s, 0.0) == ""
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


def test_a_lost_host_is_left_out():
    table = table_of(TWO, cooldown_s=(10.0, 20.0), leaves_out=True)
    assert table.lose("b", 0.0) == "b is left out for 10 s"
    assert table.usable_hosts(9.0) == ["a"]
    assert table.usable_hosts(10.0) == ["a", "b"]


def test_hosts_that_stay_the_same_are_never_left_out_but_reached_again_later_each_time():
    table, now, waits = table_of(TWO), 0.0, []
    assert fail_young(table, 9, 0.0) == [""] * 9
    assert table.usable_hosts(0.0) == ["a", "b"]
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
    ],
)
def test_the_command_of_a_standby_process(command, flags, program):
    words = standby_command(command.split())
    assert words[0] == command.split()[0]
    at = words.index("-c")
    assert (words[1:at], words[at + 2 :]) == (flags.split(), program.split())


@pytest.mark.parametrize(
    "command",
    ["sh train.sh", "python", "python -u", "python -um train", "python -m torch_ring.horovod a.py"],
)
def test_a_command_that_cannot_stand_by_is_refused(command):
    with pytest.raises(InvalidArgumentError, match="--standby needs "):
        standby_command(command.split())


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
