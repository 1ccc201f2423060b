// SPDX-License-Identifier: Apache-2.0
#include "messages/message_protocol.h"

#include <algorithm>
#include <utility>

#include "core/at.h"
#include "core/connection_lost.h"

namespace torch_ring {

namespace {

bool fits(const MessageSpec& receive, const Arrival& arrival) {
  return receive.tag == arrival.frame.tag &&
         receive.peer.value_or(arrival.source) == arrival.source;
}

}  // namespace

Mailbox::Receive Mailbox::arrive(Arrival&& arrival) {
  const auto found = std::ranges::find_if(
      receives_, [&](const Receive& receive) { return fits(receive->spec(), arrival); });
  if (found == receives_.end()) {
    arrivals_.push_back(std::move(arrival));
    return nullptr;
  }
  Receive receive = std::move(*found);
  receives_.erase(found);
  return receive;
}

std::optional<Arrival> Mailbox::post(const Receive& receive) {
  const auto found = std::ranges::find_if(
      arrivals_, [&](const Arrival& arrival) { return fits(receive->spec(), arrival); });
  if (found == arrivals_.end()) {
    receives_.push_back(receive);
    return std::nullopt;
  }
  Arrival arrival = std::move(*found);
  arrivals_.erase(found);
  return arrival;
}

namespace {

using Kind = MessageFrame::Kind;

// For a silent peer. A peer that leaves or dies closes its connections; the news of it, with the
// cause, arrives within this time even over a lossy network.
constexpr std::chrono::seconds kCauseGrace{5};

// For a peer that has answered: a leaving rank closes its messages before it says goodbye.
constexpr std::chrono::milliseconds kGoodbyeGrace{250};

// Deadlines of ended requests are dropped when there are more deadlines than this, or than twice
// those of pending requests.
constexpr std::size_t kLeastDue = 64;

std::string part(DType dtype, std::uint64_t bytes, int tag) {
  return std::string(name_of(dtype)) + ", " + std::to_string(bytes) + " bytes, tag " +
         std::to_string(tag);
}

/// Takes out the requests with a peer.
template <class Requests>
auto take_of(Requests& requests, int peer) {
  std::vector<std::shared_ptr<MessageRequest>> taken;
  std::erase_if(requests, [&](const auto& item) {
    if (item.first.first != peer) return false;
    taken.push_back(item.second);
    return true;
  });
  return taken;
}

}  // namespace

MessageProtocol::MessageProtocol(MessagesWorld world, std::unique_ptr<SocketSource> sending,
                                 std::unique_ptr<SocketSource> receiving)
    : world_(std::move(world)),
      sending_(std::move(sending)),
      receiving_(std::move(receiving)),
      peers_(world_.labels.size()) {
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (peer != world_.rank) stream(peer, Direction::kReceives);
  }
}

/// The connection with a peer, made when its first byte moves.
MessageStream& MessageProtocol::stream(int peer, Direction direction) {
  const bool sends = direction == Direction::kSends;
  Side& side = sends ? at(peers_, peer).sends : at(peers_, peer).receives;
  if (!side.stream) {
    side.stream.emplace(
        std::make_unique<Connection>(sends ? *sending_ : *receiving_, peer, world_.width,
                                     at(world_.labels, peer), world_.checksums),
        MessageStream::Handlers{
            [=, this](const MessageFrame& frame) { return begin_frame(peer, direction, frame); },
            [=, this](const MessageFrame& frame) { end_frame(peer, frame); }});
  }
  return *side.stream;
}

void MessageProtocol::post(const Request& request) {
  const MessageSpec& spec = request->spec();
  if (due_.size() >= most_due_) {
    std::erase_if(due_, [](const auto& item) {
      const Request pending = item.second.request.lock();
      return !pending || pending->done();
    });
    most_due_ = 2 * due_.size() + kLeastDue;
  }
  if (spec.deadline != Clock::time_point::max())
    due_.emplace(spec.deadline, Due{request, std::nullopt});
  if (world_.stall_warning.count() > 0) {
    const auto now = Clock::now();
    due_.emplace(now + world_.stall_warning, Due{request, now});
  }
  if (spec.is_send) return begin_send(request);
  if (auto arrival = mailbox_.post(request)) deliver(request, std::move(*arrival));
}

void MessageProtocol::begin_send(const Request& request) {
  const MessageSpec& spec = request->spec();
  MessageFrame frame;
  frame.dtype = spec.dtype;
  frame.tag = spec.tag;
  frame.number = ++numbers_;
  frame.bytes = spec.memory.size();
  MessageStream& to = stream(*spec.peer, Direction::kSends);
  if (frame.bytes <= MessageStream::kWholeBytes) return to.queue(frame, spec.memory, request);
  frame.kind = Kind::kOffer;
  offered_.emplace(std::pair{*spec.peer, frame.number}, request);
  to.queue(frame);
}

