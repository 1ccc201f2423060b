# SPDX-License-Identifier: Apache-2.0
"""Builds the native module for one minor version of torch: only g++ is needed, no CUDA.

It builds against the torch of the environment in which torch_ring is installed. pip hides that
environment from a build, unless told `--no-build-isolation`, so this file searches it. If it has no
torch, this file asks pip for the newest one, for the build alone.

For macOS and Windows there is nothing to build: torch_ring/native/one_rank.py serves one rank.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time

if sys.version_info < (3, 10):
    raise SystemExit(
        "torch_ring needs Python 3.10 or newer, and this is Python {}.{}".format(*sys.version_info)
    )
try:
    import setuptools
except ImportError:
    raise SystemExit(
        "torch_ring: setuptools is missing: pip install 'setuptools>=77' ninja"
    ) from None
if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"torch_ring needs setuptools 77 or newer to build, and this is {setuptools.__version__}: "
        "pip install 'setuptools>=77'"
    )

import site
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 11)
# Build times with g++ 12 on an AMD EPYC of 2 cores, idle and beside other work; and the shortest
# time with any number of cores.
CORE_MINUTES = (2.2, 4.5)
LEAST_MINUTES = 0.6
TORCH_FOLDERS = ("bindings", "gradients", "c10d")  # of csrc; the others do without torch
LIBRARY = ROOT / "build" / "core" / "libtorch_ring_core.a"

if not (ROOT / "csrc" / "build_core.py").exists():
    raise SystemExit("torch_ring: there are no sources in csrc/: is this tree complete?")
sys.path.insert(0, str(ROOT / "csrc"))
import build_core  # noqa: E402

# A folder with modules for several versions of torch (torch_2_14/_C.*.so), which go into one wheel.
BUILT_BEFORE = os.environ.get("TORCH_RING_NATIVE_MODULES")


def say(text):
    """Print to the terminal, since pip hides the output of a build unless it fails."""
    try:
        with open("/dev/tty", "w") as terminal:
            print(f"\r\033[Ktorch_ring: {text}", file=terminal)
    except OSError:  # there is none
        print(f"torch_ring: {text}", file=sys.stderr, flush=True)


def find_torch():
    """Import torch from this environment, or from the one that an isolated build is for."""
    for folder in [None, *hidden_folders()]:
        if folder is not None:
            sys.path.append(folder)
        try:
            import torch
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
        else:
            return torch
    return None


def hidden_folders():
    """Return the folders of packages that pip hides from an isolated build."""
    own = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    if sys.prefix == sys.base_prefix:
        return [*own, site.getusersitepackages()]
    settings = Path(sys.prefix) / "pyvenv.cfg"
    text = settings.read_text() if settings.exists() else ""
    if not re.search(r"^include-system-site-packages\s*=\s*true", text, re.MULTILINE | re.I):
        return list(own)  # this environment has no access to the user's or the system's packages
    return [*own, site.getusersitepackages(), *site.getsitepackages([sys.base_prefix])]


def minor(version):
    """Return (2, 14) for 2.14.1+cu130."""
    return tuple(int(part) for part in version.split(".")[:2])


def module_name(torch_minor):
    """Return the name of the module for a minor version of torch, which torch_ring/native finds."""
    return "torch_ring.native.torch_{}_{}._C".format(*torch_minor)


def torch_requirement(minors):
    """Return the versions of torch that modules for these minor versions run with."""
    first, last = min(minors), max(minors)
    if first == last:
        return "torch=={}.{}.*".format(*first)  # with pre-releases, such as 2.15.0a0+nv25
    if first[0] != last[0]:
        raise SystemExit(f"torch_ring: one wheel for torch {first[0]} and {last[0]} is not made")
    between = [(first[0], number) for number in range(first[1], last[1])]
    missing = ["!={}.{}.*".format(*each) for each in between if each not in minors]
    return ",".join(["torch>={}.{}".format(*first), *missing, f"<{last[0]}.{last[1] + 1}"])


def check_tools():
    """Exit with a sentence if a build tool is missing."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        raise SystemExit(
            f"torch_ring: there is no C++ compiler ({compiler[0]}): install g++ (Debian: apt "
            "install g++), or name another one in CXX"
        )
    probe = [*compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    if subprocess.run(probe, input=b"#include <semaphore>", capture_output=True).returncode != 0:
        raise SystemExit(f"torch_ring: {compiler[0]} does not know C++20: g++ 11 or newer does")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise SystemExit(
            "torch_ring: this Python has no headers (Python.h): install them (Debian: apt install "
            "python3-dev)"
        )


def runtime_arguments():
    """Return the linker arguments that make the module use torch's C++ runtime.

    Some compilers link a copy of the runtime into everything that they build. Exceptions that pass
    both copies end in segmentation faults.
    """
    link = [*shlex.split(os.environ.get("CXX") or "g++"), "-shared", "-fPIC"]
    link += shlex.split(os.environ.get("LDFLAGS") or "")
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.so"
        command = [*link, "-x", "c++", "-", "-o", str(probe)]
        subprocess.run(command, input=b"void probe() { throw 1; }", capture_output=True)
        has_own = probe.exists() and b"libstdc++.so" not in probe.read_bytes()
    return ["-l:libstdc++.so.6"] if has_own else []


class CleanBuild(build):
    """Removes the results of the last build, so that a wheel has no files deleted from the tree."""

    def run(self):
        shutil.rmtree(Path(self.build_lib) / "torch_ring", ignore_errors=True)
        super().run()


class Progress:
    """Announces a build, and reports its progress every few seconds."""

    INTERVAL_S = 20

    def __init__(self, sources, objects, torch_version):
        self.sources = sources
        self.objects = objects
        self.torch_version = torch_version
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.report, daemon=True)

    def __enter__(self):
        cores = build_core.jobs()
        least, most = (max(LEAST_MINUTES, minutes / cores) for minutes in CORE_MINUTES)
        say(
            f"compiling for torch {self.torch_version}, files at a time: {cores}; {least:.1f} to "
            f"{most:.1f} min on an AMD EPYC, less if some are compiled already"
        )
        self.began = time.time()
        self.thread.start()

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    def report(self):
        while not self.ended.wait(self.INTERVAL_S):
            objects = [path for folder in self.objects for path in folder.glob("**/*.o")]
            compiled = sum(path.stat().st_mtime >= self.began for path in objects)
            say(f"compiled {compiled} of at most {self.sources} files")


