# SPDX-License-Identifier: Apache-2.0
"""Jobs of the launcher that go on when ranks have failed, and whose hosts and ranks change."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from launched_jobs import LaunchedJob, run_job
from packets import needs_packets, packets, with_ports
from scripts import ROOT

from torch_ring.membership.directory import ask_directory
from torch_ring.membership.member import key_of

pytestmark = pytest.mark.launcher
EPOCHS = 40


WATCHING = """
import os, time
import torch_ring as hvd

hvd.preemption.watch()
hvd.init()

@hvd.elastic.run
def train(state):
    print(f"agent {os.getppid()} of rank {hvd.rank()}", flush=True)
    while not hvd.preemption.requested():
        time.sleep(0.02)
        state.commit()

train(hvd.elastic.ObjectState())
print("stops", flush=True)
"""


@pytest.mark.slow
def test_a_program_that_watches_signals_stops_when_a_host_gets_sigterm(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WATCHING)
    command = (sys.executable, str(program))
    job = LaunchedJob("--min-np", "1", "-H", f"localhost,{OTHER}", *command)
    job.wait_for("of rank 1")
    os.kill(int(re.search(r"agent (\d+) of rank 1", job.stdout)[1]), signal.SIGTERM)
    assert job.wait() == 0, job.stderr
    assert job.stdout.count("stops") == 2
    job.require_nothing_left()


@pytest.mark.slow
def test_a_program_for_horovods_elastic_goes_on_after_a_kill() -> None:
    program = str(ROOT / "tests/horovod/programs/elastic.py")
    arguments = [sys.executable, program, "--epochs", str(EPOCHS)]
    job = LaunchedJob("-np", "3", "--min-np", "2", *arguments)
    job.wait_for("is process", 3)
    job.wait_for("epoch 1 on 3 ranks, rate 0.03")
    pids = dict(re.findall(r"rank (\d) is process (\d+)", job.stdout))
    os.kill(int(pids["0"]), signal.SIGKILL)
    assert job.wait() == 0, job.stdout + job.stderr
    job.require_nothing_left()
    # The epoch of the death may be printed twice, or not at all, if rank 0 has died before.
    told = [int(epoch) for epoch in re.findall(r"epoch (\d+) on", job.stdout)]
    assert told == sorted(told)
    assert len(told) <= EPOCHS + 1
    assert len(set(told)) >= EPOCHS - 1
    assert f"epoch {EPOCHS - 1} on 2 ranks, rate 0.02" in job.stdout
    found = re.search(r"accuracy ([\d.]+) on 2 ranks", job.stdout)
    assert found, job.stdout
    assert float(found[1]) > 0.9


PROGRAM = [sys.executable, str(Path(__file__).with_name("elastic_program.py"))]
OTHER = "127.0.0.2"  # this host again: to the launcher another one, with an agent of its own


class ElasticJob(LaunchedJob):
    """A job of the program, which ends on request; with a script that reads a file.

    Args:
        folder: for files.
        options: options of the launcher.
        hosts: the first answer of the script; None: there is no script.
    """

    def __init__(self, folder: Path, *options: str, hosts: str | None = None, **more: Any):
        self.stop, self.hosts = folder / "stop", folder / "hosts"
        if hosts is not None:
            self.list(hosts)
            options = (*options, "--host-discovery-script", f"cat {self.hosts}")
        super().__init__(*options, *PROGRAM, str(self.stop), **more)

    def list(self, hosts: str) -> None:
        """Make the script print these hosts."""
        new = self.hosts.with_suffix(".new")
        new.write_text(hosts.replace(" ", "\n"))
        new.rename(self.hosts)

    def pid_of(self, process: str) -> int:
        found = re.findall(rf"process {re.escape(process)} is .* pid (\d+)", self.stdout)
        return int(found[-1])

    def agent_of(self, process: str) -> int:
        status = Path(f"/proc/{self.pid_of(process)}/status").read_text()
        return int(re.search(r"PPid:\s*(\d+)", status)[1])

    def end(self) -> int:
        """End the training; return the launcher's exit code."""
        self.stop.touch()
        code = self.wait()
        self.require_nothing_left()
        return code


def said(job: LaunchedJob) -> list[str]:
    lines = job.stderr.splitlines()
    return [line.partition(": ")[2] for line in lines if line.startswith("torch_ring.run: ")]


def test_hosts_come_and_the_first_one_goes_when_enough_ranks_stay(tmp_path):
    job = ElasticJob(tmp_path, "--min-np", "2", hosts=f"localhost {OTHER}")
    job.wait_for("is rank 1 of 2")
    job.list(OTHER)
    job.wait_for_error("rank 0 would leave, but --min-np is 2: they stay meanwhile")
    job.list(f"{OTHER}:2")
    job.wait_for(f"process 2.1 is rank 2 of 3, slot 1 of {OTHER}")
    job.wait_for_error("rank 0 on localhost has left")
    assert job.end() == 0, job.stderr
    assert "--host-discovery-script: localhost is not there any more" in said(job)
    assert "rank 0 on localhost is asked to leave" in said(job)
    assert job.stdout.count("has ended on 2 ranks") == 2
    assert "process 0.1 has ended" not in job.stdout


