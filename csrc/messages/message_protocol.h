// SPDX-License-Identifier: Apache-2.0
// MessageProtocol: moves the messages of a rank, without its thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "messages/message_request.h"
#include "messages/message_stream.h"
#include "transport/socket_source.h"

namespace torch_ring {

/// A message that has arrived, or the offer of one.
struct Arrival {
  int source = 0;  // rank of the set
  MessageFrame frame;
  std::vector<std::byte> bytes;  // of a kWhole
};

/// Matches messages and receives, as MPI and gloo do: a message goes to the first receive of its
/// tag that takes its source's messages, a receive gets the first matching message to arrive. A
/// rank's messages with one tag arrive in the order in which they were sent, and are matched in
/// that order.
///
/// Thread: one at a time. Cost: O(waiting receives or messages).
class Mailbox {
 public:
  using Receive = std::shared_ptr<MessageRequest>;

  /// Returns the receive of a message; keeps the message if there is none.
  Receive arrive(Arrival&& arrival);

  /// Returns the message of a receive; keeps the receive if there is none.
  std::optional<Arrival> post(const Receive& receive);

  /// Takes out the receives for which `is_chosen` holds.
  template <class IsChosen>
  std::vector<Receive> take(IsChosen&& is_chosen) {
    std::vector<Receive> taken;
    std::erase_if(receives_, [&](const Receive& receive) {
      const bool chosen = is_chosen(*receive);
      if (chosen) taken.push_back(receive);
      return chosen;
    });
    return taken;
  }

 private:
  std::list<Receive> receives_;
  std::list<Arrival> arrivals_;
};

/// The settings of a rank's messages.
struct MessagesWorld {
  int rank = 0;                     // of the set
  std::vector<std::string> labels;  // rank -> "rank 2 (10.0.0.7, pid 4711)"
  std::size_t width = 1;            // sockets of a connection
  bool checksums = false;           // of the data of connections
  std::chrono::milliseconds transfer_timeout{};
  std::chrono::milliseconds stall_warning{};        // 0: never
  std::function<void(const std::string&)> log;      // takes a warning
  std::string timeout_name = "TORCH_RING_TIMEOUT";  // its name in errors
  std::string leave = "shutdown()";                 // Words::leave
  std::shared_ptr<MessageRecorder> recorder;        // null: no records
  /// Asks a rank of the set for a sign of life; the returned function tells whether it has arrived.
  /// By then all earlier news of the rank is known. Null: no probes.
  std::function<std::function<bool()>(int)> probe;
};

/// A rank has up to two connections with each other one: on one it sends messages, on the other it
/// receives them. The sender of messages makes the connection, so an any-source receive needs none.
///
/// Memory: a message without a receive is kept if it has up to MessageStream::kWholeBytes; of a
/// longer one only the offer is kept.
///
/// Thread: one at a time. Blocking: no.
/// Errors of advance(), which end all messages: Error(kTimeout) naming the request that has waited
/// for too long, or the peer that stands still; Error(kInternal). The loss of a peer is an error of
/// only the requests that need it.
class MessageProtocol {
 public:
  using Request = std::shared_ptr<MessageRequest>;

  /// `sending` and `receiving` make the two connections to a rank of the set.
  MessageProtocol(MessagesWorld world, std::unique_ptr<SocketSource> sending,
                  std::unique_ptr<SocketSource> receiving);

  /// Begins a request. Precondition: its peer is another rank of the set.
  void post(const Request& request);

  /// Call it when a peer may have connected.
  void look_for_connections() { look_ = true; }

  /// `rank` of the set has left. Its earlier messages still arrive.
  void depart(int rank, const std::string& why);

  /// Moves as much as possible now; returns whether it moved anything.
  bool advance(Clock::time_point now);

  /// The descriptors to poll before the next advance(), and the latest time for it.
  void add_to(std::vector<pollfd>& fds) const;
  Clock::time_point due() const;

  /// Ends all requests that have not ended.
  void fail_all(const Error& cause);

 private:
  enum class Direction { kSends, kReceives };  // of this rank's messages

  /// One of the two connections with a rank.
  struct Side {
    std::optional<MessageStream> stream;
    std::optional<Error> error;         // why it has ended
    Clock::time_point patience_ends{};  // until then a better cause may arrive
    std::function<bool()> lives;        // of the probe; null: answered, or not sent
    bool failed = false;                // nothing more arrives on it
  };
  struct Peer {
    Side sends;
    Side receives;
    std::optional<std::string> departure;  // why it has left
    std::vector<std::byte> whole;          // the bytes of an arriving short message
  };
  struct Due {
    std::weak_ptr<MessageRequest> request;
    std::optional<Clock::time_point> warns_since;  // none: the request fails
  };

  MessageStream& stream(int peer, Direction direction);
  void begin_send(const Request& request);
  void deliver(const Request& receive, Arrival&& arrival);
  std::span<std::byte> begin_frame(int peer, Direction direction, const MessageFrame& frame);
  void end_frame(int peer, const MessageFrame& frame);
  void refused(int peer, const MessageFrame& frame);
  bool advance(int peer, Side& side, Clock::time_point now);
  void settle(int peer, Clock::time_point now);
  bool nobody_left() const;
  void look_at_clock(Clock::time_point now);
  std::string mismatch(int source, int receiver, const MessageFrame& frame) const;
  void fail(const Request& request, const Error& cause) const;
  std::string described(const MessageRequest& request) const;

  const MessagesWorld world_;
  const std::unique_ptr<SocketSource> sending_;
  const std::unique_ptr<SocketSource> receiving_;
  std::vector<Peer> peers_;  // by rank of the set
  Mailbox mailbox_;
  bool look_ = true;                                           // for connections
  std::uint64_t numbers_ = 0;                                  // of this rank's messages
  std::map<std::pair<int, std::uint64_t>, Request> offered_;   // by peer and number
  std::map<std::pair<int, std::uint64_t>, Request> accepted_;  // likewise
  std::multimap<Clock::time_point, Due> due_;
  std::size_t most_due_ = 0;
};

}  // namespace torch_ring
