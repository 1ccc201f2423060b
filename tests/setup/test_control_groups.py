"""The CPUs that control groups leave a process: versions 1 and 2, nested groups."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from torch_ring.setup import control_groups
from torch_ring.setup.control_groups import cpu_quota, usable_cpus

V2 = "0::/job/step"
V1 = "5:cpu,cpuacct:/docker/abc"


@pytest.mark.parametrize(
    ("membership", "files", "cpus"),
    [
        pytest.param("0::/", {}, math.inf, id="no limit"),
        pytest.param("0::/", {"cpu.max": "max 100000"}, math.inf, id="max"),
        pytest.param("0::/", {"cpu.max": "250000 100000"}, 2.5, id="a container's own root"),
        pytest.param(V2, {"job/step/cpu.max": "150000 100000"}, 1.5, id="the process's own group"),
        pytest.param(
            V2,
            {"job/cpu.max": "300000 100000", "job/step/cpu.max": "max 100000"},
            3.0,
            id="a group around it",
        ),
        pytest.param(
            V2,
            {"job/cpu.max": "300000 100000", "job/step/cpu.max": "800000 100000"},
            3.0,
            id="the least of nested ones",
        ),
        pytest.param(
            V1,
            {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"},
            2.0,
            id="version 1, the path of the host in a container",
        ),
        pytest.param(
            V1,
            {
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
                "cpu/docker/cpu.cfs_quota_us": "-1",
                "cpu/docker/cpu.cfs_period_us": "100000",
                "cpu/docker/abc/cpu.cfs_quota_us": "50000",
                "cpu/docker/abc/cpu.cfs_period_us": "100000",
            },
            0.5,
            id="version 1, nested",
        ),
        pytest.param(
            f"{V1}\n{V2}",
            {
                "cpu/docker/abc/cpu.cfs_quota_us": "400000",
                "cpu/docker/abc/cpu.cfs_period_us": "100000",
                "job/cpu.max": "300000 100000",
            },
            3.0,
            id="both versions",
        ),
        pytest.param("0::/../other", {"cpu.max": "100000 100000"}, 1.0, id="outside the root"),
        pytest.param("0::/", {"cpu.max": "nonsense"}, math.inf, id="nonsense"),
    ],
)
def test_quotas(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    membership: str,
    files: dict[str, str],
    cpus: float,
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(control_groups, "_ROOT", str(tmp_path))
    lines = control_groups._lines
    memberships = {"/proc/self/cgroup": membership.splitlines()}
    monkeypatch.setattr(control_groups, "_lines", lambda path: memberships.get(path) or lines(path))
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    assert cpu_quota() == cpus
    assert usable_cpus() == min(8, cpus)
