# SPDX-License-Identifier: Apache-2.0
"""slurm: a cluster of Slurm on this machine, whose nodes are network namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import namespaces
import pytest
from host_fixtures import hosts_or_skip
from launcher_commands import clean_environment, processes_with
from scripts import ROOT

DEADLINE_S = 120  # a hang, not a slow machine
DAEMONS = ("munged", "slurmctld", "slurmd")
_SBIN = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
MARK = "SLURM_TEST_CLUSTER"  # a variable that marks all processes of a cluster

# Nodes pretend to have 8 processors, of which a job binds none. A job that is put into the queue
# again waits there until the credentials of its first run have expired.
_CONFIG = """
ClusterName=test
SlurmctldHost={host}({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
KillWait=30
"""


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    output: str


class Slurm:
    """A cluster; commands run on a host of their own, beside its nodes.

    Attributes:
        nodes: the names of the nodes, which are their addresses.
        folder: of the cluster's files; jobs run there.
    """

    def __init__(self, hosts: list[namespaces.Host], folder: Path) -> None:
        self._controller, *self._hosts = hosts
        self.folder = folder
        self.nodes = [host.address for host in self._hosts]
        self._mark = uuid.uuid4().hex
        self._daemons: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._can_have_jobs = False

    def start(self) -> None:
        """Start the daemons, and wait until all nodes can have jobs."""
        config = _CONFIG.format(
            host=socket.gethostname(), controller=self._controller.address, folder=self.folder
        )
        for node in self.nodes:
            config += f"NodeName={node} NodeHostname={node} NodeAddr={node} CPUs=8\n"
            (self.folder / f"spool-{node}").mkdir()
        config += "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        files = ("key", "pid", "log", "seed")
        munge = [f"--{name}-file={self.folder}/munge.{name}" for name in files]
        munge += ["--foreground", f"--socket={self.folder}/munge.socket"]
        munge += ["--force"]  # pytest's folder is not readable for all users
        self._start_daemon(self._controller, "munged", *munge)
        self.wait_for((self.folder / "munge.socket").exists, "munged listens")
        self._start_daemon(self._controller, "slurmctld", "-D")
        for host in self._hosts:
            self._start_daemon(host, "slurmd", "-D", "-N", host.address)
        idle = "".join(f"{node} idle\n" for node in self.nodes)
        self.wait_for(
            lambda: self.run("sinfo", "-h", "-N", "-o", "%N %t").output == idle, "nodes are idle"
        )
        self._can_have_jobs = True

    def close(self) -> None:
        """End all jobs and daemons; a surviving process is an error."""
        if self._can_have_jobs:
            self.run("scancel", "--user=root")
            with contextlib.suppress(pytest.fail.Exception):  # then they are ended below, and shown
                self.wait_for(lambda: not self.run("squeue", "-h").output, "no job is left")
        for _, daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, left

    def environment(self, **variables: str) -> dict[str, str]:
        """Return the environment of commands, in whose jobs `python` is this one."""
        return clean_environment(
            SLURM_CONF=str(self.folder / "slurm.conf"),
            PATH=os.pathsep.join([str(Path(sys.executable).parent), _SBIN]),
            PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            PYTHONUNBUFFERED="1",
            **{MARK: self._mark, **variables},
        )

    def launch(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command of Slurm, such as srun, in the cluster's folder."""
        return subprocess.Popen(
            _in_namespace(self._controller, *command),
            cwd=self.folder,
            env=self.environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, **variables: str) -> Ended:
        """Run a command of Slurm to its end."""
        process = self.launch(*command, **variables)
        try:
            output, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            pytest.fail(f"{command} did not end:\n{output}\n{self.logs()}")
        return Ended(process.returncode, output)

    def submit(self, script: str, *options: str, **variables: str) -> str:
        """Submit a script of bash; return the number of its job, which writes to job-NUMBER.out."""
        path = self.folder / f"{uuid.uuid4().hex}.sh"
        path.write_text(f"#!/bin/bash\n{script}")
        ended = self.run(
            *("sbatch", "--parsable", "-o", "job-%j.out", *options, str(path)), **variables
        )
        assert ended.code == 0, ended.output
        return ended.output.strip()

    def output_of(self, job: str) -> str:
        """Return the output so far of a job's script and its steps."""
        path = self.folder / f"job-{job}.out"
        return path.read_text() if path.exists() else ""

    def state_of(self, job: str) -> str:
        """Return the state of a job, such as COMPLETED, FAILED or PENDING, and its exit code."""
        shown = dict(
            word.partition("=")[::2]
            for word in self.run("scontrol", "show", "-o", "job", job).output.split()
        )
        return f"{shown['JobState']} {shown['ExitCode']}"

    def wait_for_end(self, job: str, deadline_s: float = DEADLINE_S) -> str:
        """Return the state of a job, when it has ended on all nodes."""
        running = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
        self.wait_for(
            lambda: not self.state_of(job).startswith(running), f"job {job} ends", deadline_s
        )
        return self.state_of(job)

    def wait_for(
        self, is_there: Callable[[], object], what: str, deadline_s: float = DEADLINE_S
    ) -> None:
        """Wait until a condition holds; the failure names the condition."""
        deadline = time.monotonic() + deadline_s
        while not is_there():
            for name, daemon in self._daemons:
                if daemon.poll() is not None:
                    pytest.fail(f"{name} has ended: {self.logs()}")
            if time.monotonic() > deadline:
                pytest.fail(f"not in {deadline_s} s: {what}\n{self.logs()}")
            time.sleep(0.05)

    def processes(self) -> dict[int, str]:
        """Return the living processes of the cluster, with their command lines."""
        return processes_with(f"{MARK}={self._mark}")

    def logs(self) -> str:
        """Return the last output of daemons and jobs."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("job-*.out")]
        return "\n".join(f"{file.name}:\n{file.read_text()[-2000:]}" for file in sorted(files))

    def _start_daemon(self, host: namespaces.Host, *command: str) -> None:
        with (self.folder / f"{command[0]}-{host.address}.log").open("wb") as log:
            daemon = subprocess.Popen(
                _in_namespace(host, *command),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._daemons.append((command[0], daemon))


def _in_namespace(host: namespaces.Host, *command: str) -> list[str]:
    """Return the command in a host's network; slurmd needs the /sys that `ip netns exec` hides."""
    return ["nsenter", f"--net={namespaces.NAMED / host.namespace}", *command]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster of two nodes, which ends with the module's tests."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    missing = [name for name in (*DAEMONS, "srun") if shutil.which(name, path=_SBIN) is None]
    if missing:
        pytest.skip(f"there is no {missing[0]} (Debian: slurm-wlm)")
    with hosts_or_skip(3) as hosts:
        cluster = Slurm(hosts, tmp_path_factory.mktemp("slurm"))
        with contextlib.closing(cluster):
            cluster.start()
            yield cluster
