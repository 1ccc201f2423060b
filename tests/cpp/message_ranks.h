// SPDX-License-Identifier: Apache-2.0
// MessageRank and run_messages(): ranks that send one another messages, as threads.
#pragma once

#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "messages/point_to_point.h"
#include "planes.h"
#include "test_world.h"

namespace torch_ring::test {

/// One rank's control plane and messages.
class MessageRank {
 public:
  using Request = PointToPoint::Request;
  static constexpr std::uint64_t kSet = 3;

  struct Options {
    std::size_t width = 1;
    bool checksums = false;
    std::chrono::milliseconds transfer_timeout = std::chrono::seconds(30);
    std::chrono::milliseconds stall_warning{0};
  };

  /// `members`: the set's ranks in the world; `rank`: this one's index there.
  MessageRank(int rank, std::vector<int> members, ControlPlane& plane, const Options& options)
      : rank_(rank), size_(static_cast<int>(members.size())), plane_(plane) {
    MessagesWorld world;
    world.rank = rank;
    for (const int member : members) {
      world.labels.push_back("rank " + std::to_string(world.labels.size()) + " (of " +
                             std::to_string(member) + ")");
    }
    world.width = options.width;
    world.checksums = options.checksums;
    world.transfer_timeout = options.transfer_timeout;
    world.stall_warning = options.stall_warning;
    world.recorder = recorder_;
    world.log = [this](const std::string& text) {
      const std::scoped_lock lock(mutex_);
      log_ += text + "\n";
    };
    messages_ = std::make_unique<PointToPoint>(plane, kSet, std::move(members), std::move(world));
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  PointToPoint& messages() { return *messages_; }
  const MessageRecorder& recorder() const { return *recorder_; }
  ControlPlane& plane() { return plane_; }
  std::string log() {
    const std::scoped_lock lock(mutex_);
    return log_;
  }

  Request send(std::vector<std::byte>& bytes, int to, int tag = 0, DType dtype = DType::kUInt8,
               Clock::time_point deadline = in(std::chrono::seconds(30))) {
    return messages_->post({true, to, tag, dtype, bytes, deadline});
  }

  Request receive(std::vector<std::byte>& bytes, std::optional<int> from, int tag = 0,
                  DType dtype = DType::kUInt8,
                  Clock::time_point deadline = in(std::chrono::seconds(30))) {
    return messages_->post({false, from, tag, dtype, bytes, deadline});
  }

  static Clock::time_point in(std::chrono::milliseconds timeout) { return Clock::now() + timeout; }

 private:
  const int rank_;
  const int size_;
  ControlPlane& plane_;
  std::mutex mutex_;
  std::string log_;
  const std::shared_ptr<MessageRecorder> recorder_ = std::make_shared<MessageRecorder>();
  std::unique_ptr<PointToPoint> messages_;  // the last member: it logs
};

/// The bytes of a message, unlike those of any other; `what`: its number.
inline std::vector<std::byte> message(std::size_t bytes, int what) {
  std::vector<std::byte> values(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    values[i] =
        static_cast<std::byte>((i * 31 + i / 251 + static_cast<std::size_t>(what) * 7) % 256);
  }
  return values;
}

/// Runs `fn` on all ranks of a world, which leave when all have returned from it.
inline void run_messages(const std::vector<int>& host_of,
                         const std::function<void(MessageRank&)>& fn,
                         const MessageRank::Options& options = {}) {
  Planes planes = make_planes(host_of);
  std::vector<int> members(host_of.size());
  std::iota(members.begin(), members.end(), 0);
  std::vector<std::unique_ptr<MessageRank>> ranks;
  for (const int rank : members) {
    ranks.push_back(std::make_unique<MessageRank>(rank, members, *at(planes, rank), options));
  }
  run_ranks(static_cast<int>(host_of.size()), [&](int rank) { fn(*at(ranks, rank)); });
  ranks.clear();
}

}  // namespace torch_ring::test