@pytest.mark.slow
@needs_packets
@pytest.mark.parametrize("tls", ["1", "0"])
def test_nobody_on_the_way_reads_the_messages_of_a_job_that_grows(tmp_path, tls):
    secret = {"TORCH_RING_SECRET": "of this test", "TORCH_RING_TLS": tls}
    with packets() as seen:
        job = ElasticJob(tmp_path, "--min-np", "2", hosts=f"localhost {OTHER}", **secret)
        job.wait_for("is rank 1 of 2")
        job.list(f"localhost {OTHER}:2")
        job.wait_for(f"process 2.1 is rank 2 of 3, slot 1 of {OTHER}")
        variables = Path(f"/proc/{job.pid_of('0.1')}/environ").read_text()
        (directory,) = re.findall(r"TORCH_RING_ELASTIC_DIRECTORY=([^\0]+)", variables)
        members = ask_directory(directory, key_of("of this test", tls))
        assert job.end() == 0, job.stderr
    assert [member.process for member in members] == ["0.1", "1.1", "2.1"]
    ports = [int(directory.rpartition(":")[2]), *(member.port for member in members)]
    data = with_ports(seen, ports)
    words = [b'"kind"', b"newcomer", members[0].id.encode(), members[2].id.encode()]
    assert len(data) > 1000
    assert [word for word in words if word in data] == ([] if tls == "1" else words)


@pytest.mark.slow
def test_a_lost_host_is_left_out_for_a_time(tmp_path):
    options = ("--min-np", "1", "--blacklist-cooldown-range", "0.5", "1")
    job = ElasticJob(tmp_path, *options, hosts=f"localhost {OTHER}")
    job.wait_for("is rank 1 of 2")
    os.kill(job.agent_of("1.1"), signal.SIGKILL)
    job.wait_for("process 0.1 is rank 0 of 1")
    job.wait_for("process 1.2 is rank 1 of 2")
    assert job.end() == 0, job.stderr
    assert f"{OTHER} is left out for 0.5 s" in said(job)


@pytest.mark.slow
def test_the_ranks_of_a_host_that_gets_sigterm_leave_in_peace(tmp_path):
    options = ("--min-np", "1", "--max-np", "5", "--standby", "1", "--grace-period", "60")
    job = ElasticJob(tmp_path, *options, hosts=f"localhost {OTHER}:3")
    job.wait_for("of 4", 4)
    for pid in (job.agent_of("1.1"), *(job.pid_of(f"{rank}.1") for rank in (1, 2, 3))):
        os.kill(pid, signal.SIGTERM)
    for rank in (1, 2, 3):
        job.wait_for_error(f"rank {rank} on {OTHER} has left")
    job.wait_for("process 0.1 is rank 0 of 1")
    assert job.end() == 0, job.stderr
    lines = said(job)
    assert lines[0] == f"{OTHER} got SIGTERM: its ranks have 60 s to leave"
    # None has failed or starts again, and the host is not left out.
    assert sorted(lines[1:]) == [f"rank {rank} on {OTHER} has left" for rank in (1, 2, 3)]


@pytest.mark.slow
def test_a_rank_that_does_not_leave_a_host_in_time_is_ended(tmp_path):
    options = ("--min-np", "1", "--max-np", "2", "--grace-period", "1")
    job = ElasticJob(tmp_path, *options, "-H", f"localhost,{OTHER}")
    job.wait_for("of 2", 2)
    agent = job.agent_of("1.1")
    os.kill(job.pid_of("1.1"), signal.SIGSTOP)
    os.kill(agent, signal.SIGTERM)
    job.wait_for("process 0.1 is rank 0 of 1")
    assert job.end() == 0, job.stderr
    first, second = said(job)
    assert first == f"{OTHER} got SIGTERM: its ranks have 1 s to leave"
    assert second.startswith(f"rank 1 on {OTHER} was ended by SIGKILL")


@pytest.mark.slow
def test_ranks_that_all_get_sigterm_one_after_another_hand_their_state_on(tmp_path):
    job = ElasticJob(tmp_path, "-np", "2", "--min-np", "1", "--max-np", "2")
    job.wait_for("of 2", 2)
    for process, place in (("0.1", "process 0.2 is"), ("1.1", "process 1.2 is")):
        os.kill(job.pid_of(process), signal.SIGTERM)
        job.wait_for(place)
    assert job.end() == 0, job.stderr
    assert said(job) == [
        "rank 0 on localhost has left",
        "rank 0 starts on localhost again",
        "rank 1 on localhost has left",
        "rank 1 starts on localhost again",
    ]


