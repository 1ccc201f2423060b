"""Rendezvous: the identity of this process, and how the ranks find one another.

`launchers` reads rank and size from the launcher's environment; `start` and `claim` tell jobs of
one name apart. In a `meeting` every rank gets the cards of all: the ranks of a host meet at a Unix
socket (`meeting_name`, `local_meeting`, `frames`), and the leaders of hosts exchange one card each
(`group_card`, `cards`, `group_meeting`) over a `store` (`host_exchange`), whose values they
authenticate (`job_key`, `secret_file`).
"""
