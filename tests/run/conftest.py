# SPDX-License-Identifier: Apache-2.0
"""The fixture of launched jobs."""

from launched_jobs import no_job_is_left

__all__ = ["no_job_is_left"]
