# SPDX-License-Identifier: Apache-2.0
"""The declarations in csrc/nccl agree with NCCL's own header and library. No GPU is needed.

RCCL's has the same numbers and places: src/nccl.h.in of ROCm/rccl 8de1783, newer than 2.21.5. There
ncclConfig_t ends with trafficClass, and has 48 bytes; in NCCL 2.18.1, which the loader refuses, it
ends before splitShare. New fields are only appended, and the version in a Config, 2.18.5, tells a
library the fields that are set.
"""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
from device_double import NCCL_LIBRARY

ROOT = Path(__file__).parents[2]


def nccl_wheel() -> Path:
    """Return the folder of the wheel with NCCL, or skip: CPU builds of torch have none."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec and spec.submodule_search_locations) or ():
        if (Path(root) / "nccl").exists():
            return Path(root) / "nccl"
    pytest.skip("the wheel with NCCL is not installed")


def compile_it(*arguments: str, folder: Path = ROOT) -> None:
    command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, *arguments], check=True, cwd=folder, timeout=120)


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the compiled files of the loader."""
    folder = tmp_path_factory.mktemp("loader")
    sources = ["nccl/loader.cc", "core/error.cc", "core/limits.cc"]
    compile_it("-c", *(str(ROOT / "csrc" / source) for source in sources), folder=folder)
    return [str(path) for path in folder.iterdir()]


def test_header_and_library(loader: list[str], tmp_path: Path) -> None:
    nccl, program = nccl_wheel(), str(tmp_path / "nccl_check")
    includes = ["-isystem", "tests/cpp/doubles/cuda", "-isystem", str(nccl / "include")]
    compile_it(*includes, "tests/device/nccl_check.cc", *loader, "-o", program)
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


def test_rccl_is_loaded_where_there_is_no_nccl(loader: list[str], tmp_path: Path) -> None:
    """On a stand-in: the double of NCCL, under RCCL's name."""
    if not NCCL_LIBRARY.exists():
        pytest.skip("`make doubles` builds the stand-in")
    (tmp_path / "librccl.so.1").symlink_to(NCCL_LIBRARY)
    source, program = tmp_path / "load.cc", tmp_path / "load"
    source.write_text(
        """
#include <cstdio>
#include "core/error.h"
#include "nccl/loader.h"
int main() try {
  std::puts(torch_ring::nccl::load("").path.c_str());
} catch (const torch_ring::Error& error) {
  std::puts(error.what());
}
"""
    )
    compile_it(str(source), *loader, "-o", str(program))

    def loaded(folder: Path) -> str:
        environment = {"LD_LIBRARY_PATH": str(folder)}
        done = subprocess.run([program], env=environment, capture_output=True, text=True)
        return done.stdout.strip()

    nowhere = tmp_path / "nowhere"
    if "cannot be loaded: libnccl.so.2" not in (text := loaded(nowhere)):
        pytest.skip(f"this system has {text}")
    assert "on AMD's GPUs: RCCL" in text
    assert loaded(tmp_path) == str(tmp_path / "librccl.so.1")
    both = tmp_path / "both"
    both.mkdir()
    for name in ("librccl.so.1", "libnccl.so.2"):
        (both / name).symlink_to(NCCL_LIBRARY)
    assert loaded(both) == str(both / "libnccl.so.2")
