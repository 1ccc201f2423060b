# SPDX-License-Identifier: Apache-2.0
"""Ends of the launcher's jobs: failing ranks, signals, and a killed launcher."""

from __future__ import annotations

import base64
import os
import re
import signal
import time
from pathlib import Path

import pytest
from launched_jobs import DEADLINE_S, LaunchedJob, run_job, stub_ssh

from torch_ring.run import host_connection
from torch_ring.run import job as launched_job

pytestmark = pytest.mark.launcher

STUBBORN = "trap '' TERM INT; echo up; while :; do sleep 0.1; done"
PATIENT = "echo up; exec sleep 1000"


def test_a_failing_rank_ends_the_others():
    script = f"if [ $RANK = 2 ]; then sleep 0.3; kill -SEGV $$; fi; {PATIENT}"
    code, _, errors = run_job("-np", "3", "sh", "-c", script)
    assert code == 128 + signal.SIGSEGV
    line = "torch_ring.run: rank 2 on localhost was ended by SIGSEGV: the other ranks are ended"
    assert line in errors.splitlines()


def test_the_first_failure_counts_and_is_said_again_at_the_end(tmp_path):
    """The other ranks, when ended, fail and report it, too."""
    script = (
        "if [ $RANK = 1 ]; then until [ -e 0 -a -e 2 ]; do sleep 0.05; done; exit 3; fi; "
        "trap 'echo bye; exit 5' TERM; touch $RANK; sleep 1000 & wait"
    )
    job = LaunchedJob("-np", "3", "bash", "-c", script, folder=tmp_path)
    assert job.wait() == 3
    job.require_nothing_left()
    assert job.stdout.count("bye") == 2
    said = [line for line in job.stderr.splitlines() if line.startswith("torch_ring.run: ")]
    assert said == [
        "torch_ring.run: rank 1 on localhost failed with exit code 3: the other ranks are ended",
        "torch_ring.run: the first failure: rank 1 on localhost failed with exit code 3",
    ]


def shorten_grace() -> None:
    launched_job.FAILURE_GRACE_S = 0.3


def test_ranks_that_ignore_sigterm_are_killed():
    script = f"if [ $RANK = 0 ]; then sleep 0.5; exit 4; fi; {STUBBORN}"
    code, _, errors = run_job("-np", "3", "bash", "-c", script, before=shorten_grace)
    assert code == 4
    assert "rank 0 on localhost failed with exit code 4" in errors


def test_a_rank_that_is_done_does_not_end_the_others():
    code, out, _ = run_job("-np", "3", "sh", "-c", "sleep 0.$((RANK * 2)); echo done")
    assert code == 0
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:done" for rank in range(3)]


INT, TERM = signal.SIGINT, signal.SIGTERM
USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


@pytest.mark.parametrize("last", [INT, signal.SIGHUP])
def test_a_signal_is_passed_on(last):
    """By SIGUSR1 Slurm announces the end of a job's time, if the user asks for it."""
    traps = "trap 'echo got USR1' USR1; trap 'echo got USR2' USR2; trap 'echo got last; exit 0' "
    script = f"{traps} {last.name[3:]}; echo up; while :; do sleep 0.05; done"
    job = LaunchedJob("-np", "2", "bash", "-c", script)
    job.wait_for("up", 2)
    for number, text in ((USR1, "got USR1"), (USR2, "got USR2"), (last, "got last")):
        job.signal(number)
        job.wait_for(text, 2)
    assert job.wait() == 0  # the ranks have chosen their exit code
    job.require_nothing_left()
    assert f"{last.name} is passed on to the ranks" in job.stderr
    assert "SIGUSR" not in job.stderr


@pytest.mark.parametrize(
    ("numbers", "script", "scontrol", "code", "said"),
    [
        pytest.param([USR1], "", 0, 0, "job 42 of Slurm is put into its queue", id="in time"),
        pytest.param([USR1], "trap 'exit 143' USR1;", 0, 143, "into its queue", id="as by SIGTERM"),
        pytest.param([TERM], "trap 'exit 0' TERM;", 0, 0, "", id="a user has cancelled it"),
        pytest.param(
            [USR1, TERM], "trap 'echo told' USR1; trap 'exit 0' TERM;", 0, 0, "", id="late"
        ),
        pytest.param([USR1], "trap 'exit 3' USR1;", 0, 3, "", id="a rank fails"),
        pytest.param(
            [USR2],
            "trap 'exit 0' USR2;",
            1,
            1,
            "`scontrol requeue 42` has failed",
            id="scontrol fails",
        ),
    ],
)
def test_slurm_runs_a_job_again_whose_time_ends(tmp_path, numbers, script, scontrol, code, said):
    """Ranks stop at a signal, and a stand-in for scontrol notes its arguments."""
    stand_in = tmp_path / "scontrol"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexit {scontrol}\n')
    stand_in.chmod(0o755)
    script = script or "trap 'exit 0' USR1;"
    command = ("bash", "-c", f"{script} echo up; while :; do sleep 0.05; done")
    path = f"{tmp_path}:{os.environ['PATH']}"
    job = LaunchedJob("--requeue", "-np", "2", *command, SLURM_JOB_ID="42", PATH=path)
    job.wait_for("up", 2)
    for number in numbers:
        job.signal(number)
        job.wait_for("told", 2 if len(numbers) > 1 else 0)
    assert job.wait() == code
    job.require_nothing_left()
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 42\n" if said else "")
    assert said in job.stderr


