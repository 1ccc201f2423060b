// SPDX-License-Identifier: Apache-2.0
#include "collective/routed_alltoall.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <utility>

#include "collective/plan.h"

namespace torch_ring {

namespace {

// The approximate bytes that a rank packs at once: they fit the caches, and memory that the C
// library keeps. New pages would cost more than all copies.
constexpr std::size_t kPacked = 4 << 20;

/// The bytes of each part to move at once; 0 if there are none. The same on all ranks.
std::size_t piece_of(std::span<const std::size_t> bytes, int size) {
  std::size_t busiest = 0;
  for (int rank = 0; rank < size; ++rank) {
    const auto sent = row_of(bytes, size, rank);
    const auto received = column_of(bytes, size, rank);
    busiest = std::max({busiest, std::reduce(sent.begin(), sent.end()),
                        std::reduce(received.begin(), received.end())});
  }
  const std::size_t times = std::max<std::size_t>(1, (busiest + kPacked - 1) / kPacked);
  return (*std::ranges::max_element(bytes) + times - 1) / times;
}

/// A rank's parts: each one shares ownership of its memory, or lies in the caller's input.
using Parts = std::map<Part, std::shared_ptr<const std::byte>>;

std::shared_ptr<std::byte[]> memory_for(std::span<const Part> parts) {
  std::size_t bytes = 0;
  for (const Part& part : parts) bytes += part.bytes;
  return std::make_shared_for_overwrite<std::byte[]>(bytes);
}

/// Adds parts that lie one after the other in `memory`, beginning at `from`.
void add(Parts& parts, std::span<const Part> list, const std::shared_ptr<void>& memory,
         const std::byte* from) {
  for (const Part& part : list) {
    parts[part] = {memory, from};
    from += part.bytes;
  }
}

void take_hop(Communicator& communicator, const Hop& hop, Parts& parts) {
  // The same on all members.
  if (std::ranges::all_of(hop.bytes, [](std::size_t bytes) { return bytes == 0; })) return;
  const auto outgoing = memory_for(hop.sent);
  std::byte* to = outgoing.get();
  for (const Part& part : hop.sent) {
    const auto sent = parts.extract(part);  // may free its memory at the end of the loop body
    std::memcpy(to, sent.mapped().get(), part.bytes);
    to += part.bytes;
  }
  const auto incoming = memory_for(hop.received);
  communicator.alltoall(outgoing.get(), incoming.get(), hop.bytes);
  add(parts, hop.received, incoming, incoming.get());
}

std::vector<Part> concatenated(const std::vector<std::vector<Part>>& lists) {
  std::vector<Part> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

}  // namespace

Routes::Routes(std::vector<std::vector<int>> ranks_of_host, int lanes)
    : ranks_of_host_(std::move(ranks_of_host)), lanes_(static_cast<std::size_t>(lanes)) {
  std::size_t size = 0;
  for (const auto& ranks : ranks_of_host_) size += ranks.size();
  positions_.resize(size);
  for (std::size_t host = 0; host < ranks_of_host_.size(); ++host) {
    for (std::size_t index = 0; index < ranks_of_host_[host].size(); ++index) {
      at(positions_, ranks_of_host_[host][index]) = {host, index};
    }
  }
}

int Routes::holder(int from, int to, int hops) const {
  if (hops == 0) return from;
  if (hops == kHops) return to;
  const std::size_t lane = position_of(to).index % lanes_;
  return ranks_of_host_[position_of(hops == 1 ? from : to).host][lane];
}

std::vector<int> Routes::members(int rank, int hop) const {
  const auto [host, index] = position_of(rank);
  if (hop != 2) return ranks_of_host_[host];
  std::vector<int> lane;
  if (index < lanes_) {
    for (const auto& ranks : ranks_of_host_) lane.push_back(ranks[index]);
  }
  return lane;
}

Hop plan_hop(const Routes& routes, int rank, int hop, std::span<const std::size_t> bytes) {
  constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  const std::vector<int> members = routes.members(rank, hop);
  std::vector<std::size_t> member_of(static_cast<std::size_t>(routes.size()), kNone);
  for (std::size_t i = 0; i < members.size(); ++i) {
    at(member_of, members[i]) = i;
  }

  Hop plan;
  plan.bytes.resize(members.size() * members.size());
  std::vector<std::vector<Part>> sent(members.size());
  std::vector<std::vector<Part>> received(members.size());
  const std::size_t* next = bytes.data();
  for (int from = 0; from < routes.size(); ++from) {
    for (int to = 0; to < routes.size(); ++to) {
      const Part part{from, to, *next++};
      const int sender = routes.holder(from, to, hop - 1);
      const std::size_t row = at(member_of, sender);
      if (part.bytes == 0 || row == kNone) continue;  // hops stay among the members
      const int receiver = routes.holder(from, to, hop);
      if (sender == receiver) continue;  // it stays where it is
      const std::size_t column = at(member_of, receiver);
      plan.bytes[row * members.size() + column] += part.bytes;
      if (sender == rank) sent[column].push_back(part);
      if (receiver == rank) received[row].push_back(part);
    }
  }
  plan.sent = concatenated(sent);
  plan.received = concatenated(received);
  return plan;
}

void routed_alltoall(const Routes& routes, int rank, Communicator& host, Communicator* lane,
                     const void* input, void* output, std::span<const std::size_t> bytes) {
  const std::array<Communicator*, Routes::kHops> hops{&host, lane, &host};
  const std::vector<Range> sent = ranges_of(row_of(bytes, routes.size(), rank));
  const std::vector<Range> received = ranges_of(column_of(bytes, routes.size(), rank));
  const std::size_t longest = *std::ranges::max_element(bytes);
  const std::size_t piece = piece_of(bytes, routes.size());
  std::vector<std::size_t> pieces(bytes.size());
  for (std::size_t done = 0; done < longest; done += piece) {
    std::ranges::transform(bytes, pieces.begin(), [&](std::size_t part) {
      return std::min(piece, part - std::min(part, done));
    });
    Parts parts;
    for (int to = 0; to < routes.size(); ++to) {
      const Part own{rank, to, at(row_of(pieces, routes.size(), rank), to)};
      const auto* const from = static_cast<const std::byte*>(input) + at(sent, to).begin;
      if (own.bytes > 0) add(parts, {&own, 1}, nullptr, from + done);
    }
    for (int hop = 1; hop <= Routes::kHops; ++hop) {
      Communicator* const communicator = at(hops, hop - 1);
      if (!communicator) continue;  // a rank without a lane takes no part in this hop
      take_hop(*communicator, plan_hop(routes, rank, hop, pieces), parts);
    }
    for (const auto& [part, data] : parts) {
      auto* const to = static_cast<std::byte*>(output) + at(received, part.from).begin;
      std::memcpy(to + done, data.get(), part.bytes);
    }
  }
}

}  // namespace torch_ring
