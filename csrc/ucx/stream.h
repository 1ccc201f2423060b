// SPDX-License-Identifier: Apache-2.0
// UcxStream: a connection's stream over UCX. UcxNetwork: the streams of a communicator.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "transport/handshake.h"
#include "transport/network.h"
#include "ucx/worker.h"

namespace torch_ring::ucx {

/// The greeting of one end:
///
///   u32 kMagic | u32 bytes of the address | u64 tag | proof | address of its worker
///
/// The tag is random: no message of another connection, process set or job has it. The proof is an
/// HMAC-SHA256, under the world's key, of both ranks and the other fields. UCX itself authenticates
/// nothing: messages without such a tag are ignored.
///
/// Messages have at most kPieceBytes and the tag of the end that receives them; UCX delivers them
/// in the order of sending. A receive is posted only for a message that has arrived, with a known
/// length: into the lent bytes if it fits there. So after a peer's death no posted receive waits
/// for ever.
///
/// A message that UCX reports as sent may still lie in its buffers until the next progress(): over
/// tcp the last 8 KiB. So a message is done when the peer has acknowledged it, and no progress() is
/// needed between exchanges.
///
/// The socket is the sign of life: when it ends, the peer has ended the connection, or has died. An
/// endpoint also fails when the peer has given up an exchange, for which the control plane reports
/// the cause. So an error of the endpoint alone counts only after kGrace.
class UcxStream final : public NetworkStream {
 public:
  static constexpr std::size_t kPieceBytes = 256u << 10;  // in the cache when they are reduced

  /// `worker` and `socket` outlive it. `own`: this rank.
  UcxStream(Worker& worker, const Key& key, int own, int socket, int rank, std::string peer);
  ~UcxStream() override;
  UcxStream(const UcxStream&) = delete;
  UcxStream& operator=(const UcxStream&) = delete;

  std::span<const std::byte> greeting() const override { return greeting_; }
  std::span<std::byte> greeting_room() override;
  void greeted(std::size_t bytes) override;
  std::size_t send(std::span<const std::byte> bytes) override;
  std::size_t receive(std::span<std::byte> bytes) override;
  std::size_t unacknowledged() const override { return outgoing_.size() - acknowledged_; }
  void acknowledged(std::size_t messages) override { acknowledged_ += messages; }
  std::size_t take_received() override { return std::exchange(received_, 0); }
  void abandon() noexcept override;

 private:
  struct Head {
    std::uint32_t magic = 0;
    std::uint32_t bytes = 0;
    std::uint64_t tag = 0;
    Sha256 proof{};
  };
  struct Outgoing {
    StatusPointer request = nullptr;
    std::size_t bytes = 0;
  };
  struct Incoming {
    StatusPointer request = nullptr;
    std::size_t left = 0;           // bytes not yet given to the caller
    std::vector<std::byte> buffer;  // empty: the message is received into lent bytes
    bool is_counted = false;        // in received_
  };

  Sha256 proof_of(const Head& head, std::span<const std::byte> address, int from, int to) const;
  void connect();
  void close() noexcept;
  bool has_ended(StatusPointer& request);
  bool socket_has_ended() const;
  void check(bool is_over) const;
  void begin_to_receive(std::span<std::byte> bytes);
  std::size_t take(std::span<std::byte> bytes);
  void note(Status error);
  [[noreturn]] void throw_lost(const std::string& how) const;

  Worker& worker_;
  const Api& api_;
  const Key key_;
  const int own_;
  const int socket_;
  const int rank_;
  const std::string peer_;
  std::uint64_t own_tag_ = 0;
  std::vector<std::byte> greeting_;

  Head head_;  // of the peer's greeting
  std::vector<std::byte> address_;
  std::size_t greeted_ = 0;      // bytes of both
  Endpoint endpoint_ = nullptr;  // null before it is needed, and after abandon()
  Status error_ = kOk;           // of the endpoint; kCanceled after abandon()
  Clock::time_point error_time_;
  bool is_peers_error_ = false;

  std::deque<Outgoing> outgoing_;
  std::size_t under_way_ = 0;     // bytes of them
  std::size_t acknowledged_ = 0;  // of them
  std::deque<Incoming> incoming_;
  std::size_t received_ = 0;  // messages since take_received()
};

/// Makes its worker with the first stream. Thread, errors: Network's.
class UcxNetwork final : public Network {
 public:
  /// `own`: this rank. `key`: the world's.
  UcxNetwork(Api api, const Key& key, int own) : api_(std::move(api)), key_(key), own_(own) {}

  std::unique_ptr<NetworkStream> stream(int socket, int rank, const std::string& peer) override {
    if (!worker_) worker_.emplace(api_);
    return std::make_unique<UcxStream>(*worker_, key_, own_, socket, rank, peer);
  }
  bool arm() override { return !worker_ || worker_->arm(); }
  int fd() const override { return worker_ ? worker_->fd() : -1; }

 private:
  const Api api_;
  const Key key_;
  const int own_;
  std::optional<Worker> worker_;
};

}  // namespace torch_ring::ucx
