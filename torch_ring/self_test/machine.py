"""Facts of the machine and of its software, for the self-test's report."""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_ring._C import BUILT_FOR_TORCH, nccl_version
from torch_ring._C import __file__ as native_module
from torch_ring.config import Config, variables_set
from torch_ring.errors import InvalidArgumentError, first_line
from torch_ring.setup.control_groups import cpu_quota, limits_of_groups
from torch_ring.setup.launchers import discover, variables_of_launchers
from torch_ring.setup.network import address_of_interface, own_address

__all__ = [
    "build",
    "gpus",
    "launchers",
    "limits",
    "machine",
    "nccl",
    "network",
    "python",
    "settings",
]

_VERSION_DEADLINE_S = 10  # for a launcher to say its version

Facts = dict[str, Any]


def build() -> Facts:
    """Return which torch_ring this is, and which native module it has loaded."""
    package = sys.modules["torch_ring"]  # its __init__ stands above all rooms
    return {
        "version": package.__version__,
        "package": str(Path(str(package.__file__)).parent),
        "native_module": native_module,
        "built_for_torch": BUILT_FOR_TORCH,
        "transports": ["shm", "tcp", "nccl"],
    }


def python() -> Facts:
    """Return which Python and which torch this is."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": torch.__version__,
        "torch_path": str(Path(torch.__file__).parent),
        "torch_cuda": torch.version.cuda,
        "torch_has_gloo": dist.is_available() and dist.is_gloo_available(),
    }


def launchers() -> Facts:
    """Return the launchers that are installed, and what one has set in the environment."""
    try:
        identity = discover()
        started = f"{identity.launcher}: rank {identity.rank} of {identity.size}"
        if identity.launcher == "python":
            started = "no launcher"
    except InvalidArgumentError as error:
        started = f"init() would refuse: {error}"
    found = {name: _launcher(name) for name in ("torchrun", "mpirun", "mpiexec", "srun")}
    return {"found": found, "started_by": started, "variables": variables_of_launchers()}


def _launcher(name: str) -> Facts | None:
    beside = str(Path(sys.executable).parent)  # of an environment that is not activated
    path = shutil.which(name) or shutil.which(name, path=beside)
    if path is None:
        return None
    if name == "torchrun":
        return {"path": path, "version": f"torch {torch.__version__}"}
    try:
        asked = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_VERSION_DEADLINE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"path": path, "version": f"does not say its version: {first_line(error)}"}
    return {"path": path, "version": _version(asked.stdout + asked.stderr)}


def _version(text: str) -> str:
    """Return the version that a launcher says: Hydra's is in a line of its own."""
    hydra = re.search(r"^\s*Version:\s*(\S+)", text, re.MULTILINE)
    if "HYDRA" in text and hydra:
        return f"MPICH (Hydra) {hydra[1]}"
    return text.strip().partition("\n")[0] or "not said"


def settings(config: Config) -> Facts:
    """Return the variables that are set, and whether there is a secret; never its value."""
    has_secret = config.secret or config.secret_file
    return {"variables": variables_set(), "secret": "set" if has_secret else "none"}


def network(config: Config) -> Facts:
    """Return the interface by which this process would talk to other hosts."""
    names = [name for _, name in socket.if_nameindex()]
    try:
        address = own_address(config.interface, None)
    except (InvalidArgumentError, OSError) as error:
        return {"problem": first_line(error), "interface": None, "address": None, "all": names}
    interface = next((name for name in names if _address(name) == address), None)
    return {"problem": None, "interface": interface, "address": address, "all": names}


def _address(interface: str) -> str | None:
    try:
        return address_of_interface(interface)
    except InvalidArgumentError:  # it has none
        return None


def nccl(config: Config) -> Facts:
    """Return NCCL's version (22703 is 2.27.3) and path, or why there is none."""
    try:
        code = nccl_version(config.nccl_library)
    except InvalidArgumentError as error:
        return {"problem": first_line(error), "version": None, "path": None}
    version = f"{code // 10_000}.{code // 100 % 100}.{code % 100}"
    return {"problem": None, "version": version, "path": config.nccl_library or _loaded("libnccl")}


