"""Connections: authenticated connections between ranks, and what ranks learn of one another.

`connect` makes a `full_mesh` of connections: each rank publishes its `peer_info`, `topology`
derives who shares a host, `connector` opens the sockets, and `handshake` authenticates both ends.
"""
