"""Builds the native module against the torch that is installed: only g++ is needed, no CUDA."""

from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent


class Build(BuildExtension):
    """Records the torch version next to the module, where it can be read without loading it."""

    def run(self) -> None:
        super().run()
        package = Path(self.get_ext_fullpath("torch_ring._C")).parent
        package.mkdir(parents=True, exist_ok=True)
        text = '"""Written by setup.py."""\n\nTORCH_VERSION = "{}"\n'
        (package / "_build.py").write_text(text.format(torch.__version__))


setup(
    ext_modules=[
        CppExtension(
            "torch_ring._C",
            # Relative to this file, as setuptools wants them; sorted, so that builds repeat.
            sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("*/*.cc")),
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args=["-std=c++20", "-O3", "-g0", "-fvisibility=hidden"],
        )
    ],
    cmdclass={"build_ext": Build},
)
