# SPDX-License-Identifier: Apache-2.0
"""Jobs of the launcher on this host: the environment of ranks, their output, their ends."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched_jobs import DEADLINE_S, LaunchedJob, run_job, stub_ssh
from launcher_commands import clean_environment
from scripts import ROOT

from torch_ring.run import job as launched_job

HELLO = str(ROOT / "tests" / "setup" / "hello.py")
pytestmark = pytest.mark.launcher


def of_rank(rank: int, stream: str, text: str) -> list[str]:
    prefix = f"[{rank}]<{stream}>:"
    return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]


def test_ranks_train_together():
    """The command itself, as a user types it."""
    command = [sys.executable, "-m", "torch_ring.run", "-np", "2", sys.executable, HELLO]
    done = subprocess.run(
        command,
        env=clean_environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        (line,) = of_rank(rank, "stdout", done.stdout)
        assert line.startswith(f"rank {rank} of 2: torch"), done.stdout
    assert "2 ranks on one host, by shared memory" in done.stderr
    assert "TORCH_RING_RUN_ID" not in done.stderr  # not a misspelt setting


def test_what_a_rank_gets(tmp_path):
    """Variables of another launcher are gone, and there is no input."""
    script = "import json, os, sys; print(json.dumps([*os.environ.items()]), sys.stdin.read())"
    stale = {"RANK": "7", "WORLD_SIZE": "9", "GROUP_RANK": "3", "TORCH_RING_FUSION_THRESHOLD": "6"}
    own = {"B": "b", "RUN_ONLY_HERE": "yes", "OMP_NUM_THREADS": "3"}
    options = ("-np", "2", "--env", "A=a a", "--fusion-threshold-mb", "1")
    line = ("sh", "-c", 'pwd; exec "$0" "$@"', sys.executable, "-c", script)
    code, out, _ = run_job(*options, *line, folder=tmp_path, **stale, **own)
    assert code == 0
    for rank in range(2):
        folder, found = of_rank(rank, "stdout", out)
        variables = dict(json.loads(found))
        wanted = {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "GROUP_RANK": "0"},
            **{"HOROVOD_CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "A": "a a"},
            **{"HOROVOD_FUSION_THRESHOLD": str(1 << 20), **own},
        }
        assert wanted.items() <= variables.items()
        assert "TORCH_RING_FUSION_THRESHOLD" not in variables
        assert folder == str(tmp_path)


def test_cores_are_shared_by_the_ranks():
    cores = len(os.sched_getaffinity(0))
    code, out, _ = run_job("-np", str(cores + 1), "sh", "-c", "echo $OMP_NUM_THREADS")
    assert code == 0
    assert [line.partition(":")[2] for line in out.splitlines()] == ["1"] * (cores + 1)


def test_megabytes_of_lines_are_never_mixed():
    """Lines of several lengths from three ranks and both streams, written in odd pieces."""
    script = (
        "import os, sys, itertools\n"
        "r = os.environ['RANK']\n"
        "for fd in (1, 2):\n"
        "    data = b''.join(b'%s %d %s\\n' % (r.encode(), i, b'x' * (i * 37 % 500))\n"
        "                    for i in range(2000))\n"
        "    for begin in range(0, len(data), 4099):\n"
        "        os.write(fd, data[begin:begin + 4099])\n"
    )
    code, out, errors = run_job("-np", "3", sys.executable, "-c", script)
    assert code == 0
    assert len(out) + len(errors) > 2.5e6
    for name, text in (("stdout", out), ("stderr", errors)):
        assert text.count("\n") == 3 * 2000
        for rank in range(3):
            want = [f"{rank} {i} {'x' * (i * 37 % 500)}" for i in range(2000)]
            assert of_rank(rank, name, text) == want


def test_output_that_nobody_reads_blocks_only_the_ranks():
    """The launcher still hears signals, and the ranks end, while its pipes are full."""

    def wait_briefly_for_readers() -> None:
        launched_job._READERS_PATIENCE_S = 0.5

    job = LaunchedJob("-np", "2", "yes", reads=False, before=wait_briefly_for_readers)
    assert wait_for_blocked(job)
    job.signal(15)
    code = job.wait()
    job.require_nothing_left()
    job.close_pipes()
    assert code == 128 + 15


def wait_for_blocked(job: LaunchedJob) -> bool:
    """Return whether both ranks have filled all pipes before the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        pids = [pid for pid, command in job.processes().items() if command.startswith("yes")]
        if len(pids) == 2:
            written = [bytes_written(pid) for pid in pids]
            time.sleep(0.3)
            if min(written) > 0 and written == [bytes_written(pid) for pid in pids]:
                return True
        time.sleep(0.05)
    return False


def bytes_written(pid: int) -> int:
    return int(re.findall(r"wchar: (\d+)", Path(f"/proc/{pid}/io").read_text())[0])


def test_a_folder_for_output_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    line = ("-np", "2", "--output-filename", str(tmp_path / "file"))
    code, out, errors = run_job(*line, "echo", "hi")
    assert (code, out) == (2, "")
    assert errors.startswith("torch_ring.run: --output-filename: [Errno 20] Not a directory")
    assert errors.endswith(": give a folder that can be written\n")


# --- a full disk


