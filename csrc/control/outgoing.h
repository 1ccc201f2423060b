// Outgoing: a connection to another rank in the making.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "control/address.h"
#include "control/poll_set.h"
#include "core/clock.h"
#include "core/fd.h"
#include "transport/handshake.h"

namespace torch_ring {

/// Connects to a rank's listener and authenticates, again and again until it succeeds. Or, as a
/// probe, only asks again and again whether somebody listens there.
///
/// Thread: one at a time. Blocking: no.
class Outgoing {
 public:
  enum class State { kPending, kRefused, kDone };
  static constexpr std::chrono::milliseconds kRetry{50};

  /// `unix`: whether to use the Unix socket of `address`, and not TCP.
  Outgoing(const Address& address, bool unix, const Key& key, const Hello& hello);
  /// A probe: each `interval`, at first after one.
  Outgoing(const Address& address, bool unix, std::chrono::milliseconds interval,
           Clock::time_point now);

  /// Does what is possible now, if something is. kRefused: nobody listens there; this goes on
  /// trying. kDone: take() has the socket; a probe has found a listener, and goes on.
  /// Errors: Error(kInternal) if this process lacks descriptors or memory; Error(kMismatch) if the
  /// rank has another key. It may be called again all the same.
  State advance(const PollSet& polls, Clock::time_point now);

  const Hello& hello() const noexcept { return hello_; }
  Fd take() { return std::move(socket_); }
  int fd() const noexcept { return socket_.get(); }
  /// Why the last attempt failed; empty if none has.
  const std::string& trouble() const noexcept { return trouble_; }

  void add_to(PollSet& polls);
  /// When to call advance() although nothing is ready.
  Clock::time_point due() const { return socket_ ? Clock::time_point::max() : retry_; }

 private:
  State connect(Clock::time_point now);
  State shake_hands(Clock::time_point now);
  State fail(const char* call, int error, Clock::time_point now);

  const SocketAddress to_;
  const Key key_{};
  const Hello hello_{};
  const std::optional<std::chrono::milliseconds> probe_;
  Clock::time_point retry_{};  // the clock's beginning: at once
  Fd socket_;
  std::optional<Handshake> handshake_;  // once it is connected
  std::string trouble_;
  std::size_t slot_ = PollSet::kNone;
};

/// Moves a handshake on as far as the socket allows. Returns 0, or the errno with which the
/// connection ended (ECONNRESET if it was closed). Errors: those of the handshake.
int advance_handshake(Handshake& handshake, int fd);

/// Whether an errno says that this process, and not the peer, is in trouble.
bool is_local(int error);

}  // namespace torch_ring
