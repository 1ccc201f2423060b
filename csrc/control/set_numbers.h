// kMessagesUp, kMessagesDown, connects(): the numbers under which the control plane knows the
// connections of a process set, and which of two ranks makes them.
#pragma once

#include <array>
#include <cstdint>

namespace torch_ring {

/// A set's number with one of these bits names its messages (csrc/messages): those from lower to
/// higher ranks of the world, and those from higher to lower ones. The sets themselves are numbered
/// from 0 on.
inline constexpr std::uint64_t kMessagesUp = std::uint64_t{1} << 63;
inline constexpr std::uint64_t kMessagesDown = std::uint64_t{1} << 62;

constexpr std::uint64_t set_of(std::uint64_t number) {
  return number & ~(kMessagesUp | kMessagesDown);
}

/// The number of the connections on which rank `from` of the world sends messages to rank `to`.
constexpr std::uint64_t messages_number(std::uint64_t set, int from, int to) {
  return set | (from < to ? kMessagesUp : kMessagesDown);
}

/// The numbers of all connections of a set.
constexpr std::array<std::uint64_t, 3> numbers_of(std::uint64_t set) {
  return {set, set | kMessagesUp, set | kMessagesDown};
}

/// Whether `rank` connects to `peer`, and not the other way round: the sender of messages does, and
/// otherwise the higher rank.
constexpr bool connects(std::uint64_t number, int rank, int peer) {
  return (number & kMessagesUp) != 0 ? rank < peer : rank > peer;
}

}  // namespace torch_ring