/// Gives a message to its matching receive.
void MessageProtocol::deliver(const Request& receive, Arrival&& arrival) {
  const MessageSpec& spec = receive->spec();
  MessageFrame answer = arrival.frame;
  const int source = arrival.source;
  if (answer.bytes > spec.memory.size() || answer.dtype != spec.dtype) {
    answer.kind = Kind::kRefuse;
    answer.asked_dtype = spec.dtype;
    answer.asked_bytes = spec.memory.size();
    stream(source, Direction::kReceives).queue(answer);
    return fail(receive, Error(ErrorKind::kMismatch, mismatch(source, world_.rank, answer)));
  }
  receive->matched(source, answer.bytes);
  if (answer.kind == Kind::kWhole) {
    std::ranges::copy(arrival.bytes, spec.memory.begin());
    return receive->finish(source, arrival.bytes.size());
  }
  accepted_.emplace(std::pair{source, answer.number}, receive);
  answer.kind = Kind::kAccept;
  stream(source, Direction::kReceives).queue(answer);
}

std::span<std::byte> MessageProtocol::begin_frame(int peer, Direction direction,
                                                  const MessageFrame& frame) {
  const auto known = [&](const auto& requests) { return requests.contains({peer, frame.number}); };
  if (direction == Direction::kSends) {
    if (frame.kind == Kind::kRefuse || (frame.kind == Kind::kAccept && known(offered_))) return {};
  } else if (frame.kind == Kind::kWhole && frame.bytes <= MessageStream::kWholeBytes) {
    at(peers_, peer).whole.resize(frame.bytes);
    return at(peers_, peer).whole;
  } else if (frame.kind == Kind::kOffer) {
    return {};
  } else if (frame.kind == Kind::kData && known(accepted_)) {
    const auto memory = accepted_.at({peer, frame.number})->spec().memory;
    if (frame.bytes <= memory.size()) return memory.first(frame.bytes);
  }
  throw Error(ErrorKind::kInternal, "rank " + std::to_string(world_.rank) + ": " +
                                        at(world_.labels, peer) +
                                        " has sent bytes that are no message");
}

void MessageProtocol::end_frame(int peer, const MessageFrame& frame) {
  switch (frame.kind) {
    case Kind::kWhole:
    case Kind::kOffer: {
      Arrival arrival{peer, frame, std::exchange(at(peers_, peer).whole, {})};
      if (const Request receive = mailbox_.arrive(std::move(arrival))) {
        deliver(receive, std::move(arrival));  // it has not been moved from
      }
      return;
    }
    case Kind::kData:
      return accepted_.extract({peer, frame.number}).mapped()->finish(peer, frame.bytes);
    case Kind::kAccept: {
      const Request send = offered_.extract({peer, frame.number}).mapped();
      send->matched(peer, send->spec().memory.size());
      MessageFrame data = frame;
      data.kind = Kind::kData;
      return stream(peer, Direction::kSends).queue(data, send->spec().memory, send);
    }
    case Kind::kRefuse:
      return refused(peer, frame);
  }
}

/// Handles a kRefuse: this rank's message does not fit the receive.
void MessageProtocol::refused(int peer, const MessageFrame& frame) {
  const std::string why = mismatch(world_.rank, peer, frame);
  const auto send = offered_.extract({peer, frame.number});
  if (send) return fail(send.mapped(), Error(ErrorKind::kMismatch, why));
  // A short message, whose send has ended already.
  if (world_.log) world_.log("rank " + std::to_string(world_.rank) + ": a message is lost: " + why);
}

void MessageProtocol::depart(int rank, const std::string& why) {
  auto& departure = at(peers_, rank).departure;
  if (!departure || departure->empty()) departure = why;
  look_ = true;  // it may have connected before
}

bool MessageProtocol::advance(Clock::time_point now) {
  bool moved = false;
  const bool look = std::exchange(look_, false);
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    Peer& it = at(peers_, peer);
    if (it.sends.stream) moved |= advance(peer, it.sends, now);
    if (it.receives.stream && it.receives.stream->is_open(look)) {
      moved |= advance(peer, it.receives, now);
    }
    settle(peer, now);
  }
  look_at_clock(now);
  return moved;
}

bool MessageProtocol::advance(int peer, Side& side, Clock::time_point now) {
  if (side.error) return false;
  bool moved = false;
  try {
    moved = side.stream->advance();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kPeerLost) throw;
    side.error = error;
    side.patience_ends = now + kCauseGrace;
    if (world_.probe) side.lives = world_.probe(peer);
  }
  for (const Request& sent : side.stream->take_sent()) sent->finish();
  if (now - side.stream->still_since() > world_.transfer_timeout) {
    throw Error(ErrorKind::kTimeout,
                "rank " + std::to_string(world_.rank) + ": a message from or to " +
                    at(world_.labels, peer) + " has not moved for " +
                    in_seconds(world_.transfer_timeout) + " (" + world_.timeout_name + ")");
  }
  return moved;
}

