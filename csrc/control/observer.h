// ControlObserver: learns what happens to the ranks of a process set.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/error.h"

namespace torch_ring {

/// The plane's thread calls it, and ControlPlane::subscribe() for what has happened before. It must
/// not block, and not call subscribe() or unsubscribe(). No lock that fail(), missing() or
/// SocketSource::take() take is held meanwhile: they may be called under a lock of the observer's.
class ControlObserver {
 public:
  virtual ~ControlObserver() = default;
  /// `rank` of the world has died, or is silent. `how`: "rank 3 (pid 7) died: its ...", or, from
  /// another rank, "rank 1 (pid 5) says that rank 3 (pid 7) died: ...". It may be this rank itself,
  /// which others take for lost, when it was stopped for long. A rank of which on_departed() told
  /// may yet be lost.
  virtual void on_lost(int rank, const std::string& how) = 0;
  /// `rank` of the world has left the set in peace. `rounds`: those of the set's board that it has
  /// completed before, so that what the others need for them is on its way; none if that is not
  /// known. `why`: in its program's words, if that has failed. The first call for a rank that knows
  /// `rounds` is right; there may be more.
  virtual void on_departed(int rank, std::optional<std::uint64_t> rounds,
                           const std::string& why) = 0;
  /// `rank` of the world has given the set up.
  virtual void on_failed(int rank, ErrorKind kind, const std::string& why) = 0;
  /// A data connection of the set is there, or has failed: a SocketSource::take() may have news.
  virtual void on_connected() = 0;
};

}  // namespace torch_ring
