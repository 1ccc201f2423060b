// SPDX-License-Identifier: Apache-2.0
// BruckFrames: the frames of Bruck's allgather of entries, without their transport. Pure: no I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/plan.h"
#include "collective/runs.h"

namespace torch_ring {

/// In each step a member sends one frame and receives one. A member stands for one rank, or, as
/// the leader of a host, for several. A frame has the runs of all ranks of its members (runs.h), so
/// that it is as long as one entry while all entries are equal:
///
///   frame:  u32 round, modulo 2^32 | u32 us | u32 rank | u32 most_us | u64 bytes of the runs |
///   runs
///
/// The second to fourth fields are the LeastWait of the same ranks in the round before. Minimum and
/// maximum over the frames give that of all members, even if a member is counted twice.
///
/// Cost of a round: ceil(log2(members)) frames. Time: of a received frame, O(its bytes + runs).
///
/// Thread: one at a time. Blocking: no.
class BruckFrames {
 public:
  /// `ranks_of_member[m]`: the number of ranks that member m stands for. `capacity`: of an entry.
  BruckFrames(int member, std::span<const std::uint32_t> ranks_of_member, std::size_t capacity);

  const std::vector<BruckStep>& steps() const { return steps_; }

  /// Starts the next round with the entries of this member's ranks. Copies them. `least_wait`: of
  /// these ranks, in the round before.
  void begin(const Runs& own, const LeastWait& least_wait = {});

  /// Of all members' ranks, in the round before. Precondition: complete().
  const LeastWait& least_wait() const { return least_wait_; }

  /// The step whose frame is due; steps().size() when all frames have arrived.
  std::size_t due() const { return due_; }
  bool complete() const { return due_ == steps_.size(); }

  /// The frame to send in `step`: empty after due().
  ByteSpan frame(std::size_t step) const { return outgoing_[step]; }

  /// The room for the next bytes of the due frame, maybe not all, and never for bytes beyond it.
  /// Precondition: not complete().
  std::span<std::byte> room();

  /// Processes `bytes` received bytes at the front of room(). After the last byte of a frame the
  /// next step is due, and its frame is ready.
  /// Errors: Error(kInternal) on a frame that does not belong here. Then the round is lost.
  void absorb(std::size_t bytes);

  /// The number of members whose entries have arrived: this one, and its successors.
  int members_known() const;

  /// The entries of all members' ranks, in the order of members. Valid until begin().
  /// Precondition: complete().
  const Runs& runs() const { return ordered_; }

 private:
  struct Header {
    std::uint32_t round = 0;
    LeastWait least_wait;
    std::uint64_t bytes = 0;
  };

  int size() const { return static_cast<int>(first_rank_.size()) - 1; }
  std::uint32_t ranks_of(int first, int count) const;
  void make_frame();
  void read_header();

  const int member_;
  const std::vector<std::uint32_t> first_rank_;  // by member, in their order; at the end: all ranks
  const std::size_t capacity_;
  const std::vector<BruckStep> steps_;

  std::uint32_t round_ = 0;
  LeastWait least_wait_;
  std::size_t due_ = 0;
  std::vector<std::byte> own_;                    // the encoded entries of this member
  std::vector<std::vector<std::byte>> outgoing_;  // by step; each empty before its step
  std::vector<std::vector<std::byte>> incoming_;  // by step; all but the header
  std::size_t received_ = 0;                      // bytes of the frame that is due
  Header header_;                                 // of that frame
  Runs runs_;                                     // of member_, member_ + 1, ..., (mod size)
  Runs ordered_;                                  // of member 0, 1, ...
};

}  // namespace torch_ring
