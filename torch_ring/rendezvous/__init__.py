"""Rendezvous: the identity of this process, and the store over which the ranks connect.

`launchers` reads rank and size from the launcher's environment. `store` finds or serves the store
of the job; `local_socket` finds it inside one host without an address. `store_exchange` gathers
values over the store, which is how the ranks talk before they are connected.
"""
