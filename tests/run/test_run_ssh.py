# SPDX-License-Identifier: Apache-2.0
"""Jobs on two hosts: network namespaces with an sshd each, which the launcher reaches by ssh."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import namespaces
import pytest
from launched_jobs import DEADLINE_S, LaunchedJob
from scripts import ROOT

from torch_ring.run import job as launched_job

HELLO = str(ROOT / "tests" / "setup" / "hello.py")
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
PORT = "2214"

pytestmark = [
    pytest.mark.launcher,
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` (iproute2)"),
    pytest.mark.skipif(SSHD is None, reason="there is no sshd (Debian: openssh-server)"),
    pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh"),
]


@dataclass(frozen=True)
class Cluster:
    """Three hosts: two with an sshd, from 1 on, and the launcher's, which is the first."""

    hosts: list[namespaces.Host]
    folder: Path

    def launch(self, *arguments: str, **variables: str) -> LaunchedJob:
        """Start a job from the first host."""
        known = f"-F /dev/null -o UserKnownHostsFile={self.folder / 'known_hosts'}"
        ssh = ("-p", PORT, "-i", str(self.folder / "key"), f"--ssh-args={known}")

        def prepare() -> None:
            launched_job.FAILURE_GRACE_S = 2.0
            self.hosts[0].enter()

        return LaunchedJob(*ssh, *arguments, before=prepare, **variables)

    def run(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        job = self.launch(*arguments, **variables)
        code = job.wait()
        job.require_nothing_left()
        return code, job.stdout, job.stderr


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ssh")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd wants an empty folder there
    for key in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True)
    (folder / "config").write_text(
        f"Port {PORT}\nHostKey {folder / 'host_key'}\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder / 'key.pub'}\nPasswordAuthentication no\n"
    )
    with contextlib.ExitStack() as stack:
        try:
            hosts = list(stack.enter_context(namespaces.hosts(3)))
        except OSError as error:
            if "netns add" not in str(error):
                raise
            pytest.skip(f"no network namespaces here: {error}")
        for host in hosts[1:]:
            start_sshd(stack, host, folder)
        yield Cluster(hosts, folder)


def start_sshd(stack: contextlib.ExitStack, host: namespaces.Host, folder: Path) -> None:
    """Start an sshd in the foreground, and wait until it listens; it ends with the stack."""
    log = stack.enter_context((folder / f"{host.namespace}.log").open("w+"))
    command = host.command(str(SSHD), "-D", "-e", "-f", str(folder / "config"))
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(server.wait)
    stack.callback(server.kill)
    probe = f"import socket; socket.create_connection(('{host.address}', {PORT}))"
    deadline = time.monotonic() + DEADLINE_S
    while subprocess.run(
        host.command(sys.executable, "-Sc", probe), stderr=subprocess.DEVNULL
    ).returncode:
        if server.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            pytest.fail(f"sshd does not listen: {log.read()}")
        time.sleep(0.05)


def on(cluster: Cluster, *slots: int) -> tuple[str, str]:
    """Return the option for the given slots on each host."""
    named = [f"{host.address}:{n}" for host, n in zip(cluster.hosts, slots, strict=False) if n]
    return "-H", ",".join(named)


@pytest.mark.slow
def test_ranks_of_two_hosts_train_together(cluster):
    code, out, errors = cluster.run(*on(cluster, 1, 1), sys.executable, HELLO, PYTHONPATH=str(ROOT))
    assert code == 0, errors
    for rank in range(2):
        assert f"[{rank}]<stdout>:rank {rank} of 2: torch" in out
    # Before that, rank 0 may have named the ranks for which it waits.
    (line,) = [each for each in errors.splitlines() if "[torch_ring] 2 ranks" in each]
    assert all(host.address in line for host in cluster.hosts[:2])
    assert "without a secret" not in errors  # they have one


def test_what_a_rank_on_another_host_gets(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = (
        "import os; v = os.environ; "
        "print(*(v.get(n) for n in ('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', "
        "'HOROVOD_CROSS_RANK', 'HOROVOD_CROSS_SIZE', 'MASTER_ADDR', 'GIVEN', 'MINE', 'TERM')), "
        "os.getcwd())"
    )
    line = (*on(cluster, 1, 2, 1), "--env", "GIVEN=a 'b' $c", "--network-interface", "eth0")
    code, out, _ = cluster.run(*line, sys.executable, "-c", script, MINE="yes", TERM="here")
    assert code == 0
    first = cluster.hosts[0].address
    assert sorted(out.splitlines()) == [
        f"[0]<stdout>:0 0 1 0 0 3 {first} a 'b' $c yes here {tmp_path}",
        f"[1]<stdout>:1 0 2 1 1 3 {first} a 'b' $c yes None {tmp_path}",
        f"[2]<stdout>:2 1 2 1 0 1 {first} a 'b' $c yes None {tmp_path}",
        f"[3]<stdout>:3 0 1 2 2 3 {first} a 'b' $c yes None {tmp_path}",
    ]


STUBBORN = "trap '' TERM INT HUP; setsid sleep 1000 & echo up; while :; do sleep 0.1; done"


@pytest.mark.slow
def test_nothing_is_left_when_the_launcher_is_killed(cluster):
    job = cluster.launch(*on(cluster, 1, 1, 1), "bash", "-c", STUBBORN)
    job.wait_for("up", 3)
    job.signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    job.require_nothing_left()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-p 2999", "ssh does not reach it"),
        ("-i /dev/null", "ssh does not reach it"),
        ("--network-interface no0", "no network interface 'no0'"),
    ],
)
def test_a_host_that_cannot_be_used(cluster, line, message):
    address = cluster.hosts[1].address
    code, _, errors = cluster.run("-H", f"{address}:1", *line.split(), "true")
    assert code in (1, 2)
    assert errors.startswith(f"torch_ring.run: {address}")
    assert message in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_python_that_is_only_here(cluster, monkeypatch):
    """The agent runs with the other host's Python, where this one is not."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python3.99")
    code, out, _ = cluster.run(*on(cluster, 0, 1), "sh", "-c", "echo hi from $RANK")
    assert (code, out) == (0, "[0]<stdout>:hi from 0\n")
