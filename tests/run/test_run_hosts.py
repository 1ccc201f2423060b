"""Hosts, slots and ranks: as users and resource managers write them."""

from __future__ import annotations

import socket

import pytest

from torch_ring.errors import InvalidArgumentError
from torch_ring.run.hosts import (
    HostSlots,
    assign,
    cluster_hosts,
    expand_tasks,
    is_this_host,
    parse_hosts,
    read_hostfile,
)
from torch_ring.run.job_settings import JobFacts, exported, rank_environment, slots_of
from torch_ring.setup.launchers import expand_hostlist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4", [HostSlots("a", 4)]),
        ("a:4, b ,c:1", [HostSlots("a", 4), HostSlots("b", 1), HostSlots("c", 1)]),
        ("a:1,b:2,a:3", [HostSlots("a", 4), HostSlots("b", 2)]),
        ("me@10.0.0.1:2", [HostSlots("me@10.0.0.1", 2)]),
        ("[fd00::1]:2,[::1]", [HostSlots("fd00::1", 2), HostSlots("::1", 1)]),
    ],
)
def test_hosts_of_an_option(text, hosts):
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "a:", "a:x", "a:1,,b:1", "a:0", "-oProxyCommand=x:1", "-v", "a b"]
)
def test_what_is_no_list_of_hosts(text):
    with pytest.raises(InvalidArgumentError):
        parse_hosts(text)


def test_a_host_file(tmp_path):
    file = tmp_path / "hosts"
    file.write_text(
        "# ours\nnode1 slots=4\nnode2:3\n\nnode3   # one\nnode4 max_slots=9 slots=2\n"
        "node3\n[fd00::1]\n"
    )
    assert read_hostfile(str(file)) == [
        HostSlots("node1", 4),
        HostSlots("node2", 3),
        HostSlots("node3", 2),
        HostSlots("node4", 2),
        HostSlots("fd00::1", 1),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("a slots=x", "line 1 of the host file .*'x' slots"),
        ("a\n-o1", "line 2 .*'-o1' is not the name of a host"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_host_file(tmp_path, text, message):
    file = tmp_path / "hosts"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidArgumentError, match=message):
        read_hostfile(str(file))


def test_this_host_is_known_by_its_names():
    assert is_this_host("localhost")
    assert is_this_host("127.0.0.1")
    assert is_this_host(socket.gethostname())
    assert not is_this_host("192.0.2.1")
    assert not is_this_host("no-such-host.invalid")
    assert not is_this_host("me@localhost")  # another user, perhaps


# --- Slurm and others


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node1,node2", ["node1", "node2"]),
        ("gpu[07-10,12]", ["gpu07", "gpu08", "gpu09", "gpu10", "gpu12"]),
        ("gpu[3,5],login", ["gpu3", "gpu5", "login"]),
        ("a-b[098-101]", ["a-b098", "a-b099", "a-b100", "a-b101"]),
        ("r[2-3]n[1,4].x,other", ["r2n1.x", "r2n4.x", "r3n1.x", "r3n4.x", "other"]),
    ],
)
def test_host_lists_of_slurm(text, names):
    assert expand_hostlist(text) == names


@pytest.mark.parametrize(
    "text", ["", ",", "a[", "a]", "a[1", "a[x]", "a[3-1]", "a[]", "a[0-99999999]"]
)
def test_what_is_no_host_list(text):
    with pytest.raises(InvalidArgumentError, match="is not a list of hosts"):
        expand_hostlist(text)


@pytest.mark.parametrize(
    ("text", "tasks"), [("4(x2),3", [4, 4, 3]), ("2", [2, 2, 2]), ("1,2,3", [1, 2, 3])]
)
def test_tasks_of_slurm(text, tasks):
    assert expand_tasks(text, 3) == tasks


@pytest.mark.parametrize("text", ["4(x2)", "1,2", "x", "0(x3)", ""])
def test_tasks_that_do_not_fit_the_nodes(text):
    with pytest.raises(InvalidArgumentError, match="how many tasks each of the 3 nodes has"):
        expand_tasks(text, 3)


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

    def hosts_of(*arguments):
        return [slot.host for slot in slots_of(*arguments, said.append)]

    assert hosts_of(None, None, None, slurm) == ["n1", "n1", "n2", "n2"]
    assert hosts_of(3, None, None, slurm) == ["n1", "n1", "n2"]
    assert said == [
        f"the ranks run on hosts of this job (SLURM_JOB_NODELIST): {hosts}; -H chooses others"
        for hosts in ("n1:2, n2:2", "n1:2, n2:1")
    ]
    assert hosts_of(2, "a:1,b:1", None, slurm) == ["a", "b"]
    assert hosts_of(3, None, None, {}) == ["localhost"] * 3
    assert hosts_of(None, "a:2", None, {}) == ["a", "a"]
    assert len(said) == 2
    with pytest.raises(InvalidArgumentError, match=r"only 4 slots .*\(SLURM_JOB_NODELIST\)"):
        slots_of(5, None, None, slurm, print)
    with pytest.raises(InvalidArgumentError, match="how many ranks"):
        slots_of(None, None, None, {}, print)


def test_a_launcher_that_another_one_has_started_is_refused(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(InvalidArgumentError, match="Open MPI has started this launcher as rank 1"):
        slots_of(2, None, None, {}, print)


# --- ranks


@pytest.mark.parametrize("counts", [[1], [4], [2, 2], [3, 1, 2], [1, 4], [5, 5, 5]])
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


@pytest.mark.parametrize(
    ("size", "message"), [(4, r"-np 4: there are only 3 slots \(a:2, b:1\)"), (0, "must be 1 or")]
)
def test_ranks_that_do_not_fit(size, message):
    with pytest.raises(InvalidArgumentError, match=message):
        assign([HostSlots("a", 2), HostSlots("b", 1)], size)


def test_the_variables_of_a_rank():
    slots = assign([HostSlots("a", 2), HostSlots("b", 1)], 3)
    job = JobFacts(
        "id", "secret", "10.0.0.1", 12345, "eth0,eth1", {"X": "option"}, frozenset({"GONE"})
    )
    environment = {"PATH": "/bin", "HOME": "/me", "GONE": "1", "X": "0", "SSH_AUTH_SOCK": "/s"}
    of_b = rank_environment(slots[2], job, environment, is_local=False)
    assert of_b == {
        "PATH": "/bin",
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
    of_a = rank_environment(slots[0], job, environment, is_local=True)
    assert (of_a["HOME"], of_a["SSH_AUTH_SOCK"], of_a["HOROVOD_CROSS_SIZE"]) == ("/me", "/s", "2")
    assert "secret" not in repr(job)


def test_variables_of_a_host_stay_there():
    here = {"TMPDIR": "/x", "TERM": "xterm", "XDG_RUNTIME_DIR": "/run", "LC_ALL": "C", "MY": "1"}
    assert exported(here) == {"LC_ALL": "C", "MY": "1"}
