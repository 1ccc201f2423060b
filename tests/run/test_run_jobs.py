"""Jobs of the launcher on this host: the ranks' environment, their output, their ends."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_jobs import DEADLINE_S, LaunchedJob, run_job, stub_ssh
from launcher_commands import clean_environment
from scripts import ROOT

from torch_ring.setup.control_groups import usable_cpus

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
    script = (
        "import os; v = os.environ; "
        "print(v['RANK'], v['LOCAL_RANK'], v['HOROVOD_CROSS_SIZE'], v['A'], v['B'], "
        "v.get('RUN_ONLY_HERE'), v['OMP_NUM_THREADS'], v['MASTER_ADDR'], os.getcwd())"
    )
    variables = {"B": "b", "RUN_ONLY_HERE": "yes", "OMP_NUM_THREADS": "3"}
    code, out, _ = run_job(
        *("-np", "2", "--env", "A=a a", sys.executable, "-c", script), folder=tmp_path, **variables
    )
    assert code == 0
    for rank in range(2):
        line = f"{rank} {rank} 1 a a b yes 3 127.0.0.1 {tmp_path}"
        assert of_rank(rank, "stdout", out) == [line]


def test_variables_of_another_launcher_are_gone():
    stale = {"HOROVOD_FUSION_THRESHOLD": "5", "TORCH_RING_FUSION_THRESHOLD": "6"}
    line = "-np 1 --env HOROVOD_RANK_X=1 --fusion-threshold-mb 1 env"
    code, out, _ = run_job(*line.split(), RANK="7", WORLD_SIZE="9", GROUP_RANK="3", **stale)
    assert code == 0
    variables = dict(line.split("=", 1) for line in of_rank(0, "stdout", out))
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["GROUP_RANK"]) == ("0", "1", "0")
    assert variables["HOROVOD_FUSION_THRESHOLD"] == str(1 << 20)
    assert "TORCH_RING_FUSION_THRESHOLD" not in variables


def test_cores_are_shared_by_the_ranks():
    cores = len(os.sched_getaffinity(0))
    code, out, _ = run_job("-np", str(cores + 1), "sh", "-c", "echo $OMP_NUM_THREADS")
    assert code == 0
    assert [line.partition(":")[2] for line in out.splitlines()] == ["1"] * (cores + 1)


@pytest.fixture
def group_of_one_cpu() -> Iterator[Path]:
    """Give a control group without a quota in one that has a quota of one CPU."""
    root = Path("/sys/fs/cgroup")
    is_old = (root / "cpu" / "cgroup.procs").exists()
    outer = (root / "cpu" if is_old else root) / f"torch_ring_test_{os.getpid()}"
    inner = outer / "inner"
    try:
        try:
            inner.mkdir(parents=True)
            if is_old:
                (outer / "cpu.cfs_quota_us").write_text("100000")
            else:
                (outer / "cpu.max").write_text("100000 100000")
        except OSError as error:
            pytest.skip(f"no control groups can be made here: {error}")
        yield inner
    finally:
        for folder in (inner, outer):
            if folder.exists():
                folder.rmdir()


@pytest.mark.skipif(usable_cpus() < 2, reason="takes two CPUs")
def test_a_quota_counts(group_of_one_cpu):
    def threads(group: Path | None) -> str:
        def prepare() -> None:
            os.environ.pop("OMP_NUM_THREADS", None)
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        return run_job("-np", "1", "sh", "-c", "echo $OMP_NUM_THREADS", before=prepare)[1]

    assert threads(None) == f"[0]<stdout>:{int(usable_cpus())}\n"
    assert threads(group_of_one_cpu) == "[0]<stdout>:1\n"


def test_input_is_empty():
    assert run_job("-np", "2", "cat")[:2] == (0, "")


def test_ten_megabytes_of_lines_are_never_mixed():
    """Lines of several lengths from three ranks and both streams, written in odd pieces."""
    script = (
        "import os, sys, itertools\n"
        "r = os.environ['RANK']\n"
        "for fd in (1, 2):\n"
        "    data = b''.join(b'%s %d %s\\n' % (r.encode(), i, b'x' * (i * 37 % 500))\n"
        "                    for i in range(6500))\n"
        "    for begin in range(0, len(data), 4099):\n"
        "        os.write(fd, data[begin:begin + 4099])\n"
    )
    code, out, errors = run_job("-np", "3", sys.executable, "-c", script)
    assert code == 0
    assert len(out) + len(errors) > 9e6
    for name, text in (("stdout", out), ("stderr", errors)):
        assert text.count("\n") == 3 * 6500
        for rank in range(3):
            want = [f"{rank} {i} {'x' * (i * 37 % 500)}" for i in range(6500)]
            assert of_rank(rank, name, text) == want


@pytest.mark.slow
def test_output_that_nobody_reads_blocks_only_the_ranks():
    """The launcher still hears signals, and the ranks end, while its pipes are full."""
    job = LaunchedJob("-np", "2", "yes", reads=False)
    pids = wait_for_blocked(job)
    assert pids
    job.signal(15)
    code = job.wait()
    job.require_nothing_left()
    job.close_pipes()
    assert code == 128 + 15


def wait_for_blocked(job: LaunchedJob) -> list[int]:
    """Wait until both ranks have filled all pipes; return their numbers."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        pids = [pid for pid, command in job.processes().items() if command.startswith("yes")]
        if len(pids) == 2:
            written = [bytes_written(pid) for pid in pids]
            time.sleep(0.3)
            if min(written) > 0 and written == [bytes_written(pid) for pid in pids]:
                return pids
        time.sleep(0.05)
    return []


