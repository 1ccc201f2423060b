// announce(): the announcement of a request, with its data if that is inline.
#pragma once

#include "collective/communicator.h"
#include "engine/entry.h"

namespace torch_ring {

/// The announcement of a request: its fingerprint, and its data if that is inline. `alone`: its
/// entry has no other. The spans point into the request and into `fingerprint`, which becomes the
/// encoded fingerprint. Thread: the progress thread. Blocking: no.
Announcement announce(const Request& request, bool alone, HostCommunicator& communicator,
                      Bytes& fingerprint);

/// The offset of the buffer of an in-place allreduce in shared memory, or -1: the other ranks of
/// the host write to it.
std::int64_t shared_offset(const Request& request, HostCommunicator& communicator);

/// Whether the tensor of a request is so small that it travels with the agreement, as the inline
/// payload of an entry. The limit is lower for a request that is not `alone`, because it can be
/// fused with the others.
bool fits_inline(const Request& request, bool alone, HostCommunicator& communicator);

/// Whether the ranks send one another the rows of this alltoall as data, after the agreement: those
/// of so many ranks do not fit the entries of one round. The same on all ranks.
bool gathers_rows(const Request& request, HostCommunicator& communicator);

/// Fetches the rows of all ranks of such a one. Collective.
std::vector<std::int64_t> gather_rows(const Request& request, Communicator& communicator);

}  // namespace torch_ring
