# SPDX-License-Identifier: Apache-2.0
"""torch's own tests of torch.distributed (`DistributedTest`), run with the backend ring or gloo.

    python tests/c10d/distributed_suite.py                      # ring, 2 ranks
    python tests/c10d/distributed_suite.py --backend gloo
    python tests/c10d/distributed_suite.py -k test_all_reduce   # some of them

Many of these tests are skipped, or expect other results, if the backend has another name than
"gloo". Here they see a name that compares equal to "gloo", so that they test the backend's
behaviour. The processes are forked from one that has imported torch; torch's runner starts each
anew, which costs ten seconds a test.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

RANKS = 2

# Tests that cannot pass, and the reasons. All others must pass.
EXPECTED_FAILURES = {
    "ring": {
        "test_ddp_logging_data_cpu": "torch calls every backend from outside 'custom' in its log",
    },
    "gloo": {
        "test_all_to_all": "gloo has no all_to_all of lists",
        "test_all_to_all_complex": "gloo has no all_to_all of lists",
        "test_all_to_all_full_group": "gloo has no all_to_all of lists",
    },
}
# By the first version of torch: the number of all tests that pass on ring. A newly skipped test is
# no failure of its own; only this number shows it.
PASSES = {(2, 13): 96, (2, 14): 99}
OLD_TORCH = "this torch calls no backend's monitored_barrier but gloo's"
EXPECTED_FAILURES_OF_OLD_TORCH = {  # before 2.15
    "ring": {
        "test_monitored_barrier_gloo": OLD_TORCH,
        "test_monitored_barrier_gloo_subgroup": OLD_TORCH,
    },
    "gloo": {},
}


class UnlockedName(str):
    """A backend's name that the tests' conditions treat like gloo's."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other and other != "mpi"  # all_to_all: "only MPI supports it on CPUs"

    def __hash__(self) -> int:
        return hash("gloo")


@contextmanager
def backend_in_environment(name: str) -> Iterator[None]:
    """Name the backend in the environment for a module that reads it at import."""
    read = os._Environ.__getitem__

    def read_unlocked(self: Any, variable: str) -> str:
        value: str = read(self, variable)
        return UnlockedName(value) if variable == "BACKEND" else value

    os.environ["BACKEND"] = name
    with mock.patch.object(os._Environ, "__getitem__", read_unlocked):
        yield


def load_suite(backend: str, ranks: int) -> type[unittest.TestCase]:
    """Return torch's test class for the backend."""
    folder = tempfile.mkdtemp()
    for name in ("barrier", "test_dir"):
        (Path(folder) / name).mkdir()
    os.environ |= {
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": folder,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    # Torch's loggers report the start and the end of each test's processes.
    logging.getLogger("torch.testing._internal.common_distributed").setLevel(logging.ERROR)
    import torch

    import torch_ring  # noqa: F401  registers ring

    torch.set_num_threads(1)  # other threads would not survive a fork
    from torch.testing._internal.common_distributed import DistTestCases

    DistTestCases.backend_feature["plugin"].add("ring")
    with backend_in_environment(backend):
        from torch.testing._internal.distributed import distributed_test

    class TestBackend(
        distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    ):  # type: ignore[misc,name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return TestBackend


class Results(unittest.TextTestResult):
    """Lists the passed, failed and skipped tests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.passed: list[str] = []

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802  unittest's name
        super().addSuccess(test)
        self.passed.append(test.id().rsplit(".", 1)[-1])


def torch_version() -> tuple[int, int]:
    """Return torch's major and minor version."""
    import torch

    major, minor = (int(number) for number in torch.__version__.split(".")[:2])
    return major, minor


def wanted_passes(arguments: argparse.Namespace) -> int:
    """Return the number of tests that must pass: if all are run on ring, the known number."""
    if arguments.words or arguments.backend != "ring" or arguments.ranks != RANKS:
        return 1
    return max((PASSES[since] for since in PASSES if torch_version() >= since), default=1)


def expected_failures(backend: str) -> dict[str, str]:
    """Return the tests that cannot pass with this torch, and why."""
    is_old = torch_version() < (2, 15)
    return EXPECTED_FAILURES[backend] | (EXPECTED_FAILURES_OF_OLD_TORCH[backend] if is_old else {})


def main() -> int:
    """Run the tests; return 0 if enough have passed, and only expected ones have failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["ring", "gloo"], default="ring")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("-k", dest="words", action="append", help="a part of a test's name")
    arguments = parser.parse_args()

    suite_class = load_suite(arguments.backend, arguments.ranks)
    loader = unittest.TestLoader()
    names = [
        name
        for name in loader.getTestCaseNames(suite_class)
        if not arguments.words or any(word in name for word in arguments.words)
    ]
    suite = unittest.TestSuite(suite_class(name) for name in names)
    runner = unittest.TextTestRunner(resultclass=Results, verbosity=2)
    results: Any = runner.run(suite)

    failed = [test.id().rsplit(".", 1)[-1] for test, _ in results.failures + results.errors]
    expected = expected_failures(arguments.backend)
    unexpected = [name for name in failed if name not in expected]
    print(
        f"{arguments.backend}, {arguments.ranks} ranks: {len(results.passed)} tests passed, "
        f"{len(results.skipped)} skipped, {len(failed)} failed"
    )
    for name in failed:
        print(f"{name}: {expected.get(name, 'FAILED')}")
    wanted = wanted_passes(arguments)
    too_few = len(results.passed) < wanted
    if too_few:
        print(f"{len(results.passed)} tests have passed, and {wanted} should with this torch")
    return 1 if unexpected or too_few else 0


if __name__ == "__main__":
    sys.exit(main())
