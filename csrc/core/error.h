// SPDX-License-Identifier: Apache-2.0
// Error: a failure, typed by the caller's possible reaction.
#pragma once

#include <stdexcept>
#include <string>

namespace torch_ring {

enum class ErrorKind {
  kInvalidArgument,  // fix the program; nothing was sent
  kMismatch,         // the ranks disagree; the job may go on with the next collective
  kPeerLost,         // a rank has died or left; shut down and init again, or exit
  kTimeout,          // a rank is silent; as above
  kInternal,         // a local failure (memory, a system call); as above
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}

  ErrorKind kind() const noexcept { return kind_; }

  /// Whether the communicator is unusable from now on.
  bool fatal() const noexcept {
    return kind_ != ErrorKind::kInvalidArgument && kind_ != ErrorKind::kMismatch;
  }

 private:
  ErrorKind kind_;
};

/// Throws Error(kInternal) with the name of the failed call and errno's text.
[[noreturn]] void throw_errno(const std::string& call);

}  // namespace torch_ring
