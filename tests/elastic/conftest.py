# SPDX-License-Identifier: Apache-2.0
"""hosts: network namespaces that stand for hosts."""

from host_fixtures import hosts

__all__ = ["hosts"]
