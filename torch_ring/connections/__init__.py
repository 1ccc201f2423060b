"""Connections: what one process has of the other ranks of its world.

`connect` makes the `connections`, from a meeting of the ranks (`torch_ring.rendezvous`): each tells
the others its `peer_info`, and `topology` derives which ranks share a host. The control plane
itself, with its listeners and handshakes, is C++ (csrc/control).
"""
