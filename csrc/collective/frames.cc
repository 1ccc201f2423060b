// SPDX-License-Identifier: Apache-2.0
#include "collective/frames.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/at.h"
#include "core/error.h"

namespace torch_ring {

namespace {

// Bytes of memory that a header alone can make this rank allocate. A longer frame gets more memory
// as its bytes arrive.
constexpr std::size_t kUnproven = 64u << 10;

std::vector<std::uint32_t> sums(std::span<const std::uint32_t> counts) {
  std::vector<std::uint32_t> sums{0};
  for (const std::uint32_t count : counts) sums.push_back(sums.back() + count);
  return sums;
}

}  // namespace

BruckFrames::BruckFrames(int member, std::span<const std::uint32_t> ranks_of_member,
                         std::size_t capacity)
    : member_(member),
      first_rank_(sums(ranks_of_member)),
      capacity_(capacity),
      steps_(bruck_steps(member, size())),
      due_(steps_.size()),
      outgoing_(steps_.size()),
      incoming_(steps_.size()) {}

void BruckFrames::begin(const Runs& own, const LeastWait& least_wait) {
  ++round_;
  least_wait_ = least_wait;
  due_ = 0;
  received_ = 0;
  for (auto& frame : outgoing_) frame.clear();
  own_.resize(encoded_bytes(own));
  encode(own, own_.data());
  runs_.clear();
  decode(own_, ranks_of(member_, 1), capacity_, runs_);
  make_frame();
}

std::span<std::byte> BruckFrames::room() {
  if (received_ < sizeof header_) {
    return std::as_writable_bytes(std::span(&header_, 1)).subspan(received_);
  }
  std::vector<std::byte>& body = incoming_[due_];
  const std::size_t arrived = received_ - sizeof header_;
  if (arrived == body.size()) {
    body.resize(std::min(header_.bytes, arrived + std::max(kUnproven, arrived)));
  }
  return std::span(body).subspan(arrived);
}

int BruckFrames::members_known() const {
  return complete() ? size() : (steps_[due_].from - member_ + size()) % size();
}

void BruckFrames::absorb(std::size_t bytes) {
  if (bytes == 0) return;
  received_ += bytes;
  if (received_ == sizeof header_) read_header();
  if (received_ < sizeof header_ + header_.bytes) return;
  const BruckStep& step = steps_[due_];
  decode(incoming_[due_], ranks_of(step.from, step.count), capacity_, runs_);
  least_wait_.include(header_.least_wait);
  ++due_;
  received_ = 0;
  make_frame();
}

/// Checks a received header. A frame of at least one rank has bytes.
void BruckFrames::read_header() {
  if (header_.round != round_) {
    throw Error(ErrorKind::kInternal, "of round " + std::to_string(header_.round) + " in round " +
                                          std::to_string(round_));
  }
  const LeastWait& least = header_.least_wait;
  if (least.last() >= 0 && least.rank >= first_rank_.back()) {
    throw Error(ErrorKind::kInternal,
                "of a wait of rank " + std::to_string(least.rank) + ", which there is not");
  }
  const BruckStep& step = steps_[due_];
  const std::uint32_t ranks = ranks_of(step.from, step.count);
  if (header_.bytes == 0 || header_.bytes > most_encoded_bytes(ranks, capacity_)) {
    throw Error(ErrorKind::kInternal,
                std::to_string(header_.bytes) + " bytes for " + std::to_string(ranks) + " entries");
  }
  incoming_[due_].clear();
}

/// Makes the frame of the step that is due; after the last step, brings the runs into order.
void BruckFrames::make_frame() {
  if (complete()) {
    const std::uint32_t before = ranks_of(0, member_);
    const std::uint32_t behind = runs_.ranks() - before;
    ordered_ = runs_.part(behind, before);
    ordered_.append(runs_.part(0, behind));
    return;
  }
  const Runs sent = runs_.part(0, ranks_of(member_, steps_[due_].count));
  const Header header{round_, least_wait_, encoded_bytes(sent)};
  std::vector<std::byte>& frame = outgoing_[due_];
  frame.resize(sizeof header + header.bytes);
  std::memcpy(frame.data(), &header, sizeof header);
  encode(sent, frame.data() + sizeof header);
}

/// The ranks that `count` members from `first` on stand for, around the ring.
std::uint32_t BruckFrames::ranks_of(int first, int count) const {
  const int end = first + count;
  if (end <= size()) return at(first_rank_, end) - at(first_rank_, first);
  return first_rank_.back() - at(first_rank_, first) + at(first_rank_, end - size());
}

}  // namespace torch_ring