def write_to_full_disk(*fds: int) -> None:
    """Replace descriptors of the launcher by a full disk."""
    full = os.open("/dev/full", os.O_WRONLY)
    for fd in fds:
        os.dup2(full, fd)


@pytest.mark.parametrize("fds", [(1,), (2,)], ids=["stdout", "stderr"])
def test_a_job_goes_on_when_its_output_cannot_be_written(tmp_path, fds):
    script = f"for i in 1 2 3; do echo o; echo e >&2; sleep 0.1; done; echo > {tmp_path}/$RANK"
    before = functools.partial(write_to_full_disk, *fds)
    code, out, errors = run_job("-np", "2", "sh", "-c", script, before=before)
    assert code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    lost, other, kept = ("stdout", errors, "e") if fds == (1,) else ("stderr", out, "o")
    line = (
        f"torch_ring.run: {lost} cannot be written: No space left on device. The job goes on; its "
        "output is lost until there is room"
    )
    assert other.splitlines().count(line) == 1
    assert len([text for text in other.splitlines() if text.endswith(f">:{kept}")]) == 6


def test_a_job_goes_on_when_its_files_cannot_be_written(tmp_path):
    for rank in range(2):
        folder = tmp_path / "logs" / f"rank.{rank}"
        folder.mkdir(parents=True)
        (folder / "stdout").symlink_to("/dev/full")
    line = ("-np", "2", "--output-filename", str(tmp_path / "logs"))
    code, out, errors = run_job(*line, "sh", "-c", "echo a; sleep 0.1; echo b; echo err >&2")
    assert code == 0
    assert sorted(text[-1] for text in out.splitlines()) == ["a", "a", "b", "b"]
    (said,) = [text for text in errors.splitlines() if text.startswith("torch_ring.run: ")]
    assert re.fullmatch(
        rf"torch_ring.run: {tmp_path}/logs/rank.[01]/stdout cannot be written: No space left on "
        r"device\. The job goes on; files of --output-filename lack output until there is room",
        said,
    )
    for rank in range(2):
        assert (tmp_path / "logs" / f"rank.{rank}" / "stderr").read_text() == "err\n"


def test_a_reader_of_one_stream_that_leaves_ends_the_job_in_words():
    def close_reader() -> None:
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 1)

    code, _, errors = run_job("-np", "2", "yes", before=close_reader)
    assert code == 128 + 13
    assert "torch_ring.run: nobody reads the stdout any more: the job is ended\n" in errors


def test_output_of_what_a_rank_has_left_behind_comes_too():
    """A rank ends with bytes in its pipe, which its child keeps open."""
    script = "sleep 1000 & head -c 60000 /dev/zero | tr '\\0' x; echo; echo the end"
    code, out, _ = run_job("-np", "1", "sh", "-c", script)
    assert code == 0
    assert of_rank(0, "stdout", out) == ["x" * 60000, "the end"]


# --- in an allocation of Slurm


def test_ranks_run_on_the_hosts_of_the_allocation(tmp_path):
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_NTASKS": "4",
    }
    line = ("-np", "3", "sh", "-c", "echo $RANK $SSH_HOST")
    code, out, errors = run_job(*line, PATH=stub_ssh(tmp_path), **slurm)
    assert code == 0, errors
    ranks = sorted(text.partition(":")[2] for text in out.splitlines())
    assert ranks == ["0 n1", "1 n1", "2 n2"]
    sentence = "the ranks run on hosts of this job (SLURM_JOB_NODELIST): n1:2, n2:1; -H chooses "
    assert errors == f"torch_ring.run: {sentence}others\n"


def test_a_host_that_does_not_answer(tmp_path):
    path = stub_ssh(tmp_path)
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 1000\n")
    code, _, errors = run_job("-H", "silent:1", "--start-timeout", "1", "true", PATH=path)
    assert code == 1
    assert "silent did not answer within 1 s" in errors


# --- refused jobs


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("-np 2", 2, "there is no command to run"),
        ("--requeue -np 1 true", 2, "needs a job of Slurm: there is no SLURM_JOB_ID"),
        ("-np 2 --min-np 3 true", 2, "--min-np 3: there are 2 ranks"),
        (
            "-np 2 no-such-program",
            127,
            "on localhost cannot start 'no-such-program': [Errno 2] No such file or directory: "
            "'no-such-program': is it installed there, and on the PATH?",
        ),
        ("-np 2 /", 126, "on localhost cannot start '/': [Errno 13] Permission denied: '/': is it"),
        (f"-np 2 {HELLO}", 126, f"a Python program begins with its interpreter: `python {HELLO}`"),
    ],
)
def test_what_cannot_be_run(line, code, message):
    got, out, errors = run_job(*line.split())
    assert (got, out) == (code, "")
    assert message in errors
    assert errors.startswith("torch_ring.run: ")
    assert "Traceback" not in errors


def test_versions():
    assert run_job("--version")[1].startswith("0.")
    assert "    [X] PyTorch\n" in run_job("--check-build")[1]


SAY = "import horovod; print(horovod.__version__)"


def test_the_setting_as_an_option_and_a_shell_between():
    options = ("-np", "1", "--env", "TORCH_RING_AS_HOROVOD=1")
    code, out, err = run_job(*options, "sh", "-c", f'{sys.executable} -c "{SAY}"')
    assert (code, out) == (0, "[0]<stdout>:0.28.1\n"), err
