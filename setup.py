"""Builds the native module against the torch that is installed: only g++ is needed, no CUDA."""

import sys
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent


class Build(BuildExtension):
    """Records the torch version next to the module, where it can be read without loading it."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # Kept, where pip would choose a temporary folder, so that only what changed is compiled;
        # one for each torch, whose headers ninja takes for system headers that never change.
        variant = f"{sys.implementation.cache_tag}-torch-{torch.__version__}"
        self.build_temp = str(ROOT / "build" / variant)

    def run(self) -> None:
        super().run()
        package = Path(self.get_ext_fullpath("torch_ring._C")).parent
        package.mkdir(parents=True, exist_ok=True)
        text = '"""Written by setup.py."""\n\nTORCH_VERSION = "{}"\n'
        (package / "_build.py").write_text(text.format(torch.__version__))


# Relative to this file, as setuptools wants them; sorted, so that builds repeat.
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*/*.cc"))
if not SOURCES:
    raise SystemExit("torch_ring: there are no sources in csrc/: is the checkout complete?")

setup(
    ext_modules=[
        CppExtension(
            "torch_ring._C",
            SOURCES,
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args=[
                "-std=c++20",
                "-O3",
                "-g0",
                "-fvisibility=hidden",
                "-fno-trapping-math",  # or GCC does not vectorise csrc/core/half.h
            ],
        )
    ],
    cmdclass={"build_ext": Build},
)
