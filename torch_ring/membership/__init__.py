# SPDX-License-Identifier: Apache-2.0
"""membership: the launcher's and each process's knowledge of the processes of an elastic job.

Open first: `directory`, then `member`.
"""
