// SPDX-License-Identifier: Apache-2.0
// Routes and routed_alltoall(): an alltoall between hosts where only ranks of one lane have
// connections.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collective/communicator.h"
#include "core/at.h"

namespace torch_ring {

/// The route of each part of an alltoall, in three hops: inside the sender's host to the rank on
/// the receiver's lane, along that lane to the receiver's host, inside it to the receiver. Pure.
class Routes {
 public:
  static constexpr int kHops = 3;

  /// `lanes`: the number of lanes. The first `lanes` ranks of a host are on one each; the other
  /// ranks share these in turn.
  Routes(std::vector<std::vector<int>> ranks_of_host, int lanes);

  int size() const { return static_cast<int>(positions_.size()); }

  /// The rank that holds the part from rank `from` to rank `to` after `hops` hops.
  int holder(int from, int to, int hops) const;

  /// The ranks that take part in a hop with `rank`, in the order of their communicator: those of
  /// its host, or of its lane; none if it is on no lane.
  std::vector<int> members(int rank, int hop) const;

 private:
  struct Position {
    std::size_t host;
    std::size_t index;  // among the ranks of the host
  };
  const Position& position_of(int rank) const { return at(positions_, rank); }

  std::vector<std::vector<int>> ranks_of_host_;
  std::size_t lanes_;
  std::vector<Position> positions_;  // by rank
};

/// One part of an alltoall: the bytes that one rank sends to another.
struct Part {
  int from;
  int to;
  std::size_t bytes;
  auto operator<=>(const Part&) const = default;
};

/// One rank's share of one hop: an alltoall among its members. Empty parts, and parts that stay on
/// their rank, are left out.
struct Hop {
  std::vector<std::size_t> bytes;  // the alltoall's matrix, by member: its diagonal is 0
  std::vector<Part> sent;          // in the order of receivers
  std::vector<Part> received;      // in the order of senders
};

/// Hop number `hop` (from 1) of `rank`; `bytes` is the matrix of the whole alltoall. Pure. Cost:
/// one pass over the matrix.
Hop plan_hop(const Routes& routes, int rank, int hop, std::span<const std::size_t> bytes);

/// Communicator::alltoall() in three hops. `host` connects the ranks of this host. `lane` connects
/// one rank of each host, in the order of hosts; it is null on a rank without a lane.
///
/// Cost: each byte travels once between hosts, on the receiver's lane; inside hosts once to that
/// lane, and once more if the receiver is not on it. The bytes are packed, a few MiB at a time, and
/// unpacked by the receiver. Empty hops are skipped.
void routed_alltoall(const Routes& routes, int rank, Communicator& host, Communicator* lane,
                     const void* input, void* output, std::span<const std::size_t> bytes);

}  // namespace torch_ring
