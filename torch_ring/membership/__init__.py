"""membership: the processes of an elastic job, as its launcher and each of them know them.

Open first: `directory`, then `member`.
"""
