# SPDX-License-Identifier: Apache-2.0
"""facts: the machine and its software, for bug reports."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
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
from torch_ring.setup.control_groups import cpu_quota
from torch_ring.setup.launchers import discover, variables_of_launchers
from torch_ring.setup.network import own_address
from torch_ring.setup.ucx import own_ucx

__all__ = ["facts", "gpus"]

_PATIENCE_S = 10  # for a launcher to print its version

Facts = dict[str, Any]


def facts(config: Config) -> Facts:
    """Return groups of facts by name. None: there is none, no limit, or it is not known."""
    package = sys.modules["torch_ring"]  # imported already, with this package
    quota = cpu_quota()
    return {
        "torch_ring": {
            "version": package.__version__,
            "package": str(Path(str(package.__file__)).parent),
            "native_module": native_module,
            "built_for_torch": BUILT_FOR_TORCH,
        },
        "python": {
            "python": platform.python_version(),
            "executable": sys.executable,
            "torch": torch.__version__,
            "torch_path": str(Path(torch.__file__).parent),
            "torch_cuda": torch.version.cuda,
            "torch_has_gloo": dist.is_available() and dist.is_gloo_available(),
        },
        "machine": {
            "system": platform.platform(),
            "cpu": _find(r"model name\s*: (.*)", "/proc/cpuinfo") or platform.machine(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "cpus": os.cpu_count(),
            "cpus_allowed": sorted(os.sched_getaffinity(0)),
            "cpus_of_container": None if quota == math.inf else quota,
            "load": _number(r"(\S+)", "/proc/loadavg"),
            "memory_kb": _number(r"^MemTotal: +(\d+)", "/proc/meminfo"),
            "memory_available_kb": _number(r"^MemAvailable: +(\d+)", "/proc/meminfo"),
            "open_files": _number(r"^Max open files +(\d+)", "/proc/self/limits"),
        },
        "launchers": {
            "found": {name: _launcher(name) for name in ("mpirun", "mpiexec", "srun")},
            "started_by": _started_by(),
            "variables": variables_of_launchers(),
        },
        "settings": {
            "variables": variables_set(),  # without the values of secrets
            "secret": "set" if config.secret or config.secret_file else "none",
        },
        "network": _network(config),
        "ucx": _ucx(config),
        "nccl": _nccl(config),
        "gpus": gpus(),
    }


def gpus() -> Facts:
    """Return the names of the GPUs that torch sees, or the reason why it sees none."""
    if torch.version.cuda is None:
        return {"problem": f"torch {torch.__version__} is built without CUDA", "names": []}
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return {"problem": first_line(error).partition(". ")[0], "names": []}
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"problem": None if names else "torch sees none", "names": names}


def _nccl(config: Config) -> Facts:
    """Return NCCL's version (22703 is 2.27.3) and path, or the reason why there is none."""
    try:
        code = nccl_version(config.nccl_library)
    except InvalidArgumentError as error:
        return {"problem": first_line(error), "version": None, "path": None}
    version = f"{code // 10_000}.{code // 100 % 100}.{code % 100}"
    path = config.nccl_library or _find(r"(/.*/libnccl\.so.*)", "/proc/self/maps")
    return {"problem": None, "version": version, "path": path}


def _network(config: Config) -> Facts:
    """Return the address at which other hosts would reach this process."""
    try:
        return {"problem": None, "address": own_address(config.interface, None)}
    except (InvalidArgumentError, OSError) as error:
        return {"problem": first_line(error), "address": None}


def _ucx(config: Config) -> Facts:
    """Return UCX's version and its transports to other hosts, or the reason why there are none."""
    found = own_ucx(config) if config.network != "tcp" else "TORCH_RING_NETWORK=tcp"
    if not found[:1].isdigit():
        return {"problem": found, "version": None, "transports": []}
    version, *transports = found.split()
    return {"problem": None, "version": version, "transports": transports}


def _started_by() -> str:
    try:
        identity = discover()
    except InvalidArgumentError as error:
        return f"init() would refuse: {error}"
    if identity.launcher == "python":
        return "no launcher"
    return f"{identity.launcher}: rank {identity.rank} of {identity.size}"


def _launcher(name: str) -> str | None:
    """Return the version that a launcher prints, and its path."""
    beside = str(Path(sys.executable).parent)  # the environment may not be activated
    path = shutil.which(name) or shutil.which(name, path=beside)
    if path is None:
        return None
    none = subprocess.DEVNULL
    try:
        said = subprocess.check_output(
            [path, "--version"], text=True, stdin=none, stderr=none, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = f"does not say its version: {first_line(error)}"
    return f"{' '.join(' '.join(said.splitlines()[:2]).split())}; {path}"  # Hydra's has two lines


def _number(pattern: str, path: str) -> float | None:
    found = _find(pattern, path)
    return None if found is None else json.loads(found)


def _find(pattern: str, path: str) -> str | None:
    """Return a pattern's group at its first match in a file of the kernel."""
    try:
        found = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:  # missing, or not readable
        return None
    return found[1] if found else None
