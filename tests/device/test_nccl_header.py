"""The declarations in csrc/nccl agree with NCCL's own header and library. No GPU is needed."""

import ctypes
import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
from device_double import NCCL_LIBRARY

ROOT = Path(__file__).parents[2]

# Values that csrc/nccl/api.h assumes for every version, as in the headers named below.
CONSTANTS = {
    "NCCL_UNIQUE_ID_BYTES": 128,
    **{"ncclSuccess": 0, "ncclRemoteError": 6, "ncclInProgress": 7},
    **{"ncclSum": 0, "ncclProd": 1, "ncclMax": 2, "ncclMin": 3, "ncclAvg": 4},
    **{"ncclInt8": 0, "ncclUint8": 1, "ncclInt32": 2, "ncclInt64": 4},
    **{"ncclFloat16": 6, "ncclFloat32": 7, "ncclFloat64": 8, "ncclBfloat16": 9},
}
PLACES = {
    **{"size": 0, "magic": 8, "version": 12, "blocking": 16, "cgaClusterSize": 20},
    **{"minCTAs": 24, "maxCTAs": 28, "netName": 32, "splitShare": 40, "trafficClass": 44},
}
# The size of ncclConfig_t, and the last field of it in api.h. New fields are only appended, and the
# version in a Config, 2.18.5, tells a library the fields that are set.
CONFIGS = {
    # src/nccl.h.in of NVIDIA/nccl 5d3ab08: lacks splitShare, and the loader refuses that version.
    "NCCL 2.18.1": (40, "netName"),
    # The header in the wheel nvidia-nccl-cu13.
    "NCCL 2.30.7": (96, "trafficClass"),
    # src/nccl.h.in of ROCm/rccl 8de1783, newer than 2.21.5: the file does not name its version.
    "RCCL": (48, "trafficClass"),
}


def nccl_wheel() -> Path:
    """Return the folder of the wheel with NCCL, or skip: CPU builds of torch have none."""
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


def constants_of(header: str) -> dict[str, int]:
    """Return the numbers of `CONSTANTS` in a header."""
    found = re.findall(r"\b(nccl\w+)\s*=\s*(\d+)|#define (NCCL_\w+) (\d+)", header)
    numbers = {name or macro: int(value or number) for name, value, macro, number in found}
    return {name: numbers[name] for name in CONSTANTS}


def config_of(header: str) -> type[ctypes.Structure]:
    """Return a header's declaration of ncclConfig_t."""
    (body,) = re.findall(r"struct ncclConfig_v\d+ \{(.*?)\} ncclConfig_t;", header, re.DOTALL)
    kinds = {"size_t": ctypes.c_size_t, "int": ctypes.c_int, "unsigned int": ctypes.c_uint}
    fields = re.findall(r"^ +([\w ]+?) ?(\*?)(\w+);", body, re.MULTILINE)
    return type(
        "Config",
        (ctypes.Structure,),
        {"_fields_": [(name, ctypes.c_void_p if at else kinds[kind]) for kind, at, name in fields]},
    )


def test_the_header_has_what_the_table_says() -> None:
    header = (nccl_wheel() / "include/nccl.h").read_text()
    version = ".".join(re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)", header))
    assert constants_of(header) == CONSTANTS
    config = config_of(header)
    for name, place in PLACES.items():
        assert getattr(config, name).offset == place, name
    if f"NCCL {version}" in CONFIGS:
        assert (ctypes.sizeof(config), "trafficClass") == CONFIGS[f"NCCL {version}"]


def test_rccl_is_loaded_where_there_is_no_nccl(tmp_path: Path) -> None:
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
    sources = ["csrc/nccl/loader.cc", "csrc/core/error.cc", "csrc/core/limits.cc", str(source)]
    compile_it = ["g++", "-std=c++20", "-Icsrc", *sources, "-o", str(program)]
    subprocess.run(compile_it, check=True, cwd=ROOT, timeout=120)

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
