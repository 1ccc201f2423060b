"""A folder for Python's path, in which a program finds the module ``horovod`` and nothing else."""
