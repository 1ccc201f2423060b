# SPDX-License-Identifier: Apache-2.0
"""--full: the counts of an acceptance test in place of the daily ones; pytest's last line."""

from __future__ import annotations

import collections
import os

import hypothesis
import pytest
from browser import chromium

__all__ = ["chromium"]  # a fixture

# No stopwatch: a machine may be busy with other work.
hypothesis.settings.register_profile(
    "no_stopwatch", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("no_stopwatch")


# The files that take longest. They come first: the last file of a run has one process at work.
LONGEST = (
    "test_integrations.py",
    "test_horovod_libraries.py",
    "test_gpu_benchmarks.py",
    "test_page_browser.py",
    "test_benchmark_programs.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("weekly"):
            item.add_marker("slow")
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="repeat what depends on luck for hours, not seconds"
    )


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Return whether tests that depend on chance are repeated for hours."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session", autouse=True)
def open_mpi_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make the ranks of mpirun share files in a folder of this run.

    By default Open MPI makes them in /dev/shm, and leaves them there when a test kills a rank.
    """
    folder = tmp_path_factory.mktemp("open_mpi")
    os.environ["OMPI_MCA_btl_sm_backing_directory"] = str(folder)  # noqa: SIM112 - its case matters


@pytest.hookimpl(trylast=True)  # after the reporter exists; processes of pytest-xdist have none
def pytest_configure(config: pytest.Config) -> None:
    """Add the reasons of skips, and "0 failed", to pytest's last line."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.option.collectonly:
        return
    pytests_own = reporter.build_summary_stats_line

    def with_reasons() -> tuple[list[tuple[str, dict[str, bool]]], str]:
        parts, color = pytests_own()
        counts = collections.Counter(
            report.longrepr[2].removeprefix("Skipped: ")
            for report in reporter.stats.get("skipped", ())
        )
        reasons = "; ".join(f"{reason}: {count}" for reason, count in counts.most_common())
        parts = [
            (f"{text} ({reasons})" if text.endswith(" skipped") else text, markup)
            for text, markup in parts
        ]
        if not any(text.endswith(" failed") for text, _ in parts):
            parts.insert(0, ("0 failed", {"green": True}))
        return parts, color

    reporter.build_summary_stats_line = with_reasons
