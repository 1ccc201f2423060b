// SPDX-License-Identifier: Apache-2.0
// PointToPoint: messages from one rank of a process set to another.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "control/control_plane.h"
#include "core/fd.h"
#include "messages/message_protocol.h"
#include "messages/message_request.h"

namespace torch_ring {

/// Sends and receives bytes with an integer tag, beside the collectives and independently of them.
/// A receive takes the messages of one rank or of any; they are matched as MPI does (Mailbox).
///
/// A message that is longer than the receive, or of another dtype, is a MismatchError at the
/// receiver, and at the sender if the message is longer than MessageStream::kWholeBytes; the send
/// of a shorter one has ended by then, so its rank logs a warning. A message shorter than the
/// receive is not an error. Other messages are not affected.
///
/// The connections are made when the first message is sent (control/news.h): over a Unix socket
/// between ranks of one host, over TCP between hosts. One thread moves all bytes; it starts with
/// the first request, so without messages there is no cost.
///
/// Thread: any that does not hold the GIL, which the freeing of tensors needs. Blocking: close().
/// Errors: of a request, its own. A rank that has left, or is lost, is Error(kPeerLost) of the
/// requests that need it. A rank of the set that is lost or has given up the set, and a request
/// that waits past its deadline, end all requests, and with the set all later ones.
class PointToPoint final : private ControlObserver {
 public:
  using Request = std::shared_ptr<MessageRequest>;

  /// `plane` outlives it. `members`: the set's ranks in the world, by their rank in the set.
  PointToPoint(ControlPlane& plane, std::uint64_t set, std::vector<int> members,
               MessagesWorld world);
  ~PointToPoint() override { close(); }
  PointToPoint(const PointToPoint&) = delete;
  PointToPoint& operator=(const PointToPoint&) = delete;

  /// Begins to send or to receive. Errors: Error(kInvalidArgument) unless the peer is another rank
  /// of the set; the cause that has ended the messages; std::system_error if there is no thread.
  Request post(MessageSpec spec);

  /// Ends all requests, and refuses later ones. Not from a MessageSpec's `received`.
  void close();

 private:
  /// The news for the thread.
  struct Inbox {
    std::vector<Request> posted;
    std::vector<std::pair<int, std::string>> departures;  // rank of the set, why
    bool connected = false;
    std::optional<Error> cause;  // that has ended the messages; never reset
  };

  void start();
  void run();
  Inbox take_inbox();
  Error cause();
  bool end(const Error& cause);
  void wake() const;
  void pause(const MessageProtocol& protocol) const;
  void check(const MessageSpec& spec) const;

  void on_lost(int rank, const std::string& how) override;
  void on_departed(int rank, std::optional<std::uint64_t> rounds, const std::string& why) override;
  void on_failed(int rank, ErrorKind kind, const std::string& why) override;
  void on_connected() override;

  ControlPlane& plane_;
  const std::uint64_t set_;
  const std::vector<int> members_;
  const MessagesWorld world_;
  const Fd wake_;

  std::mutex life_;  // guards the thread's beginning and end; taken before mutex_
  bool closed_ = false;

  std::mutex mutex_;  // guards the members below
  Inbox inbox_;

  std::thread thread_;
};

}  // namespace torch_ring
