// TcpBoard: a Board over connections: Bruck's allgather, which makes progress without blocking.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "collective/board.h"
#include "collective/plan.h"
#include "core/at.h"
#include "transport/connection.h"

namespace torch_ring {

/// A step is one frame in each direction. No rank is the source of two steps, so a connection has
/// at most one frame a round each way, in the order of the rounds, in whatever order ranks post.
///
///   frame:  u64 round | u64 bytes of the entries | an entry per rank
///   entry:  u64 bytes | the bytes | padding to a multiple of 8
///
/// Data travels on the same connections. Therefore every rank runs the collectives of a round
/// before its next post(), and before peer_posted(), which would take their bytes for a frame. The
/// board never reads beyond the frame that is due.
class TcpBoard : public Board {
 public:
  static constexpr std::size_t kEntryBytes = 64u << 10;
  static constexpr std::size_t kInlineLimit = 16u << 10;

  /// `connections[r]` leads to rank r, null at `rank` itself; they and `waiter` outlive the board.
  /// `capacity` is the largest entry, in bytes: more than kEntryBytes if an entry has those of a
  /// host.
  TcpBoard(int rank, std::vector<Connection*> connections, const Waiter& waiter,
           std::size_t capacity = kEntryBytes);

  std::size_t capacity() const override { return capacity_; }
  std::size_t inline_limit() const override { return kInlineLimit; }
  void post(std::span<const std::byte> entry) override;
  bool peer_posted() override;
  bool complete() override;
  std::span<const std::byte> entry(int rank) const override;
  /// Also names ranks that have posted, if their entries arrive in the frame of one that has not.
  std::vector<int> missing() const override;
  void wait_until(Clock::time_point deadline, std::chrono::microseconds spin) override;
  void wake() override;

  /// The descriptors that a wait for this board polls. They stay valid, and complete() and post()
  /// keep them up to date, also while a Waiter holds them.
  std::span<const pollfd> fds() {
    update_fds();  // collectives on the connections change the sockets in use
    return fds_;
  }

 private:
  struct Header {
    std::uint64_t round = 0;
    std::uint64_t bytes = 0;
  };
  struct Frame {
    std::vector<std::byte> bytes;
    std::size_t sent = 0;
  };

  bool flush();
  void begin_step();
  bool receive_frame();
  void begin_entries(const Connection& from, int count);
  void index_entries(const Connection& from, int count);
  void update_fds();
  Connection& connection(int rank) const { return *at(connections_, rank); }

  const int rank_;
  const std::vector<Connection*> connections_;
  const std::vector<BruckStep> steps_;
  const Waiter& waiter_;
  const std::size_t capacity_;

  std::uint64_t round_ = 0;
  bool open_ = false;               // posted to and not complete
  std::size_t step_ = 0;            // the step whose frame is due
  std::vector<Frame> frames_;       // to send, by step; each empty before its step
  std::size_t received_ = 0;        // bytes of the frame that is due, header included
  Header header_;                   // of that frame
  std::vector<std::byte> entries_;  // the entries of the ranks rank, rank + 1, ..., as in a frame
  std::vector<std::size_t> entry_offsets_;  // where each complete entry begins in entries_
  std::vector<pollfd> fds_;  // by step, and one more; fd -1 where there is nothing to wait for
  std::atomic<bool> woken_{false};
};

}  // namespace torch_ring
