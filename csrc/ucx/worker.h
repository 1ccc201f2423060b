// SPDX-License-Identifier: Apache-2.0
// Worker: a UCX worker for one communicator, with its progress and its sleep.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "ucx/api.h"

namespace torch_ring::ucx {

/// Moves nothing by itself: a waiting thread calls progress() or arm(). UCX has one thread a
/// process, which accepts its connections and otherwise sleeps.
///
/// Thread: one at a time. Blocking: no. Errors: Error(kInternal) with UCX's text.
class Worker {
 public:
  /// The longest message that is sent eagerly, in one piece over any transport, and may wait at the
  /// peer. Longer ones stay in the sender's memory until the peer receives them (rendezvous), and
  /// only these can be cancelled: UCX owns the memory of an eager message in several pieces, once
  /// it is being received, until its last piece arrives, which may be never.
  static constexpr std::size_t kEagerBytes = 512;

  explicit Worker(Api api);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  const Api& api() const noexcept { return api_; }
  WorkerHandle handle() const noexcept { return worker_; }

  /// The address by which others reach it.
  std::span<const std::byte> address() const { return address_; }

  /// The names of the fastest transports to other hosts, by which it reaches a worker like itself:
  /// "rc_mlx5", "tcp". Empty if it reaches no other host (UCX_TLS, UCX_NET_DEVICES).
  std::vector<std::string> transports();

  /// Moves as much as possible now; returns whether it moved anything.
  bool progress() {
    const bool moves = api_.worker_progress(worker_) != 0;
    has_moved_ |= moves;
    return moves;
  }

  /// As Network::arm(). One stream's progress() may move the data of another one, which was checked
  /// before: so a sleep needs one more check of all streams that finds nothing.
  bool arm();
  /// As Network::fd().
  int fd() const noexcept { return fd_; }

 private:
  void check(Status status, const char* call) const;
  void close() noexcept;

  const Api api_;
  Context context_ = nullptr;
  WorkerHandle worker_ = nullptr;
  std::vector<std::byte> address_;
  bool has_moved_ = false;  // since arm() was called
  int fd_ = -1;             // UCX's
};

}  // namespace torch_ring::ucx
