"""Connections: authenticated connections between ranks, and the peer info that ranks exchange.

`connect` makes a `full_mesh` of connections: each rank publishes its `peer_info`, `topology`
derives which ranks share a host, `connector` opens the sockets, and `handshake` authenticates both
ends.
"""