def test_the_grace_period_is_the_users():
    job = LaunchedJob(
        "--grace-period", "0.5", "-np", "2", "sh", "-c", STUBBORN, before=shorten_grace
    )
    job.wait_for("up", 2)
    job.signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM
    assert "which have 0.5 s; a second one ends them at once" in job.stderr
    job.require_nothing_left()


def test_a_second_signal_ends_ranks_that_ignore_the_first():
    job = LaunchedJob("--grace-period", "1000", "-np", "2", "bash", "-c", STUBBORN)
    job.wait_for("up", 2)
    job.signal(signal.SIGINT)
    job.wait_for_error("SIGINT is passed on")  # two signals at once are one
    job.signal(signal.SIGINT)
    assert job.wait() == 128 + signal.SIGINT
    job.require_nothing_left()


FAMILY = (
    # A child in a session of its own, an orphan, and one that ignores SIGTERM and SIGHUP.
    "setsid sleep 1000 & (setsid sleep 1000 &) ; (trap '' TERM HUP; sleep 1000) & "
)


def hurry_agents() -> None:
    """Let agents whose launcher has died wait less for ranks that ignore SIGTERM."""
    source = base64.b64decode(host_connection.agent_source())
    hurried = source.replace(b"_LOST_GRACE_S = 5.0", b"_LOST_GRACE_S = 0.5")
    assert hurried != source
    host_connection.agent_source = lambda: base64.b64encode(hurried) + b"\n"


def test_nothing_is_left_when_the_launcher_is_killed():
    job = LaunchedJob("-np", "2", "bash", "-c", f"{FAMILY} {STUBBORN}", before=hurry_agents)
    job.wait_for("up", 2)
    assert sum("sleep 1000" in command for command in job.processes().values()) >= 6
    job.signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    job.require_nothing_left()


def test_nothing_is_left_when_the_job_is_done():
    def before() -> None:
        launched_job._AGENTS_PATIENCE_S = 1000.0
        launched_job._LEFT_GRACE_S = 0.5

    code, _, _ = run_job("-np", "2", "bash", "-c", f"{FAMILY} echo done", before=before)
    assert code == 0  # and run_job has seen that no process is left


def test_a_stopped_rank_is_ended():
    script = f"if [ $RANK = 0 ]; then kill -STOP $$; fi; sleep 0.5; exit 6; {PATIENT}"
    code, _, errors = run_job("-np", "2", "bash", "-c", script)
    assert code == 6
    assert "rank 1 on localhost failed with exit code 6" in errors


def handles(pid: int, number: int = signal.SIGTERM) -> bool:
    """Return whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("options", [(), ("--min-np", "1")], ids=["plain", "elastic"])
def test_an_agent_that_ends_while_other_hosts_are_reached_ends_the_job(tmp_path, options):
    ssh = tmp_path / "ssh"  # an ssh that reaches its host after hours
    ssh.write_text("#!/bin/sh\nexec sleep 10000\n")
    ssh.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ("--start-timeout", "3600", "-H", "localhost,far", "true")
    job = LaunchedJob("-np", "2", *options, *command, PATH=path)
    deadline = time.monotonic() + DEADLINE_S
    while not (agents := [p for p, c in job.processes().items() if "exec(" in c and handles(p)]):
        assert time.monotonic() < deadline
    os.kill(agents[0], signal.SIGTERM)
    assert job.wait() == 1
    job.wait_for_error("localhost cannot run ranks")
    job.require_nothing_left()


def test_ranks_do_not_outlive_an_agent_that_is_killed():
    job = LaunchedJob("-np", "2", "bash", "-c", STUBBORN)
    job.wait_for("up", 2)
    agents = [pid for pid, command in job.processes().items() if "b64decode" in command]
    assert len(agents) == 1
    os.kill(agents[0], signal.SIGKILL)
    assert job.wait() == 1
    job.require_nothing_left()
    assert "is lost with its host: the agent that runs the ranks of this host ended by SIGKILL" in (
        job.stderr
    )


def test_an_ignored_sigint_stays_ignored(tmp_path):
    """SIGINT is ignored in a job that a shell has started in the background."""

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    script = "echo up; until [ -e go ]; do sleep 0.05; done"
    job = LaunchedJob("-np", "1", "sh", "-c", script, before=ignore, folder=tmp_path)
    job.wait_for("up")
    job.signal(signal.SIGINT)
    time.sleep(0.3)  # the launcher would have ended the rank
    (tmp_path / "go").touch()
    assert job.wait() == 0
    job.require_nothing_left()


def test_no_secret_is_on_a_command_line_here_or_of_ssh(tmp_path):
    secret = "a-secret-of-the-user-4711"
    script = (
        'test "$TORCH_RING_SECRET" = a-secret-of-the-user-$((4700 + 11)) && echo up; sleep 1000'
    )
    variables = {"TORCH_RING_SECRET": secret, "PATH": stub_ssh(tmp_path)}
    ssh = tmp_path / "ssh"
    ssh.write_text(ssh.read_text().replace("\n", f'\necho "$@" >> {tmp_path}/asked\n', 1))
    job = LaunchedJob("--verbose", "-H", "here,there", "sh", "-c", script, **variables)
    job.wait_for("up", 2)
    processes = job.processes()
    assert len(processes) >= 4
    assert secret not in (tmp_path / "asked").read_text()  # of ssh
    assert not [command for command in processes.values() if secret in command]
    job.signal(signal.SIGTERM)
    job.wait()
    job.require_nothing_left()
    assert secret not in job.stdout + job.stderr
