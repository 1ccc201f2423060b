// Error: a failure, typed by what the caller can do about it.
#pragma once

#include <stdexcept>
#include <string>

namespace torch_ring {

enum class ErrorKind {
  kInvalidArgument,  // fix the program; nothing was sent
  kMismatch,         // the ranks disagree; the job may go on with the next collective
  kPeerLost,         // a rank is gone; shut down and init again, or exit
  kTimeout,          // a rank is silent; as above
  kInternal,         // a local failure (memory, a system call); as above
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}

  ErrorKind kind() const noexcept { return kind_; }

  /// True when the communicator cannot be used any more.
  bool fatal() const noexcept {
    return kind_ != ErrorKind::kInvalidArgument && kind_ != ErrorKind::kMismatch;
  }

 private:
  ErrorKind kind_;
};

/// An Error of kind kInternal that names the failed call and errno's text.
[[noreturn]] void throw_errno(const std::string& call);

}  // namespace torch_ring
