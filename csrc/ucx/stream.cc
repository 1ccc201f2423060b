// SPDX-License-Identifier: Apache-2.0
#include "ucx/stream.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include "core/connection_lost.h"
#include "core/error.h"

namespace torch_ring::ucx {

namespace {

constexpr std::uint32_t kMagic = 0x31584355;  // "UCX1"
constexpr std::size_t kMostAddressBytes = 64u << 10;
constexpr std::size_t kMostMessages = 8;   // of a direction, under way
constexpr std::chrono::seconds kGrace{8};  // longer than a watchdog's search for a cause
constexpr std::chrono::seconds kCloseTimeout{10};
constexpr int kCloseTurns = 10'000;  // the process may have been stopped

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

std::uint64_t random_tag() {
  std::uint64_t tag = 0;
  // getrandom(2): so few bytes are never cut short.
  while (::getrandom(&tag, sizeof tag, 0) != static_cast<ssize_t>(sizeof tag)) {
    if (errno != EINTR) throw_errno("getrandom");
  }
  return tag;
}

}  // namespace

UcxStream::UcxStream(Worker& worker, const Key& key, int own, int socket, int rank,
                     std::string peer)
    : worker_(worker),
      api_(worker.api()),
      key_(key),
      own_(own),
      socket_(socket),
      rank_(rank),
      peer_(std::move(peer)),
      own_tag_(random_tag()) {
  const auto address = worker.address();
  Head head{kMagic, static_cast<std::uint32_t>(address.size()), own_tag_, {}};
  head.proof = proof_of(head, address, own_, rank_);
  const auto bytes = bytes_of(head);
  greeting_.assign(bytes.begin(), bytes.end());
  greeting_.insert(greeting_.end(), address.begin(), address.end());
}

UcxStream::~UcxStream() {
  ::shutdown(socket_, SHUT_WR);  // before the endpoint ends: the peer sees this first
  close();
}

Sha256 UcxStream::proof_of(const Head& head, std::span<const std::byte> address, int from,
                           int to) const {
  constexpr std::string_view kPurpose = "ucx";
  return hmac_sha256(key_, {std::as_bytes(std::span(kPurpose)), bytes_of(from), bytes_of(to),
                            bytes_of(head.bytes), bytes_of(head.tag), address});
}

std::span<std::byte> UcxStream::greeting_room() {
  if (greeted_ < sizeof head_) {
    return std::as_writable_bytes(std::span(&head_, 1)).subspan(greeted_);
  }
  return std::span(address_).subspan(greeted_ - sizeof head_);
}

void UcxStream::greeted(std::size_t bytes) {
  const bool had_head = greeted_ >= sizeof head_;
  greeted_ += bytes;
  if (greeted_ < sizeof head_) return;
  if (!had_head) {
    if (head_.magic != kMagic || head_.bytes == 0 || head_.bytes > kMostAddressBytes) {
      throw Error(ErrorKind::kMismatch, peer_ + " has not sent the address of its UCX worker");
    }
    address_.resize(head_.bytes);
  }
  if (greeted_ == sizeof head_ + address_.size() &&
      !equal_in_constant_time(proof_of(head_, address_, rank_, own_), head_.proof)) {
    throw Error(ErrorKind::kMismatch,
                peer_ + " does not prove that the address of its UCX is its own");
  }
}

/// Makes the endpoint, if there is none. A receiver needs one, too, to end its pending receives.
void UcxStream::connect() {
  if (endpoint_) return;
  if (error_ != kOk) {
    throw_lost(socket_has_ended() ? "closed" : "failed: an exchange was given up");
  }
  EndpointParams params;
  params.address = address_.data();
  params.argument = this;
  params.on_error = [](void* stream, Endpoint, Status status) {
    static_cast<UcxStream*>(stream)->is_peers_error_ = true;
    static_cast<UcxStream*>(stream)->note(status);
  };
  const Status status = api_.ep_create(worker_.handle(), &params, &endpoint_);
  if (status == kOk) return;
  endpoint_ = nullptr;
  if (socket_has_ended()) throw_lost("closed");
  throw Error(ErrorKind::kInternal, "no connection to " + peer_ + " over UCX " + api_.version +
                                        ": " + api_.status_string(status) +
                                        " (UCX_TLS, UCX_NET_DEVICES)");
}

std::size_t UcxStream::send(std::span<const std::byte> bytes) {
  connect();
  worker_.progress();
  std::size_t done = 0;
  while (acknowledged_ > 0 && has_ended(outgoing_.front().request)) {  // or failed
    done += outgoing_.front().bytes;
    under_way_ -= outgoing_.front().bytes;
    outgoing_.pop_front();
    --acknowledged_;
  }
  while (error_ == kOk && done + under_way_ < bytes.size() && outgoing_.size() < kMostMessages) {
    const auto rest = bytes.subspan(done + under_way_);
    const auto part = rest.first(std::min(rest.size(), kPieceBytes));
    Outgoing& message = outgoing_.emplace_back();  // first: UCX must not have an unknown one
    message.bytes = part.size();
    under_way_ += part.size();
    message.request = api_.tag_send(endpoint_, part.data(), part.size(), head_.tag, &kNoParams);
    if (is_error(message.request)) note(error_of(message.request));
  }
  if (done > 0 || bytes.empty()) return done;
  // As long as acknowledgements are due, reading them finds the end of the socket.
  const bool is_over = unacknowledged() == 0 && socket_has_ended();
  if (is_over && under_way_ > 0) {  // all of it has arrived: UCX waits for a peer that has left
    done = under_way_;
    close();
    note(kCanceled);
    return done;
  }
  check(is_over);
  return 0;
}

std::size_t UcxStream::receive(std::span<std::byte> bytes) {
  connect();
  worker_.progress();
  begin_to_receive(bytes);
  std::size_t done = take(bytes);
  if (done > 0 || bytes.empty()) return done;
  const bool is_over = socket_has_ended();
  if (is_over) {
    while (worker_.progress()) {  // receive everything that has arrived
    }
    begin_to_receive(bytes);
    done = take(bytes);
  }
  if (done == 0) check(is_over);
  return done;
}

/// Returns how many of `bytes` have arrived, from the front.
std::size_t UcxStream::take(std::span<std::byte> bytes) {
  std::size_t done = 0;
  while (done < bytes.size() && !incoming_.empty() && has_ended(incoming_.front().request) &&
         !incoming_.front().request) {
    Incoming& message = incoming_.front();
    received_ += !std::exchange(message.is_counted, true);
    std::size_t taken = message.left;
    if (!message.buffer.empty()) {
      taken = std::min(taken, bytes.size() - done);
      const std::byte* end = message.buffer.data() + message.buffer.size();
      std::memcpy(bytes.data() + done, end - message.left, taken);
    }
    done += taken;
    message.left -= taken;
    if (message.left == 0) incoming_.pop_front();
  }
  return done;
}

/// Begins to receive arrived messages, until `bytes` are full.
void UcxStream::begin_to_receive(std::span<std::byte> bytes) {
  std::size_t next = 0;
  for (const Incoming& message : incoming_) next += message.left;
  while (incoming_.size() < kMostMessages && next < bytes.size()) {
    MessageInfo info;
    const Message found = api_.tag_probe(worker_.handle(), own_tag_, ~std::uint64_t{0}, 1, &info);
    if (!found) return;
    if (info.bytes == 0 || info.bytes > kPieceBytes) {
      throw Error(ErrorKind::kInternal,
                  peer_ + " sent a message of " + std::to_string(info.bytes) + " bytes over UCX");
    }
    Incoming& message = incoming_.emplace_back();  // first, as in send()
    message.left = info.bytes;
    std::byte* to = bytes.data() + next;
    if (next + info.bytes > bytes.size()) {
      message.buffer.resize(info.bytes);
      to = message.buffer.data();
    }
    message.request = api_.tag_message_receive(worker_.handle(), to, info.bytes, found, &kNoParams);
    if (is_error(message.request)) note(error_of(message.request));
    next += info.bytes;
  }
}

/// Whether a request has ended; if so, sets it to null or an error.
bool UcxStream::has_ended(StatusPointer& request) {
  if (!request || is_error(request)) return true;
  const Status status = api_.request_check_status(request);
  if (status == kInProgress) return false;
  api_.request_free(request);
  request = pointer_of(status);
  if (status != kOk) note(status);
  return true;
}

bool UcxStream::socket_has_ended() const {
  pollfd end{socket_, POLLRDHUP, 0};
  return ::poll(&end, 1, 0) > 0;
}

/// Throws if the peer has ended the connection, or if the endpoint failed kGrace ago.
void UcxStream::check(bool is_over) const {
  if (is_over) throw_lost("closed");
  if (error_ == kOk || Clock::now() < error_time_ + kGrace) return;
  if (is_peers_error_) throw_lost(std::string("failed: ") + api_.status_string(error_));
  throw Error(ErrorKind::kInternal,
              "UCX of this rank fails with data of " + peer_ + ": " + api_.status_string(error_));
}

void UcxStream::abandon() noexcept {
  if (outgoing_.empty() && incoming_.empty()) return;
  close();
  note(kCanceled);
}

/// Closes the endpoint, and waits until UCX uses no memory of messages any more, which no peer can
/// delay.
void UcxStream::close() noexcept {
  if (!endpoint_) return;
  RequestParams force;
  force.fields = RequestParams::kFlags;
  force.flags = RequestParams::kForce;
  const StatusPointer closing = api_.ep_close(std::exchange(endpoint_, nullptr), &force);
  const auto deadline = Clock::now() + kCloseTimeout;
  const auto finish = [&](StatusPointer request) {
    if (!request || is_error(request)) return;
    for (int turn = 0; api_.request_check_status(request) == kInProgress; ++turn) {
      worker_.progress();
      if (turn > kCloseTurns && Clock::now() > deadline) {
        std::fprintf(stderr,
                     "torch_ring: UCX %s does not give back the memory of a message to %s. To go "
                     "on would damage data.\n",
                     api_.version.c_str(), peer_.c_str());
        std::abort();
      }
    }
    api_.request_free(request);
  };
  finish(closing);
  for (const Outgoing& message : outgoing_) finish(message.request);
  for (const Incoming& message : incoming_) finish(message.request);
  outgoing_.clear();
  incoming_.clear();
  under_way_ = acknowledged_ = 0;
}

void UcxStream::note(Status error) {
  if (error_ != kOk) return;
  error_ = error;
  error_time_ = Clock::now();
}

void UcxStream::throw_lost(const std::string& how) const {
  throw ConnectionLost(rank_, "connection to " + peer_ + ' ' + how);
}

}  // namespace torch_ring::ucx
