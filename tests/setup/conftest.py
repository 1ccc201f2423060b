"""A fixture for tests of connections, which close the descriptors that they open."""

import os
import socket

import pytest


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def _closed_descriptors():
    socket.socketpair()[0].close()  # collects what earlier tests have dropped
    before = open_descriptors()
    yield
    assert open_descriptors() == before
