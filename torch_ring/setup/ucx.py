# SPDX-License-Identifier: Apache-2.0
"""UCX: a rank's version and transports, and whether all ranks use it."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from torch_ring._C import ucx_found
from torch_ring.config import Config
from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.setup.peer_info import PeerInfo

__all__ = ["own_ucx", "ucx_library", "uses_ucx"]

_log = logging.getLogger("torch_ring")

_INTERFACES = Path("/sys/class/net")
_RDMA_DEVICES = Path("/sys/class/infiniband")  # RoCE's and Omni-Path's, too


def ucx_library(config: Config) -> str:
    """Return the path of the UCX to load; empty: the one already loaded, or the system's.

    Args:
        config: the settings.
    """
    if config.ucx_library:
        return config.ucx_library
    if "/libucp.so" in Path("/proc/self/maps").read_text():
        return ""  # a process can have only one
    package = importlib.util.find_spec("libucx")
    folders = package.submodule_search_locations if package else None
    for folder in folders or ():
        library = Path(folder) / "lib" / "libucp.so.0"
        if library.exists():
            return str(library)
    return ""


def own_ucx(config: Config) -> str:
    """Load UCX, and return its version and transports, or the reason why there is none.

    Args:
        config: the settings.

    Returns:
        "1.22.0 rc_mlx5 tcp", or a sentence, which does not begin with a digit.
    """
    # UCX reads these variables when it is loaded. By default it would take over the signals of
    # crashes, which belong to faulthandler; print on stdout, which belongs to the program; and give
    # up a connection after 18 s, long before TORCH_RING_HEARTBEAT_TIMEOUT.
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("UCX_TCP_KEEPIDLE", "inf")
    if config.interface:
        names = [name for name in config.interface.split(",") if (_INTERFACES / name).exists()]
        if names and not any(_RDMA_DEVICES.glob("*")):
            os.environ.setdefault("UCX_NET_DEVICES", ",".join(names))
    if os.environ.get("UCX_MEM_EVENTS", "y")[:1] in "n0":
        return "UCX_MEM_EVENTS=n: without memory events UCX crashes when an exchange fails"
    try:
        version, path, transports = ucx_found(ucx_library(config))
    except (InvalidArgumentError, RingError) as error:
        return _in_ascii(str(error))
    if not transports:
        return _in_ascii(
            f"UCX {version} has no transport to other hosts (UCX_TLS, UCX_NET_DEVICES): {path}"
        )
    return " ".join([version, *transports])


def _in_ascii(text: str) -> str:
    """Return a sentence in ASCII, short enough for the description of a rank."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)[:500]


def uses_ucx(config: Config, peers: Sequence[PeerInfo], labels: Sequence[str]) -> bool:
    """Return whether data between hosts travel over UCX: the same on all ranks.

    Two different versions of UCX connect, but deliver wrong data without an error (seen with 1.13
    and 1.22): so all ranks must have the same version.

    Args:
        config: the settings.
        peers: all ranks.
        labels: their names in messages.

    Raises:
        InvalidArgumentError: TORCH_RING_NETWORK=ucx, and a rank has no UCX, or another version than
            the others; names the ranks without UCX, or each rank's version.
    """
    if config.network == "tcp" or (config.network == "auto" and config.tls != "0"):
        return False
    each = list(zip(peers, labels, strict=True))
    without = [
        f"{label}: {peer.ucx or 'it was not asked for'}"
        for peer, label in each
        if not peer.ucx[:1].isdigit()
    ]
    versions = [peer.ucx.partition(" ")[0] for peer in peers]
    trouble = ""
    if without:
        trouble = "needs UCX. " + "; ".join(without)
    elif len(set(versions)) > 1:
        named = ", ".join(
            f"{label} has {version}" for label, version in zip(labels, versions, strict=True)
        )
        trouble = f"needs the same UCX on all ranks: {named}"
    elif config.network == "auto" and (
        slow := [label for peer, label in each if peer.ucx.split()[1:] == ["tcp"]]
    ):
        trouble = f"needs a transport other than tcp on all ranks. {', '.join(slow)}: it has none"
    if trouble and config.network == "ucx":
        raise InvalidArgumentError(f"TORCH_RING_NETWORK=ucx {trouble}")
    if trouble:
        _log.debug("data between hosts travel over TCP: UCX %s", trouble)
    return not trouble
