// routed_alltoall(): an alltoall where only some ranks have connections.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collective/communicator.h"
#include "core/at.h"

namespace torch_ring {

/// Routes: the way of each part of an alltoall, in three hops: inside the sender's host to the rank
/// on the receiver's lane, along that lane to the receiver's host, inside it to the receiver. Pure.
class Routes {
 public:
  static constexpr int kHops = 3;

  /// `lanes`: the first ranks of each host serve its network; the others use theirs in turn.
  Routes(std::vector<std::vector<int>> ranks_of_host, int lanes);

  int size() const { return static_cast<int>(positions_.size()); }

  /// The rank that has the part which `from` sends to `to` after so many hops.
  int holder(int from, int to, int hops) const;

  /// The ranks among which `rank` takes a hop, in the order of their communicator: its host, or its
  /// lane; none if it serves no network.
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

/// One rank's share of one hop: an alltoall among its members. Empty parts are left out.
struct Hop {
  std::vector<std::size_t> bytes;  // its matrix, in the order of members
  std::vector<Part> sent;          // in the order of receivers
  std::vector<Part> received;      // in the order of senders
};

/// Hop number `hop`, from 1, of `rank`; `bytes` is the matrix of the whole alltoall. Pure. Cost:
/// one look at each element of the matrix.
Hop plan_hop(const Routes& routes, int rank, int hop, std::span<const std::size_t> bytes);

/// See Communicator::alltoall(). `host` joins the ranks of this host; `lane`, one rank a host in
/// the order of hosts, is null on a rank that serves no network.
///
/// Cost: between hosts each byte travels once, on the receiver's lane; inside hosts twice. Every
/// hop packs what it sends into memory of its own, and the receiver unpacks at the end.
void routed_alltoall(const Routes& routes, int rank, Communicator& host, Communicator* lane,
                     const void* input, void* output, std::span<const std::size_t> bytes);

}  // namespace torch_ring
