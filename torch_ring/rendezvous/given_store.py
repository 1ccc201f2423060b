"""host_of, without_prefixes: what is known of a store that torch or a user has made."""

from __future__ import annotations

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

__all__ = ["host_of", "without_prefixes"]


def host_of(store: Store) -> str | None:
    """Return the host that serves a store; None: not known."""
    return getattr(without_prefixes(store), "host", None)  # a TCPStore's


def without_prefixes(store: Store) -> Store:
    """Return the store itself: torch gives each group one with prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
