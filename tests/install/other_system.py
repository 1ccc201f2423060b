# SPDX-License-Identifier: Apache-2.0
"""Runs programs as on Linux, macOS or Windows, without the seconds that importing torch takes.

A server that has torch loaded, and not torch_ring, forks a process for each program. For macOS and
Windows it makes Python look like theirs, as far as torch_ring sees it: what the system lacks is
gone from the standard library, and there is no native module. torch itself is that of Linux.
"""

from __future__ import annotations

import builtins
import faulthandler
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEADLINE_S = 200  # a hang, not a slow machine
# Names of Linux alone that the package uses; and those that Windows lacks, too.
LINUX_ONLY = {
    os: "memfd_create pidfd_open sched_getaffinity sched_setaffinity MFD_CLOEXEC MFD_ALLOW_SEALING "
    "posix_fallocate",
    signal: "sigwaitinfo sigtimedwait pidfd_send_signal",
    socket: "SO_PEERCRED",
}
POSIX = {
    os: "fork forkpty register_at_fork getuid geteuid getpgid setsid killpg mkfifo O_CLOEXEC "
    "WNOHANG waitid sysconf uname",
    signal: "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 "
    "SIGUSR2 SIG_BLOCK SIG_SETMASK setitimer alarm pthread_sigmask pthread_kill sigpending sigwait",
    socket: "AF_UNIX SCM_RIGHTS CMSG_SPACE CMSG_LEN socketpair",
}
POSIX_MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")


class Server:
    """Forks programs; they run one after the other."""

    def __init__(self) -> None:
        ours = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCH_RING_MUTANT")  # the last: no setting
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        # Or torch would import torch_ring, where it is installed.
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, system: str, *arguments: Any, folder: Path, **variables: str) -> tuple[int, str]:
        """Run ``python arguments`` in a folder; return its exit code and output."""
        asked = [system, [*map(str, arguments)], str(folder), variables]
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        return answer["code"], answer["output"]

    def close(self) -> None:
        self.process.communicate()


def serve() -> list[Any] | None:
    """Fork a process for each line of standard input; return that line, in the process."""
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                return json.loads(line)
            _, status = os.waitpid(child, 0)
            output.seek(0)
            said = output.read().decode()
        print(json.dumps({"code": os.waitstatus_to_exitcode(status), "output": said}), flush=True)
    return None


def become(system: str) -> None:
    """Change this process, before it imports torch_ring."""
    assert "torch_ring" not in sys.modules
    gone = [LINUX_ONLY, *([POSIX] if system == "win32" else [])]
    for module, names in ((module, names) for table in gone for module, names in table.items()):
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    if system == "win32":
        forbid_modules()
    forbid_proc()
    sys.platform = system


def forbid_modules() -> None:
    """Refuse the package's imports of modules that Windows lacks; those of libraries pass."""
    real = builtins.__import__

    def guarded(name: str, *more: Any, **named: Any) -> Any:
        importer = str((more[0] if more else named.get("globals") or {}).get("__name__", ""))
        if name in POSIX_MODULES and importer.startswith("torch_ring"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *more, **named)

    builtins.__import__ = guarded


def forbid_proc() -> None:
    """Refuse to open files below /proc, /sys and /dev/shm, which other systems do not have."""

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(("/proc", "/sys", "/dev/shm")):
            raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))

    sys.addaudithook(look)


def play(system: str, arguments: list[str], folder: str, variables: dict[str, str]) -> None:
    """Run a program in this process."""
    os.chdir(folder)
    os.environ.update(variables)
    if system != "linux":
        become(system)
    program, *sys.argv = arguments
    if program == "-c":
        sys.path[0] = folder
        exec(compile(sys.argv[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    # Libraries that see another system would look for their own parts of it, so all are here first.
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.utils.data  # noqa: F401

    asked = serve()
    if asked is not None:
        play(*asked)
