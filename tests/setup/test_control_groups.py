# SPDX-License-Identifier: Apache-2.0
"""The CPUs that control groups leave a process: versions 1 and 2, nested groups."""

import math

import pytest

from torch_ring.setup import control_groups
from torch_ring.setup.control_groups import cpu_quota, usable_cpus

V2 = "0::/job/step"
V1 = "5:cpu,cpuacct:/docker/abc"


@pytest.mark.parametrize(
    ("membership", "quotas", "cpus"),
    [
        ("0::/", {}, math.inf),
        ("0::/", {".": "max"}, math.inf),
        ("0::/", {".": "nonsense"}, math.inf),
        ("0::/", {".": "250000"}, 2.5),  # a container's own root
        ("0::/../other", {".": "100000"}, 1.0),  # outside the root
        (V2, {"job/step": "150000"}, 1.5),  # the process's own group
        (V2, {"job": "300000", "job/step": "max"}, 3.0),  # a group around it
        (V2, {"job": "300000", "job/step": "800000"}, 3.0),  # the least of nested ones
        (V1, {"cpu": "200000"}, 2.0),  # version 1, the path of the host in a container
        (V1, {"cpu": "-1", "cpu/docker": "-1", "cpu/docker/abc": "50000"}, 0.5),
        (f"{V1}\n{V2}", {"cpu/docker/abc": "400000", "job": "300000"}, 3.0),
    ],
)
def test_quotas(tmp_path, monkeypatch, membership, quotas, cpus):
    for name, quota in quotas.items():
        group = tmp_path / name
        group.mkdir(parents=True, exist_ok=True)
        if name.startswith("cpu"):
            (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (group / "cpu.cfs_period_us").write_text("100000\n")
        else:
            (group / "cpu.max").write_text(f"{quota} 100000\n")
    monkeypatch.setattr(control_groups, "_ROOT", str(tmp_path))
    lines = control_groups._lines
    memberships = {"/proc/self/cgroup": membership.splitlines()}
    monkeypatch.setattr(control_groups, "_lines", lambda path: memberships.get(path) or lines(path))
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    assert cpu_quota() == cpus
    assert usable_cpus() == min(8, cpus)
