"""Facts of the software: torch_ring's build, torch, launchers, settings, network, GPUs and NCCL."""

from __future__ import annotations

import platform
import re
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
from torch_ring.rendezvous.launchers import discover, variables_of_launchers
from torch_ring.rendezvous.network import address_of_interface, own_address

__all__ = ["build", "gpus", "launchers", "nccl", "network", "python", "settings"]

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