def torch_sources():
    """Return the files of csrc to compile for a version of torch."""
    groups = build_core.by_folder(TORCH_FOLDERS)
    # Together, since they share the headers of autograd, which compile slowest.
    groups["gradients"] += [*groups.pop("c10d"), build_core.CSRC / "module.cc"]
    return build_core.files_to_compile(groups, ROOT / "build" / "joined")


def compiled_module(torch):
    """Return the module for the installed torch, and the command that compiles it."""
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    class Compile(BuildExtension):
        """Checks the tools, keeps object files, and reports progress."""

        def finalize_options(self):
            super().finalize_options()
            # A permanent folder, where pip would choose a temporary one, so that only changed files
            # are compiled; one for each torch, since ninja takes its headers for system headers,
            # which never change.
            variant = f"{sys.implementation.cache_tag}-torch-{torch.__version__}"
            self.build_temp = str(ROOT / "build" / variant)

        def run(self):
            check_tools()
            for extension in self.extensions:
                extension.extra_link_args += runtime_arguments()
            if self.inplace:  # the source tree keeps only the module that was built last
                native = ROOT / "torch_ring" / "native"
                for other in native.glob("torch_*"):
                    shutil.rmtree(other)
                (native / module.name.split(".")[-2]).mkdir()
            folders = [Path(self.build_temp), LIBRARY.parent]
            files = len(sources) + len(build_core.core_files(LIBRARY))
            with Progress(files, folders, torch.__version__):
                build_core.build(LIBRARY)
                super().run()

    # Relative to this file, as setuptools wants them.
    sources = [os.path.relpath(path, ROOT) for path in torch_sources()]
    module = CppExtension(
        module_name(minor(torch.__version__)),
        sources,
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=[
            "-std=c++20",
            "-O2",
            "-g0",
            "-fvisibility=hidden",
        ],
        extra_objects=[str(LIBRARY)],
        depends=[str(LIBRARY)],  # relink if it was rebuilt
    )
    return module, Compile


class Copy(build_ext):
    """Copies modules that were built before."""

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(BUILT_BEFORE) / target.parent.name / target.name, target)


def native_modules():
    """Return the arguments of setup() for native modules and torch."""
    oldest = "torch>={}.{}".format(*OLDEST_TORCH)
    if sys.platform != "linux":
        return {"install_requires": [oldest, "numpy"]}
    if BUILT_BEFORE:
        folders = Path(BUILT_BEFORE).glob("torch_*")
        minors = sorted(tuple(map(int, path.name.split("_")[1:])) for path in folders)
        if not minors:
            raise SystemExit(f"torch_ring: TORCH_RING_NATIVE_MODULES={BUILT_BEFORE} has no modules")
        return {
            "ext_modules": [Extension(module_name(each), []) for each in minors],
            "cmdclass": {"build": CleanBuild, "build_ext": Copy},
            "install_requires": [torch_requirement(minors), "numpy"],
        }
    torch = None if "sdist" in sys.argv else find_torch()
    if torch is not None:
        found = minor(torch.__version__)
        if found < OLDEST_TORCH:
            raise SystemExit(
                "torch_ring needs torch {}.{} or newer, and this is {}: pip install --upgrade "
                "torch".format(*OLDEST_TORCH, torch.__version__)
            )
        module, command = compiled_module(torch)
        return {
            "ext_modules": [module],
            "cmdclass": {"build": CleanBuild, "build_ext": command},
            "install_requires": [torch_requirement([found]), "numpy"],
        }
    arguments = {"install_requires": [oldest, "numpy"]}
    if "egg_info" in sys.argv:  # pip asks for the build requirements
        check_tools()  # before the download
        arguments["setup_requires"] = [oldest]
        say(
            "there is no torch in this environment: pip downloads the newest one (with CUDA's "
            "libraries 3 GB), and torch_ring is built for it. For another one stop here, and "
            "`pip install` that torch first; with uv, which hides it, add --no-build-isolation"
        )
    elif "sdist" not in sys.argv:
        raise SystemExit(
            "torch_ring: there is no torch to build for: pip install torch, or leave out "
            "--no-build-isolation"
        )
    return arguments


if __name__ == "__main__":
    setup(**native_modules())
