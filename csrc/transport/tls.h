// SPDX-License-Identifier: Apache-2.0
// TLS 1.3 between two ranks, from the key of their world: TlsContext, TlsStream.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/handshake.h"
#include "transport/openssl.h"

namespace torch_ring {

/// The TLS of a world's connections: version 1.3, with a pre-shared key and an ephemeral key
/// exchange (RFC 8446, psk_dhe_ke), so that a secret that leaks later opens no recorded traffic.
/// There are no certificates, tickets or early data.
///
/// The identity that a connecting rank sends in the clear is its Hello; the pre-shared key is
/// HKDF-Expand (RFC 5869) of the world's key and that Hello. So a handshake is of no use under
/// another name, and a recording of none at all: both ends contribute random numbers.
/// The cipher is AES-128-GCM, or ChaCha20-Poly1305 if either end lacks instructions for AES.
///
/// Thread: any. Blocking: no. Errors: those of openssl::load(); Error(kInternal) if OpenSSL fails.
class TlsContext {
 public:
  /// `update_bytes`: after so many bytes a stream takes a new key. AES-GCM is safe for 2^24.5 full
  /// records of a key (RFC 8446, 5.5), which are 390 GB.
  explicit TlsContext(const Key& key, std::uint64_t update_bytes = std::uint64_t{64} << 30);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

 private:
  friend class TlsStream;

  const openssl::Api& api_;
  const Key key_;
  const std::uint64_t update_bytes_;
  openssl::Context* context_ = nullptr;
};

/// One end of a TLS connection over a non-blocking socket, which its owner keeps open.
///
/// The accepting end sends a byte when it is open, and the connecting one is open when it has
/// received that: so neither uses a connection that the other has given up.
///
/// Received records wait here, and poll() does not tell: so receive until there is no more before
/// you poll. Records that the socket has not taken count as not sent: the next send() begins with
/// the same bytes.
///
/// The end of the stream is that of the socket. Nobody needs TLS's own, because every message of
/// torch_ring has a length, and a goodbye is a message.
///
/// Thread: one at a time. Blocking: no.
class TlsStream {
 public:
  /// As the connecting rank `hello.from`, or as the accepting rank. The context outlives it.
  static std::unique_ptr<TlsStream> connecting(std::shared_ptr<const TlsContext> context, int fd,
                                               const Hello& hello);
  static std::unique_ptr<TlsStream> accepting(std::shared_ptr<const TlsContext> context, int fd,
                                              std::uint32_t rank);
  ~TlsStream();
  TlsStream(const TlsStream&) = delete;
  TlsStream& operator=(const TlsStream&) = delete;

  /// Advances the handshake as far as the socket allows. Returns 0, or the errno with which the
  /// connection has ended. Errors: Error(kMismatch) on the connecting side if the other end has
  /// another key; Error(kPeerLost), with OpenSSL's reason, if it is no rank of this job.
  int shake_hands();
  bool is_open() const noexcept { return is_open_; }
  /// Whether it waits for room in the socket; otherwise it waits for bytes.
  bool sends() const noexcept { return sent_ < records_.size(); }
  /// The connection's name; on the accepting side only after is_open().
  const Hello& hello() const noexcept { return hello_; }
  /// "AES-128-GCM"
  std::string cipher() const;

  /// As send(2) and recv(2). EBADMSG, from then on: a record is damaged, or a stranger has made it.
  /// Errors: Error(kInternal) if send() gets fewer bytes than are encrypted already.
  ssize_t send(std::span<const std::byte> bytes);
  ssize_t receive(std::span<std::byte> bytes);
  /// Whether received bytes may wait here: the last receive() has not taken all.
  bool has_received() const;

 private:
  TlsStream(std::shared_ptr<const TlsContext> context, int fd, const Hello& hello);

  bool flush();
  bool is_connecting() const noexcept { return !identity_.empty(); }
  int advance();
  [[noreturn]] void refuse() const;

  // The functions that OpenSSL calls, for the bytes on the wire and for the pre-shared key.
  static openssl::BioMethod* bio_method(const openssl::Api& api);
  static int write(openssl::Bio* bio, const char* bytes, int count);
  static int read(openssl::Bio* bio, char* room, int count);
  static long control(openssl::Bio* bio, int command, long number, void* pointer);
  static int find_session(openssl::Ssl* ssl, const unsigned char* identity, std::size_t bytes,
                          openssl::Session** session);
  static int use_session(openssl::Ssl* ssl, const evp_md_st* digest, const unsigned char** identity,
                         std::size_t* bytes, openssl::Session** session);
  friend class TlsContext;

  openssl::Session* session_of(std::span<const std::byte> identity) const;

  const std::shared_ptr<const TlsContext> context_;
  const openssl::Api& api_;
  const int fd_;
  Hello hello_;                      // on the accepting side at first only `to`: its own rank
  std::vector<std::byte> identity_;  // on the connecting side
  openssl::Ssl* ssl_ = nullptr;
  bool has_agreed_ = false;  // OpenSSL's handshake is done
  bool is_open_ = false;
  bool has_ended_ = false;          // the peer sends no more
  bool is_damaged_ = false;         // a received record was not acceptable
  bool may_have_more_ = true;       // received bytes
  int failed_ = 0;                  // errno of the socket
  std::vector<std::byte> records_;  // to be sent
  std::size_t sent_ = 0;            // of records_
  std::size_t sealed_ = 0;          // bytes of the caller in records_
  std::uint64_t since_update_ = 0;  // bytes encrypted with the present key
};

}  // namespace torch_ring
