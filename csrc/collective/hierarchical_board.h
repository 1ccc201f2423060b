// HierarchicalBoard: a Board of several hosts, shared memory inside them, TCP between their
// leaders.
#pragma once

#include <atomic>
#include <vector>

#include "collective/host.h"
#include "collective/shm_board.h"
#include "collective/tcp_board.h"
#include "core/at.h"

namespace torch_ring {

/// In a round the ranks of a host post in shared memory. When all have posted, their leader (host
/// index 0) posts their entries as one entry to the other leaders. It writes the entries of all
/// ranks that come back to its memory, where its host's ranks read them. World slot r % 2 is free
/// for round r + 2 for the reason given in shm_board.h.
///
///   a host's entry and a world slot:  for every rank  u64 bytes | the bytes | padding to 8
class HierarchicalBoard : public Board {
 public:
  /// `ranks_of_host`: by host; `leaders` is null on ranks that do not lead. All outlive the board.
  HierarchicalBoard(Host& host, std::vector<std::vector<int>> ranks_of_host, TcpBoard* leaders);

  /// The largest entry such that those of `size` ranks fit a world slot.
  static std::size_t entry_capacity(int size);
  /// The largest entry of a host with `local_size` ranks.
  static std::size_t host_capacity(int size, int local_size);

  std::size_t capacity() const override { return local_.capacity(); }
  std::size_t inline_limit() const override { return TcpBoard::kInlineLimit; }
  void post(std::span<const std::byte> entry) override;
  bool peer_posted() override;
  bool complete() override;
  std::span<const std::byte> entry(int rank) const override { return at(entries_, rank); }
  std::vector<int> missing() const override;
  void wait_until(Clock::time_point deadline, std::chrono::microseconds spin) override;
  void wake() override;

 private:
  void gather();
  void publish();
  void index();

  Host& host_;
  const std::vector<std::vector<int>> ranks_of_host_;
  TcpBoard* const leaders_;
  ShmBoard local_;
  bool open_ = false;      // posted to and not complete
  bool gathered_ = false;  // the leader has posted its host's entries
  std::vector<std::byte> gathered_entries_;
  std::vector<std::span<const std::byte>> entries_;  // by rank, in the leader's world slot
  std::atomic<bool> woken_{false};
};

}  // namespace torch_ring
