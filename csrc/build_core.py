#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles the layers of csrc that do not use torch into one static library.

    python3 csrc/build_core.py build/core/libtorch_ring_core.a

The extension, the C++ tests and the modules of a wheel, one for each torch, are linked with the
same library. Folders are compiled together, as one file that includes their sources: this takes
less than half of the time, since they share most of their headers. With TORCH_RING_BY_FILE=1 each
source is compiled separately, so that a change recompiles only its source.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CSRC = Path(__file__).resolve().parent
# Those joined by "+" are one file; the four take about as long as one another.
FOLDERS = ("core", "memory+transport+control+messages", "collective+nccl+ucx+timeline", "engine")
FLAGS = [
    "-std=c++20",
    "-Wall",
    "-Wextra",
    "-Wno-restrict",  # GCC 12 takes some sums of strings for overlapping copies (its bug 105651)
    "-O3",
    "-g0",
    "-DNDEBUG",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-trapping-math",  # or GCC does not vectorise core/half.h
    "-pthread",
    "--param=inline-unit-growth=150",  # GCC's limit is for a source, and here folders are one
]


def jobs():
    """Return how many files to compile at a time: MAX_JOBS, or one for each processor."""
    limit = os.environ.get("MAX_JOBS", "")  # torch also ignores a value that is no number
    return max(1, int(limit)) if limit.isdecimal() else len(os.sched_getaffinity(0))


def by_folder(folders):
    """Return the sources of each folder, or of several joined by "+"; sorted: builds repeat."""
    return {
        name: sorted(path for folder in name.split("+") for path in (CSRC / folder).glob("*.cc"))
        for name in folders
    }


def files_to_compile(groups, output):
    """Return the files to compile: one below `output` for each group of sources, or the sources."""
    if os.environ.get("TORCH_RING_BY_FILE", "0") not in ("", "0"):
        return [source for sources in groups.values() for source in sources]
    output.mkdir(parents=True, exist_ok=True)
    return [joined(sources, output / f"{name}.cc") for name, sources in groups.items()]


def joined(files, target):
    """Write a file that includes others, unless it is there; return it."""
    text = "".join(f'#include "{path.relative_to(CSRC)}"\n' for path in files)
    if not target.exists() or target.read_text() != text:
        target.write_text(text)
    return target


def core_files(library):
    """Return the files to compile for a library."""
    return files_to_compile(by_folder(FOLDERS), objects_of(library))


def objects_of(library):
    """Return the folder of a library's objects."""
    return library.with_suffix(".objects")


def build(library, flags=FLAGS):
    """Compile the changed files, and rebuild the library if there are any.

    Raises:
        SystemExit: the compiler has failed, after its messages.
    """
    import fcntl  # setup.py imports this file on Windows, too

    objects = objects_of(library)
    objects.mkdir(parents=True, exist_ok=True)
    with (objects / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the extension and the tests may build at the same time
        command = shlex.split(os.environ.get("CXX") or "g++")
        command += [*flags, f"-I{CSRC}"]
        for variable in ("CPPFLAGS", "CXXFLAGS"):
            command += shlex.split(os.environ.get(variable) or "")
        sources = core_files(library)
        targets = [objects / f"{name_of(source)}.o" for source in sources]
        recipe = shlex.join([*command, *map(str, targets)])
        recorded = objects / "recipe"
        if not recorded.exists() or recorded.read_text() != recipe:
            for old in objects.glob("*.o"):
                old.unlink()
        recorded.write_text(recipe)
        stale = [each for each in zip(sources, targets, strict=True) if not is_current(each[1])]
        stale.sort(key=lambda each: -sum(path.stat().st_size for path in parts_of(each[0])))
        if stale:
            library.unlink(missing_ok=True)
        with ThreadPoolExecutor(jobs()) as pool:
            compiled = list(pool.map(lambda each: is_compiled(command, *each), stale))
        if not all(compiled):
            raise SystemExit(f"torch_ring: {command[0]} has failed; its messages are above")
        if not library.exists():
            archiver = os.environ.get("AR") or "ar"
            subprocess.check_call([archiver, "rcs", str(library), *map(str, targets)])


def is_compiled(command, source, target):
    """Compile a file; return whether that succeeded. Its object is as old as the beginning."""
    began = time.time_ns()
    unfinished = target.with_suffix(".new")
    depends = target.with_suffix(".d")
    command = [*command, "-MMD", "-MF", str(depends), "-c", str(source), "-o", str(unfinished)]
    if subprocess.call(command) != 0:
        return False
    os.utime(unfinished, ns=(began, began))
    unfinished.replace(target)
    return True


def name_of(source):
    """Return the name of an object: that of its folder, before that of a single file."""
    if source.is_relative_to(CSRC):
        return "-".join(source.relative_to(CSRC).with_suffix("").parts)
    return source.stem


def parts_of(source):
    """Return the sources whose code one file of `files_to_compile` contains."""
    return [source] if source.is_relative_to(CSRC) else by_folder([source.stem])[source.stem]


def is_current(target):
    """Return whether an object is newer than all files that its compiler has read."""
    depends = target.with_suffix(".d")
    if not target.exists() or not depends.exists():
        return False
    written = target.stat().st_mtime_ns
    names = shlex.split(depends.read_text().replace("\\\n", " "))[1:]
    return all(Path(name).exists() and Path(name).stat().st_mtime_ns < written for name in names)


def main():
    """Make the library that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--flags", type=shlex.split, default=FLAGS, help="of the compiler")
    options = parser.parse_args()
    build(options.library, options.flags)


if __name__ == "__main__":
    sys.exit(main())
