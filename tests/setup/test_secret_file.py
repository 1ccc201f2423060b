# SPDX-License-Identifier: Apache-2.0
"""TORCH_RING_SECRET_FILE: a file that no other user can read."""

import contextlib
import os
import re
import subprocess

import pytest

from torch_ring.errors import InvalidArgumentError
from torch_ring.setup.secret_file import read_secret


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"  hush\xff \n")
    path.chmod(0o600)
    return path


def test_a_private_file(path):
    assert read_secret(str(path)) == os.fsdecode(b"hush\xff")
    path.chmod(0o400)
    assert read_secret(str(path)) == os.fsdecode(b"hush\xff")


@pytest.mark.parametrize("mode", [0o604, 0o620])
def test_a_file_that_others_may_use(path, mode):
    path.chmod(mode)
    text = rf"TORCH_RING_SECRET_FILE=.*may use it \(mode {mode:04o}\): type `chmod 600"
    with pytest.raises(InvalidArgumentError, match=text):
        read_secret(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_a_file_of_another_user(path):
    os.chown(path, 12345, 12345)
    with pytest.raises(InvalidArgumentError, match="belongs to user 12345: must belong to user 0"):
        read_secret(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_file_that_is_mounted_read_only(path):
    """As Kubernetes mounts secrets: every user in the container may read them."""
    path.chmod(0o644)
    with contextlib.ExitStack() as stack:
        for options in (["--bind", path.parent], ["-o", "remount,bind,ro"]):
            mount = ["mount", *options, path.parent]
            done = subprocess.run(mount, capture_output=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"no mounts here: {done.stderr}")
            if "--bind" in options:
                stack.callback(subprocess.run, ["umount", path.parent], check=True)
        assert read_secret(str(path)) == os.fsdecode(b"hush\xff")


def test_what_is_no_file_with_a_secret(path):
    os.mkfifo(path.parent / "pipe")
    for name, content, message in (
        ("none", None, "cannot read it: .*No such file"),
        ("pipe", None, "must be a regular file"),
        (".", None, "Is a directory"),
        ("empty", b" \n", "must have a secret of 1 to 4096 bytes"),
        ("large", b"x" * 5000, "must have a secret of 1 to 4096 bytes"),
    ):
        other = path.parent / name
        if content is not None:
            other.write_bytes(content)
            other.chmod(0o600)
        with pytest.raises(InvalidArgumentError, match=message) as raised:
            read_secret(str(other))
        assert re.match(r"TORCH_RING_SECRET_FILE='", str(raised.value))