def bytes_written(pid: int) -> int:
    return int(re.findall(r"wchar: (\d+)", Path(f"/proc/{pid}/io").read_text())[0])


def test_a_reader_that_leaves_ends_the_job():
    job = LaunchedJob("-np", "2", "yes", reads=False)
    assert wait_for_blocked(job)
    job.close_pipes()
    assert job.wait() == 128 + 13
    job.require_nothing_left()


def test_output_is_kept_in_files(tmp_path):
    line = ("-np", "2", "--output-filename", str(tmp_path / "logs"))
    code, out, _ = run_job(*line, "sh", "-c", "echo out $RANK; echo err $RANK >&2")
    assert code == 0
    assert sorted(out.splitlines()) == ["[0]<stdout>:out 0", "[1]<stdout>:out 1"]
    for rank in range(2):
        folder = tmp_path / "logs" / f"rank.{rank}"
        assert (folder / "stdout").read_text() == f"out {rank}\n"
        assert (folder / "stderr").read_text() == f"err {rank}\n"


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


@pytest.mark.parametrize("fds", [(1,), (2,), (1, 2)], ids=["stdout", "stderr", "both"])
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
    if fds == (1, 2):
        assert (out, errors) == ("", "")
    else:
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


def test_an_error_is_no_traceback_where_it_cannot_be_said():
    before = functools.partial(write_to_full_disk, 2)
    assert run_job("-np", "2", before=before)[0] == 2


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


@pytest.mark.parametrize(
    ("line", "ranks", "said"),
    [
        ("-np 4", ["0 n1", "1 n1", "2 n2", "3 n2"], "n1:2, n2:2"),
        ("", ["0 n1", "1 n1", "2 n2", "3 n2"], "n1:2, n2:2"),
        ("-np 3", ["0 n1", "1 n1", "2 n2"], "n1:2, n2:1"),
        ("-np 2", ["0 n1", "1 n1"], "n1:2"),
        ("-H n7:1,n8:1", ["0 n7", "1 n8"], ""),
    ],
)
def test_ranks_run_on_the_hosts_of_the_allocation(tmp_path, line, ranks, said):
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_NTASKS": "4",
    }
    command = ("sh", "-c", "echo $RANK $SSH_HOST")
    code, out, errors = run_job(*line.split(), *command, PATH=stub_ssh(tmp_path), **slurm)
    assert code == 0, errors
    assert sorted(text.partition(":")[2] for text in out.splitlines()) == ranks
    sentence = f"the ranks run on hosts of this job (SLURM_JOB_NODELIST): {said}; -H chooses others"
    assert errors.splitlines() == ([f"torch_ring.run: {sentence}"] if said else [])


def test_more_ranks_than_the_allocation_has(tmp_path):
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2"}
    code, out, errors = run_job("-np", "3", "true", PATH=stub_ssh(tmp_path), **slurm)
    assert (code, out) == (2, "")
    assert "there are only 2 slots (n1:2): give fewer ranks, or hosts and slots with -H" in errors


# --- refused jobs


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("-np 2", 2, "there is no command to run"),
        ("true", 2, "how many ranks?"),
        ("-np 3 -H localhost:2 true", 2, "only 2 slots (localhost:2)"),
        ("-np 2 --standby 1 true", 2, "--standby needs --max-np, or --host-discovery-script"),
        ("-np 2 --max-np 4 true", 2, "--max-np 4 needs --min-np"),
        ("-np 2 --min-np 1 --max-np 1 true", 2, "--max-np 1: there are 2 ranks"),
        ("-np 2 --min-np 3 true", 2, "--min-np 3: there are 2 ranks"),
        ("-np 2 --network-interface no0 true", 2, "localhost: no network interface 'no0'"),
        (
            "-np 2 no-such-program",
            127,
            "on localhost cannot start 'no-such-program': [Errno 2] No such file or directory: "
            "'no-such-program': is it installed there, and on the PATH?",
        ),
        ("-np 2 /", 126, "on localhost cannot start '/': [Errno 13] Permission denied: '/': is it"),
        (
            "-np 2 train.py --lr 1",
            127,
            "'train.py': a Python program begins with its interpreter: `python train.py`",
        ),
        (f"-np 2 {HELLO}", 126, f"a Python program begins with its interpreter: `python {HELLO}`"),
    ],
)
def test_what_cannot_be_run(line, code, message):
    got, out, errors = run_job(*line.split())
    assert (got, out) == (code, "")
    assert message in errors
    assert errors.startswith("torch_ring.run: ")
    assert "Traceback" not in errors


def test_remarks_and_versions():
    code, _, errors = run_job("-np", "1", "--gloo", "--cache-capacity", "3", "true")
    assert code == 0
    assert errors.splitlines() == [
        "torch_ring.run: --gloo changes nothing: the ranks find one another in one way only",
        "torch_ring.run: --cache-capacity changes nothing: torch_ring has no use for it",
    ]
    assert run_job("--version")[1].startswith("0.")
    assert "    [X] PyTorch\n" in run_job("--check-build")[1]
