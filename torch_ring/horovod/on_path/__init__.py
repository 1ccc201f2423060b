# SPDX-License-Identifier: Apache-2.0
"""A folder for Python's path, with the module ``horovod`` and nothing else."""
