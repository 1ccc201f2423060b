# SPDX-License-Identifier: Apache-2.0
"""--numa-binding: the CPUs of each rank, on made-up hosts; and on this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched_jobs import run_job

from torch_ring.run.numa import MODES, BindingError, bind, cpus_of

# Two sockets of two nodes of four cores of two threads; two cores share a cache of level 3.
NODES = [{cpu for cpu in range(32) if cpu % 16 // 4 == node} for node in range(4)]
ALL = set(range(32))


def text_of(cpus: set[int]) -> str:
    return ",".join(map(str, sorted(cpus)))


@pytest.fixture(scope="module")
def system(tmp_path_factory) -> str:
    """Return a folder in which a made-up kernel describes that host, and a node of memory only."""
    folder = tmp_path_factory.mktemp("system")

    def write(path: str, text: str) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"{text}\n")

    for number, cpus in enumerate([*NODES, set()]):
        write(f"node/node{number}/cpulist", text_of(cpus))
    write("node/possible", "0-4")
    for cpu in ALL:
        core = cpu % 16
        pair = core // 2 * 2
        write(f"cpu/cpu{cpu}/topology/physical_package_id", str(core // 8))
        write(f"cpu/cpu{cpu}/topology/thread_siblings_list", f"{core},{core + 16}")
        for index, level, sharers in [
            (0, 1, f"{core},{core + 16}"),
            (2, 2, f"{core},{core + 16}"),
            (3, 3, f"{pair}-{pair + 1},{pair + 16}-{pair + 17}"),
        ]:
            write(f"cpu/cpu{cpu}/cache/index{index}/level", str(level))
            write(f"cpu/cpu{cpu}/cache/index{index}/shared_cpu_list", sharers)
    return str(folder)


def masks(mode: str, size: int, system: str, allowed: set[int] = ALL) -> list[set[int]]:
    return [cpus_of(mode, rank, size, allowed, system) for rank in range(size)]


def test_ranks_take_turns_on_nodes_sockets_and_core_complexes(system):
    assert masks("node", 6, system) == [*NODES, NODES[0], NODES[1]]
    first, second = NODES[0] | NODES[1], NODES[2] | NODES[3]
    assert masks("socket", 4, system) == [first, first, second, second]
    found = masks("core-complex", 12, system)
    assert found[0] == found[8] == {0, 1, 16, 17}
    assert found[4] == {2, 3, 18, 19}
    assert found[3] == {12, 13, 28, 29}


def test_ranks_with_cores_of_their_own(system):
    six = masks("exclusive", 6, system)
    assert six[:2] == [{0, 1, 16, 17}, {4, 5, 20, 21}]
    assert six[2:4] == NODES[2:]
    assert six[4:] == [{2, 3, 18, 19}, {6, 7, 22, 23}]
    for size in range(1, 17):
        found = masks("exclusive", size, system)
        assert sum(map(len, found)) == len(set().union(*found))
        assert all(found)
    with pytest.raises(BindingError, match="5 ranks share a NUMA node with 4 cores"):
        masks("exclusive", 17, system)


def test_only_cpus_that_the_job_may_use(system):
    """As under taskset, or in a container."""
    allowed = {1, 2, 3, 17, 8}
    assert masks("node", 3, system, allowed) == [{1, 2, 3, 17}, {8}, {1, 2, 3, 17}]
    assert masks("socket", 2, system, allowed) == [{1, 2, 3, 17}, {8}]
    assert masks("exclusive", 3, system, allowed) == [{1, 17}, {8}, {2, 3}]
    assert masks("core-complex", 3, system, allowed) == [{1, 17}, {8}, {2, 3}]
    with pytest.raises(BindingError, match=r"none of the NUMA nodes in .*/node has a CPU"):
        cpus_of("node", 0, 1, {77}, system)


def test_a_kernel_that_does_not_describe_its_nodes(tmp_path):
    for reason in (".*No such file", "invalid"):
        for mode in MODES:
            with pytest.raises(BindingError, match=f"not describe its NUMA nodes: {reason}"):
                cpus_of(mode, 0, 1, ALL, str(tmp_path))
        (tmp_path / "node/node0").mkdir(parents=True, exist_ok=True)
        (tmp_path / "node/node0/cpulist").write_text("0-x\n")


def test_a_process_that_runs_is_bound_with_its_threads():
    """As a standby process, when it becomes a rank."""
    program = "import threading; threading.Thread(target=input).start(); print(flush=True)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        process.stdout.readline()  # there are two threads
        cpus = {min(os.sched_getaffinity(0))}
        bind(process.pid, cpus)
        threads = os.listdir(f"/proc/{process.pid}/task")
        assert len(threads) == 2
        assert all(os.sched_getaffinity(int(thread)) == cpus for thread in threads)
        process.communicate(b"\n")


PROGRAM = "import os; print('on', sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"


@pytest.mark.skipif(
    not Path("/sys/devices/system/node/node0").exists(), reason="this host has no NUMA nodes"
)
def test_the_ranks_of_a_job_are_bound():
    allowed = os.sched_getaffinity(0)
    line = ("-np", "2", "--numa-binding", "node", sys.executable, "-c", PROGRAM)
    code, out, errors = run_job(*line)
    assert code == 0, errors
    for rank in range(2):
        mine = cpus_of("node", rank, 2, allowed)
        threads = max(1, len(allowed) // 2)
        assert f"[{rank}]<stdout>:on {sorted(mine)} {min(threads, len(mine))}" in out


def test_a_rank_that_cannot_be_bound_ends_the_job():
    """There are more ranks than cores."""
    size = 2 * len(os.sched_getaffinity(0)) + 1
    line = ("-np", str(size), "--numa-binding", "exclusive", sys.executable, "-c", PROGRAM)
    code, _, errors = run_job(*line)
    assert code == 1
    assert "cannot bind it to CPUs (--numa-binding exclusive): " in errors
