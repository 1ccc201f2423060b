"""The declarations in csrc/nccl agree with NCCL's own header and library. No GPU is needed."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def nccl_wheel() -> Path:
    """Return where the wheel with NCCL is, or skip: CPU builds of torch bring none."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec and spec.submodule_search_locations) or ():
        if (Path(root) / "nccl").exists():
            return Path(root) / "nccl"
    pytest.skip("the wheel with NCCL is not installed")


def test_header_and_library(tmp_path: Path) -> None:
    nccl, program = nccl_wheel(), str(tmp_path / "nccl_check")
    core = ["csrc/core/error.cc", "csrc/core/limits.cc"]
    sources = ["tests/device/nccl_check.cc", "csrc/nccl/loader.cc", *core]
    includes = ["-Icsrc", "-isystem", "tests/cpp/doubles/cuda", "-isystem", str(nccl / "include")]
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        ["g++", *flags, *includes, *sources, "-o", program], check=True, cwd=ROOT, timeout=120
    )
    library = nccl / "lib" / "libnccl.so.2"
    done = subprocess.run(
        [program, str(library)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NCCL_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The header is the library's own: their versions are the same.
    assert re.fullmatch(r"2\.\d+\.\d+ 0", done.stdout.splitlines()[-1]), done.stdout
