# SPDX-License-Identifier: Apache-2.0
"""The name ``horovod`` for programs and libraries that import it: they find torch_ring.

``python -m torch_ring.horovod`` stands for ``python``, and `install` is for a notebook. Nothing is
written to site-packages: the folder `on_path`, which has a module ``horovod``, is put on the path.

Open first: `config/horovod_path.py` (`install`), then `on_path/horovod.py` and `modules`.
"""

from torch_ring.config.horovod_path import install

__all__ = ["install"]
