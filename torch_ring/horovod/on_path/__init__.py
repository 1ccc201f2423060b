"""A folder for Python's path, with the module ``horovod`` and nothing else."""