/// Ends the requests with a peer that is gone.
void MessageProtocol::settle(int peer, Clock::time_point now) {
  Peer& it = at(peers_, peer);
  const auto is_over = [&](const Side& side) {
    return side.error && (it.departure || now >= side.patience_ends);
  };
  const auto cause = [&](const Side& side) {
    const std::string& who = at(world_.labels, peer);
    if (!it.departure) return *side.error;
    if (!it.departure->empty()) return Error(ErrorKind::kPeerLost, who + " left: " + *it.departure);
    return Error(ErrorKind::kPeerLost, who + " has left: it called " + world_.leave + " or exited");
  };
  if (it.departure && !it.sends.error) it.sends.error = cause(it.sends);  // it takes no more
  if (is_over(it.sends)) {
    it.sends.failed = true;
    for (const Request& send : take_of(offered_, peer)) fail(send, cause(it.sends));
    if (it.sends.stream) {
      for (const Request& send : it.sends.stream->take_unsent()) fail(send, cause(it.sends));
    }
  }
  // Its earlier messages are still on their way, if it has connected.
  const bool is_silent = it.receives.stream && !it.receives.stream->is_open(false);
  if (is_over(it.receives) || (it.departure && is_silent)) {
    it.receives.failed = true;
    for (const Request& receive : take_of(accepted_, peer)) fail(receive, cause(it.receives));
    const bool is_last = nobody_left();
    const auto concerned = [&](const MessageRequest& receive) {
      return receive.spec().peer ? receive.spec().peer == peer : is_last;
    };
    for (const Request& receive : mailbox_.take(concerned)) fail(receive, cause(it.receives));
  }
  // Last: a departure that was told before the answer is known by the next call.
  for (Side* side : {&it.sends, &it.receives}) {
    if (!side->lives || !side->lives()) continue;
    side->patience_ends = now + kGoodbyeGrace;
    side->lives = nullptr;
    side->error = cut_by_network(*side->error);
  }
}

bool MessageProtocol::nobody_left() const {
  return std::ranges::all_of(
      peers_, [](const Peer& peer) { return !peer.receives.stream || peer.receives.failed; });
}

void MessageProtocol::look_at_clock(Clock::time_point now) {
  while (!due_.empty()) {
    const auto [when, due] = *due_.begin();
    const Request request = due.request.lock();
    const bool is_pending = request && !request->done();
    if (is_pending && when > now) return;
    due_.erase(due_.begin());
    if (!is_pending) continue;
    if (!due.warns_since) {
      throw Error(ErrorKind::kTimeout,
                  described(*request) + ": the other rank is late (" + world_.timeout_name + ")");
    }
    if (world_.log) {
      const auto warnings = (now - *due.warns_since) / world_.stall_warning;
      world_.log(described(*request) + " has waited for " +
                 in_seconds(warnings * world_.stall_warning));
      due_.emplace(now + world_.stall_warning, due);
    }
  }
}

void MessageProtocol::add_to(std::vector<pollfd>& fds) const {
  for (const Peer& peer : peers_) {
    for (const Side* side : {&peer.sends, &peer.receives}) {
      if (side->stream && !side->error) side->stream->add_to(fds);
    }
  }
}

Clock::time_point MessageProtocol::due() const {
  auto due = due_.empty() ? Clock::time_point::max() : due_.begin()->first;
  for (const Peer& peer : peers_) {
    for (const Side* side : {&peer.sends, &peer.receives}) {
      if (side->error && !side->failed) {
        due = std::min(due, side->lives ? Clock::now() : side->patience_ends);
      }
      if (!side->stream || side->error) continue;
      const auto still = side->stream->still_since();
      if (still != Clock::time_point::max()) due = std::min(due, still + world_.transfer_timeout);
    }
  }
  return due;
}

void MessageProtocol::fail_all(const Error& cause) {
  const auto fail_each = [&](const std::vector<Request>& requests) {
    for (const Request& request : requests) fail(request, cause);
  };
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    fail_each(take_of(offered_, peer));
    fail_each(take_of(accepted_, peer));
    if (at(peers_, peer).sends.stream) fail_each(at(peers_, peer).sends.stream->take_unsent());
  }
  fail_each(mailbox_.take([](const MessageRequest&) { return true; }));
}

/// "rank 1 (...) receives float32, 16 bytes, tag 3; rank 0 (...) sends float64, 24 bytes, tag 3"
std::string MessageProtocol::mismatch(int source, int receiver, const MessageFrame& frame) const {
  return at(world_.labels, receiver) + " receives at most " +
         part(frame.asked_dtype, frame.asked_bytes, frame.tag) + "; " + at(world_.labels, source) +
         " sends " + part(frame.dtype, frame.bytes, frame.tag);
}

void MessageProtocol::fail(const Request& request, const Error& cause) const {
  const std::string who = described(*request);
  const std::string why = cause.what();
  request->finish(Error(cause.kind(), why.starts_with(who) ? why : who + ": " + why));
}

/// "rank 0: send of float32, 16 bytes, tag 3 to rank 1 (10.0.0.7, pid 4711)"
std::string MessageProtocol::described(const MessageRequest& request) const {
  const MessageSpec& spec = request.spec();
  return "rank " + std::to_string(world_.rank) + ": " + request.describe() +
         (spec.is_send ? " to " : " from ") +
         (spec.peer ? at(world_.labels, *spec.peer) : "any rank");
}

}  // namespace torch_ring
