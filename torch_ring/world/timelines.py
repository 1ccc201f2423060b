# SPDX-License-Identifier: Apache-2.0
"""Timelines: the timelines of a world's operations, one file for all ranks (csrc/timeline)."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from torch_ring._C import Engine, RecordStream, Timeline
from torch_ring.config import Config
from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.native import NEEDS_LINUX, is_for_one_rank
from torch_ring.setup.connect import Connections

__all__ = ["Timelines"]

_log = logging.getLogger("torch_ring")

_PATIENCE_S = 5.0  # for ranks that have not handed over all events
_PATIENCE_AFTER_FAILURE_S = 0.2
_TRANSFER_TIMEOUT_S = 300.0
_RECORDS = 1 << 13  # most unwritten records of an engine: 2.5 MB

# Number of timelines that this process has begun for a setting's path: a job that makes several
# worlds, such as an elastic one, writes a file for each.
_begun: Counter[str] = Counter()


class Timelines:
    """The timelines of one world, one at a time.

    Args:
        connections: this process's connections.
        config: the settings.
    """

    def __init__(self, connections: Connections, config: Config) -> None:
        self._connections = connections
        self._config = config
        self._number = 0
        self._current: Timeline | None = None

    def start_configured(self) -> None:
        """Start the timeline of TORCH_RING_TIMELINE, if it is set.

        Raises:
            InvalidArgumentError: on rank 0: it cannot write the file.
        """
        path = self._config.timeline
        if path:
            _begun[path] += 1
            self.start(_numbered(path, _begun[path]), self._config.timeline_mark_cycles)

    def start(
        self,
        path: str | os.PathLike[str],
        mark_cycles: bool,
        gather: Callable[[str], list[str]] = lambda text: [text],
    ) -> None:
        """Start a timeline; a present one ends.

        Args:
            path: the path of the file, on rank 0's host.
            mark_cycles: whether rounds of agreement are marked.
            gather: returns the texts that all ranks give.

        Raises:
            InvalidArgumentError: on all ranks: one of them has failed. Errors of `gather` pass
                through.
        """
        self.stop()
        # Counts failed ones, too. Of a start that not all ranks have called, only some know.
        self._number = 1 + max(map(int, gather(str(self._number))))
        timeline, failure = None, ""
        try:
            timeline = self._make(path, mark_cycles)
        except InvalidArgumentError as error:
            failure = str(error)
        with contextlib.ExitStack() as unless_agreed:
            if timeline is not None:
                unless_agreed.callback(timeline.stop, _PATIENCE_AFTER_FAILURE_S)
            for failed in filter(None, gather(failure)):
                raise InvalidArgumentError(failed)
            unless_agreed.pop_all()
        self._current = timeline
        self._connections.on_engine = self._watch
        for engine in list(self._connections.engines):
            self._watch(engine)

    def _make(self, path: str | os.PathLike[str], mark_cycles: bool) -> Timeline | None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise InvalidArgumentError(f"file_path={path!r} is not the path of a file")
        if is_for_one_rank():
            _log.warning("no timeline is written: it %s", NEEDS_LINUX)
            return None
        mine = self._connections
        return Timeline(
            rank=mine.rank,
            labels=list(mine.labels),
            plane=mine.plane,
            number=self._number,
            width=self._config.width,
            checksums=bool(self._config.checksum),
            transfer_timeout_s=_TRANSFER_TIMEOUT_S,
            has_clock_of_rank_0=mine.host_of[mine.rank] == mine.host_of[0],
            path=os.fspath(path),
            mark_cycles=mark_cycles,
            log=_log.warning,
        )

    def _watch(self, engine: Engine) -> None:
        """Write the operations of an engine to the timeline from now on."""
        if self._current is not None:
            stream = RecordStream(_RECORDS)
            self._current.watch(stream)
            engine.observe(stream)

    def stop(self, failed: bool = False) -> None:
        """End the present timeline, if there is one.

        Waits at most some seconds for ranks that hand over their events late; less after a failure,
        since ranks may have died.
        """
        timeline, self._current = self._current, None
        if timeline is None:
            return
        self._connections.on_engine = None
        for engine in list(self._connections.engines):
            with contextlib.suppress(RingError):  # the engine has been shut down
                engine.observe(None)
        timeline.stop(_PATIENCE_AFTER_FAILURE_S if failed else _PATIENCE_S)
        if timeline.dropped() > 0:
            _log.warning(
                "rank %d: the timeline lacks %d operations: they came faster than it was written",
                self._connections.rank,
                timeline.dropped(),
            )


def _numbered(path: str, number: int) -> str:
    """Return timeline.2.json for the second timeline.json."""
    if number == 1:
        return path
    file = Path(path)
    return str(file.with_name(f"{file.stem}.{number}{file.suffix}"))
