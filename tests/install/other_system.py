# SPDX-License-Identifier: Apache-2.0
"""Makes Python look like that of macOS or Windows, as far as torch_ring sees it.

``python other_system.py darwin program.py [arguments...]`` runs a program there: what the system
lacks is gone from the standard library, and there is no native module. Libraries that see another
system would look for their own parts of it, so they are imported first.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

# Names of Linux alone that the package uses; and those that Windows lacks, too.
LINUX_ONLY = {
    os: (
        "memfd_create",
        "pidfd_open",
        "sched_getaffinity",
        "sched_setaffinity",
        "MFD_CLOEXEC",
        "MFD_ALLOW_SEALING",
        "posix_fallocate",
    ),
    signal: ("sigwaitinfo", "sigtimedwait", "pidfd_send_signal"),
    socket: ("SO_PEERCRED",),
}
POSIX = {
    os: (
        "fork",
        "forkpty",
        "register_at_fork",
        "getuid",
        "geteuid",
        "getpgid",
        "setsid",
        "killpg",
        "mkfifo",
        "O_CLOEXEC",
        "WNOHANG",
        "waitid",
        "sysconf",
        "uname",
    ),
    signal: (
        *("SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP"),
        *("SIGTSTP", "SIGUSR1", "SIGUSR2", "SIG_BLOCK", "SIG_SETMASK", "setitimer", "alarm"),
        *("pthread_sigmask", "pthread_kill", "sigpending", "sigwait"),
    ),
    socket: ("AF_UNIX", "SCM_RIGHTS", "CMSG_SPACE", "CMSG_LEN", "socketpair"),
}
POSIX_MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")


def become(system: str) -> None:
    """Change this process, before it imports torch_ring. torch is imported first: it is Linux's."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # or torch would import torch_ring now
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.utils.data  # noqa: F401

    with contextlib.suppress(ImportError):  # for examples/mnist
        import sklearn.datasets  # noqa: F401
    assert "torch_ring" not in sys.modules
    gone = [LINUX_ONLY, *([POSIX] if system == "win32" else [])]
    for module, names in ((module, names) for table in gone for module, names in table.items()):
        for name in names:
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


if __name__ == "__main__":
    system, program, *arguments = sys.argv[1:]
    become(system)
    sys.argv = [program, *arguments]
    if program == "-c":
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    elif program == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
