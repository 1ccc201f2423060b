"""DrivenJob: an elastic job whose ranks Horovod's driver chooses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch_ring.errors import InvalidArgumentError, MismatchError, RingError, first_line
from torch_ring.rendezvous.horovod_driver import HorovodDriver
from torch_ring.rendezvous.horovod_notices import HorovodNotices
from torch_ring.rendezvous.network import own_address
from torch_ring.world import current
from torch_ring.world.driven_sets import driven_processes, note_driven_sets

__all__ = ["DrivenJob"]

_log = logging.getLogger("torch_ring")

_AGAIN_S = 0.1


class DrivenJob:
    """Asks the driver for a place in each world, and hears from it when hosts have come or gone.

    It has the face of `ElasticJob`.

    Thread: the training's. Blocking: `regroup`, until the driver has heard of all its workers.

    Args:
        driver: that has started this process.
        on_hosts_updated: called when hosts have come or gone. Thread: any.

    Attributes:
        members: the processes of the last world that was made, by rank.
    """

    has_newcomers = False  # the driver says it anew, should they come while the ranks change
    must_leave = False  # the driver gives a process no place
    others_may_have_trained = True  # a process cannot know whether it has come later

    def __init__(self, driver: HorovodDriver, on_hosts_updated: Callable[[Any, int], None]) -> None:
        config = current.config()
        self.members: Sequence[object] = driven_processes() or (0,)  # not made by the driver
        self._timeout_s = config.elastic_timeout_s
        host = own_address(config.interface, driver.address)
        self._notices = HorovodNotices(host, on_hosts_updated)
        try:
            driver.register(host, self._notices.port, self._notices.key)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening: this process has left the job."""
        self._notices.close()

    def regroup(self, cause: BaseException | None) -> None:
        """Join the next world of the driver. Collective.

        Raises:
            SystemExit: there is no place for this process.
            RingError: the driver is gone, or no world was made in time.
        """
        began = time.monotonic()
        note_driven_sets()
        current.shutdown()
        while True:
            try:
                current.init()
                break
            except (MismatchError, InvalidArgumentError):
                raise
            except RingError as error:  # another one has died meanwhile
                if time.monotonic() - began > self._timeout_s:
                    raise
                _log.warning("the next world was not made: %s", first_line(error))
                time.sleep(_AGAIN_S)
        self.members = driven_processes()
        if current.rank() == 0:
            _log.warning("%d ranks go on: %s", current.size(), cause)
