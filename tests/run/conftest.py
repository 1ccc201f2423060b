"""No test leaves a job running: a failed test may not have waited for its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from launched_jobs import LaunchedJob


@pytest.fixture(autouse=True)
def no_job_is_left() -> Iterator[None]:
    yield
    for job in list(LaunchedJob.running):
        job.signal(signal.SIGKILL)
        job.wait()
        job.require_nothing_left()