def _loaded(library: str) -> str | None:
    """Return the path of a shared library that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for line in maps.splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(library):
            return f"/{path}"
    return None


def gpus() -> Facts:
    """Return the names of the GPUs that torch sees, or why it sees none."""
    if torch.version.cuda is None:
        return {"problem": f"torch {torch.__version__} is built without CUDA", "names": []}
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return {"problem": first_line(error).partition(". ")[0], "names": []}
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"problem": None if names else "torch sees none", "names": names}


_OF_PROCESS = 64  # descriptors that a process has besides those to its ranks: a guess with room
_CONTROL = 64  # control connections of a rank, at most: 2 log2 of the ranks (csrc/control/graph.h)
_NO_LIMIT = 1 << 60  # bytes: what version 1 of the control groups says instead of "max"


def machine() -> Facts:
    """Return processor, memory and what the container leaves of them. None: not known, no limit."""
    memory = _key_values("/proc/meminfo")
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    processor = _key_values("/proc/cpuinfo")
    flags = processor.get("flags", "").split()
    return {
        "system": platform.platform(terse=True),
        "kernel": platform.release(),
        "glibc": platform.libc_ver()[1],
        "cpu": processor.get("model name", platform.machine()),
        "vector_instructions": _vector_instructions(flags),
        "cpus": os.cpu_count(),
        "cpus_allowed": sorted(os.sched_getaffinity(0)),
        "cpus_of_container": None if cpu_quota() == math.inf else cpu_quota(),
        "load": _load(),
        "memory_bytes": _kilobytes(memory.get("MemTotal")),
        "memory_available_bytes": _kilobytes(memory.get("MemAvailable")),
        "memory_of_container_bytes": _memory_limit(),
        "dev_shm_bytes": shm.total if shm else None,
        "dev_shm_free_bytes": shm.free if shm else None,
        "huge_pages": _first_line(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
    }


def limits(connections: int) -> Facts:
    """Return the limits of this process; None: unlimited.

    Args:
        connections: TORCH_RING_CONNECTIONS.
    """
    files, most_files = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return {
        "open_files": files,
        # init() raises the limit where it is too low. The leader of a host has a connection with
        # each of its ranks until all have joined.
        "ranks_on_one_host": _connected(most_files, 1),
        # Each rank has data connections with a rank of every other host.
        "hosts_of_an_alltoall": _connected(files, connections),
        "locked_memory_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "address_space_bytes": _limit(resource.RLIMIT_AS),
        "processes": _limit(resource.RLIMIT_NPROC),
    }


def _connected(files: int | None, connections: int) -> int | None:
    """Return how many can have so many connections with one of them, which may open `files`."""
    if files is None:
        return None
    return 1 + max(0, files - _OF_PROCESS - _CONTROL) // connections


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:  # no /proc, which every container should have
        return None


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _vector_instructions(flags: list[str]) -> str:
    """Return which of the compiled loops reduce here, as csrc/core/reduce.cc chooses."""
    if {"avx512bw", "avx512vl", "avx512dq"} <= set(flags):
        return "AVX-512"
    if {"avx2", "f16c"} <= set(flags):
        return "AVX2"
    return "SSE2" if "sse2" in flags else "the compiler's default"


def _memory_limit() -> int | None:
    texts = limits_of_groups("memory", "memory.max", "memory.limit_in_bytes")
    known = [int(text) for text in texts if text.isdecimal() and int(text) < _NO_LIMIT]
    return min(known, default=None)


def _key_values(path: str) -> dict[str, str]:
    """Return "key: value" lines; of a key that comes several times, the first."""
    pairs = [line.partition(":") for line in _lines(Path(path))]
    return {key.strip(): value.strip() for key, _, value in reversed(pairs)}


def _kilobytes(text: str | None) -> int | None:
    return int(text.split()[0]) << 10 if text else None


def _first_line(path: Path) -> str | None:
    return next(iter(_lines(path)), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not there, or not ours to read
        return []