@pytest.mark.slow
def test_a_job_of_which_all_ranks_get_sigterm_is_not_done(tmp_path):
    job = ElasticJob(tmp_path, "-np", "2", "--min-np", "1")
    job.wait_for("of 2", 2)
    for process in ("0.1", "1.1"):
        os.kill(job.pid_of(process), signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM
    assert said(job)[-1] == "all ranks have left: the job is not done"
    job.require_nothing_left()


def test_a_script_that_fails_at_once_ends_the_job():
    code, out, errors = run_job("--host-discovery-script", "echo gone >&2; exit 3", "echo", "never")
    assert (code, out) == (1, "")
    assert errors == ("torch_ring.run: 'echo gone >&2; exit 3' failed with exit code 3: gone\n")


@pytest.mark.slow
def test_a_job_waits_for_hosts_and_has_no_more_ranks_than_are_wanted(tmp_path):
    """The job does not lose hosts, either, when its script fails later."""
    counts = ("-np", "2", "--min-np", "2", "--max-np", "3")
    job = ElasticJob(tmp_path, *counts, hosts="")
    job.wait_for_error("has found no hosts: waits for slots for 2 ranks")
    job.list("localhost:2")
    job.wait_for("is rank 1 of 2")
    job.hosts.unlink()
    job.wait_for_error("No such file or directory; the hosts of its last answer stay")
    job.list(f"localhost:4 {OTHER}:4")
    job.wait_for("is rank 2 of 3")
    assert job.end() == 0, job.stderr
    assert [line for line in said(job) if "starts" in line] == ["rank 2 starts on localhost"]
    line = ("-np", "2", "--elastic-timeout", "0.3", "--host-discovery-script", "echo a")
    code, _, errors = run_job(*line, "echo", "never")
    assert code == 1
    assert "'echo a' has found a:1 within 0.3 s (--elastic-timeout)" in errors


def test_the_wait_for_hosts_can_be_ended(tmp_path):
    def as_python_does() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    job = ElasticJob(tmp_path, hosts="", before=as_python_does)
    job.wait_for_error("waits for slots for 1 ranks")
    job.signal(signal.SIGINT)
    assert job.wait() == 128 + signal.SIGINT
    assert len(job.stderr.splitlines()) == 1
    job.require_nothing_left()


@pytest.mark.slow
def test_a_standby_process_takes_the_place_of_a_rank(tmp_path):
    counts = ("-np", "2", "--min-np", "1", "--max-np", "2", "--standby", "1")
    job = ElasticJob(tmp_path, *counts)
    job.wait_for("of 2", 2)
    os.kill(job.pid_of("1.1"), signal.SIGKILL)
    job.wait_for("process 1.2 is rank 1 of 2, slot 1 of localhost")
    os.kill(job.pid_of("0.1"), signal.SIGKILL)
    job.wait_for("process 0.2 is rank 1 of 2, slot 0 of localhost")
    assert job.end() == 0, job.stderr
    for rank in (0, 1):
        assert f"rank {rank} starts on localhost again, from a standby process" in said(job)
    assert job.stdout.count("had torch: True") >= 2
    assert not re.search(r"process \d\.1 .*had torch: True", job.stdout)
    assert re.search(r"^\[0\]<stdout>:process 0\.2 has ended", job.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_limit_of_resets(tmp_path):
    job = ElasticJob(tmp_path, "-np", "2", "--min-np", "1", "--reset-limit", "0")
    job.wait_for("of 2", 2)
    os.kill(job.pid_of("1.1"), signal.SIGKILL)
    assert job.wait() == 1
    job.require_nothing_left()
    assert said(job)[-1] == "the ranks have changed 1 times (--reset-limit 0): the job is ended"


def test_processes_that_wait_to_be_let_in_are_no_living_ranks(tmp_path):
    script = (
        "if [ $TORCH_RING_ELASTIC_NEWCOMER ]; then echo waits; exec sleep 1000; fi; "
        "if [ $RANK = 0 ]; then exec sleep 1000; fi; "
        "if [ $RANK = 2 ]; then until [ -e go ]; do sleep 0.05; done; fi; exit $RANK"
    )
    counts = ("-np", "3", "--min-np", "2", "--max-np", "3")
    job = LaunchedJob(*counts, "sh", "-c", script, folder=tmp_path)
    job.wait_for("waits")
    (tmp_path / "go").touch()
    assert job.wait() == 2
    job.require_nothing_left()
    assert job.stderr.splitlines() == [
        "torch_ring.run: rank 1 on localhost failed with exit code 1: the other 2 go on",
        "torch_ring.run: rank 1 starts on localhost again",
        "torch_ring.run: rank 2 on localhost failed with exit code 2: the other ranks are ended",
    ]


def test_a_job_ends_without_the_processes_that_wait_to_be_let_in(tmp_path):
    script = (
        "if [ $TORCH_RING_ELASTIC_NEWCOMER ]; then echo waits; exec sleep 1000; fi; "
        "if [ $RANK = 1 ]; then exit 1; fi; until [ -e go ]; do sleep 0.05; done"
    )
    counts = ("-np", "2", "--min-np", "1", "--max-np", "2")
    job = LaunchedJob(*counts, "sh", "-c", script, folder=tmp_path)
    job.wait_for("waits")
    (tmp_path / "go").touch()
    assert job.wait() == 0
    job.require_nothing_left()
    assert job.stdout == "[1]<stdout>:waits\n"
