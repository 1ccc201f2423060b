// Worker: UCX's engine of one communicator: its resources, its progress and its sleep.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "ucx/api.h"

namespace torch_ring::ucx {

/// Moves nothing by itself: whoever waits calls progress() or arm(). UCX has a thread of its own,
/// one a process, which accepts its connections and sleeps otherwise.
///
/// Thread: one at a time. Blocking: no. Errors: Error(kInternal) with UCX's words.
class Worker {
 public:
  /// Messages up to so long are sent eagerly, in one piece over any transport: they may wait at a
  /// peer that does not look. Longer ones wait where they lie until the peer receives them
  /// (rendezvous), and only these can be called back: of an eager message in pieces, once it is
  /// being received, the memory is UCX's until its last piece comes, which may be never.
  static constexpr std::size_t kEagerBytes = 512;

  explicit Worker(Api api);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  const Api& api() const noexcept { return api_; }
  WorkerHandle handle() const noexcept { return worker_; }

  /// The address by which others reach it.
  std::span<const std::byte> address() const { return address_; }

  /// The names of the transports to other hosts that it uses to reach a worker like itself, the
  /// fastest there are: "rc_mlx5", "tcp". None: it reaches nobody (UCX_TLS, UCX_NET_DEVICES).
  std::vector<std::string> transports();

  /// Moves what can be moved now; returns whether there was anything.
  bool progress() {
    const bool moves = api_.worker_progress(worker_) != 0;
    has_moved_ |= moves;
    return moves;
  }

  /// As Network::arm(). The progress that one stream has made may be another one's, which has
  /// looked before: so all must look once more in vain before a sleep.
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
