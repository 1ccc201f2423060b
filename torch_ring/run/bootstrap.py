"""agent_command, agent_source, ...: how a Python without torch_ring becomes a host's agent."""

from __future__ import annotations

import base64
import shlex
import sys
from pathlib import Path

__all__ = ["agent_command", "agent_source", "remote_command"]

# Nothing of a job is on a command line, which every user of a host can read.
_READ_PROGRAM = "import base64;exec(base64.b64decode(open(0,'rb',0,closefd=False).readline()))"
_FLAGS = ("-I", "-S", "-c")  # neither variables nor packages of the user: it starts in 20 ms
_FIND_PYTHON = (
    'p=$(command -v "$1" || command -v python3 || command -v python) || '
    '{ echo "there is no $1, and no python3" >&2; exit 127; }; '
    'exec "$p" -I -S -c "$2"'
)
# In the order of their imports.
_MODULES = ("rendezvous.control_groups", "run.frames", "run.rank_process", "run.agent")
_PROGRAM = """
import sys, types
for name, text in {modules!r}:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules["torch_ring.run.agent"].main()
"""


def agent_command() -> list[str]:
    """Return the command of an agent on this host."""
    return [sys.executable, *_FLAGS, _READ_PROGRAM]


def remote_command() -> str:
    """Return the command of an agent on another host, for the shell of the user there.

    It runs with this Python's path if there is such a file, or with the first python3.
    """
    words = ["sh", "-c", _FIND_PYTHON, "sh", sys.executable, _READ_PROGRAM]
    return "exec " + " ".join(map(shlex.quote, words))


def agent_source() -> bytes:
    """Return what an agent reads first: its program, in one line."""
    package = Path(__file__).parent.parent
    modules = [(name, "") for name in ("torch_ring", "torch_ring.rendezvous", "torch_ring.run")]
    for name in _MODULES:
        text = (package / f"{name.replace('.', '/')}.py").read_text()
        modules.append((f"torch_ring.{name}", text))
    return base64.b64encode(_PROGRAM.format(modules=modules).encode()) + b"\n"
