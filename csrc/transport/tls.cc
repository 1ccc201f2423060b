// SPDX-License-Identifier: Apache-2.0
#include "transport/tls.h"

#include <sys/socket.h>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <string_view>
#include <utility>

#include "core/error.h"

namespace torch_ring {

namespace {

// The most bytes that are encrypted before the socket gets them: four records.
constexpr std::size_t kBatchBytes = 64u << 10;

constexpr const char* kAesFirst = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr const char* kChachaFirst = "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_GCM_SHA256";
constexpr const char* kGroups = "X25519:P-256";
constexpr std::byte kIsOpen{'W'};
constexpr std::array<unsigned char, 2> kAes128{0x13, 0x01};  // a cipher with SHA-256

bool has_aes() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
  constexpr unsigned long kBoth = HWCAP_AES | HWCAP_PMULL;
  return (::getauxval(AT_HWCAP) & kBoth) == kBoth;
#else
  return false;
#endif
}

/// The identity of a pre-shared key.
struct Identity {
  std::array<char, 8> magic{'t', '-', 'r', 'i', 'n', 'g', '/', '5'};
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint64_t set = 0;
  std::uint32_t channel = 0;
  std::uint32_t zero = 0;
};
static_assert(sizeof(Identity) == 32);

[[noreturn]] void fail(const openssl::Api& api, const char* call) {
  const char* reason = api.err_reason_error_string(api.err_peek_error());
  throw Error(ErrorKind::kInternal, std::string(call) + " of " + api.version +
                                        (reason ? std::string(": ") + reason : ""));
}

}  // namespace

TlsContext::TlsContext(const Key& key, std::uint64_t update_bytes)
    : api_(openssl::load()), key_(key), update_bytes_(update_bytes) {
  api_.err_clear_error();
  context_ = api_.ctx_new(api_.method());
  if (!context_) fail(api_, "SSL_CTX_new");
  const bool is_set =
      api_.ctx_ctrl(context_, openssl::kControlLeastVersion, openssl::kTls13, nullptr) == 1 &&
      api_.ctx_ctrl(context_, openssl::kControlMostVersion, openssl::kTls13, nullptr) == 1 &&
      api_.ctx_ctrl(context_, openssl::kControlGroups, 0, const_cast<char*>(kGroups)) == 1 &&
      api_.ctx_set_ciphersuites(context_, has_aes() ? kAesFirst : kChachaFirst) == 1 &&
      api_.ctx_set_num_tickets(context_, 0) == 1;
  if (!is_set) {
    api_.ctx_free(context_);
    fail(api_, "SSL_CTX_new");
  }
  api_.ctx_set_options(context_, openssl::kServerPreference | openssl::kPrioritizeChacha);
  api_.ctx_ctrl(context_, openssl::kControlMode, openssl::kModeReleaseBuffers, nullptr);
  api_.ctx_ctrl(context_, openssl::kControlReadAhead, 1, nullptr);
  api_.ctx_ctrl(context_, openssl::kControlSessionCache, 0, nullptr);  // off
  api_.ctx_set_find_session(context_, TlsStream::find_session);
  api_.ctx_set_use_session(context_, TlsStream::use_session);
}

TlsContext::~TlsContext() { api_.ctx_free(context_); }

TlsStream::TlsStream(std::shared_ptr<const TlsContext> context, int fd, const Hello& hello)
    : context_(std::move(context)), api_(context_->api_), fd_(fd), hello_(hello) {
  api_.err_clear_error();
  openssl::BioMethod* const method = bio_method(api_);
  ssl_ = api_.make(context_->context_);
  if (!ssl_) fail(api_, "SSL_new");
  openssl::Bio* const bio = api_.bio_new(method);
  if (!bio) {
    api_.free(ssl_);
    fail(api_, "BIO_new");
  }
  api_.bio_set_data(bio, this);
  api_.bio_set_init(bio, 1);
  api_.set_bio(ssl_, bio, bio);
  api_.set_ex_data(ssl_, 0, this);
}

TlsStream::~TlsStream() { api_.free(ssl_); }

std::unique_ptr<TlsStream> TlsStream::connecting(std::shared_ptr<const TlsContext> context, int fd,
                                                 const Hello& hello) {
  std::unique_ptr<TlsStream> stream(new TlsStream(std::move(context), fd, hello));
  const Identity identity{
      .from = hello.from, .to = hello.to, .set = hello.set, .channel = hello.channel};
  const auto bytes = std::as_bytes(std::span(&identity, 1));
  stream->identity_.assign(bytes.begin(), bytes.end());
  stream->api_.set_verify(stream->ssl_, openssl::kVerifyPeer, nullptr);  // no certificate is good
  stream->api_.set_connect_state(stream->ssl_);
  return stream;
}

std::unique_ptr<TlsStream> TlsStream::accepting(std::shared_ptr<const TlsContext> context, int fd,
                                                std::uint32_t rank) {
  std::unique_ptr<TlsStream> stream(new TlsStream(std::move(context), fd, Hello{.to = rank}));
  stream->api_.set_accept_state(stream->ssl_);
  return stream;
}

int TlsStream::shake_hands() {
  const int error = is_open_ ? 0 : advance();
  if (error != 0) return error;
  return flush() ? 0 : failed_;
}

/// Advances a handshake that is not done. Returns as shake_hands().
int TlsStream::advance() {
  api_.err_clear_error();
  std::byte welcome = kIsOpen;
  std::size_t bytes = 0;
  int done = has_agreed_ ? 1 : api_.do_handshake(ssl_);
  if (done == 1 && !has_agreed_) {
    // Without the key OpenSSL might have agreed on a certificate.
    if (api_.session_reused(ssl_) != 1) refuse();
    has_agreed_ = true;
  }
  if (done == 1) {
    done = is_connecting() ? api_.read_ex(ssl_, &welcome, 1, &bytes)
                           : api_.write_ex(ssl_, &welcome, 1, &bytes);
  }
  if (done == 1) {
    if (welcome != kIsOpen) refuse();
    api_.set_default_read_buffer_len(ssl_, kBatchBytes);  // strangers get less
    is_open_ = true;
    return 0;
  }
  const int error = api_.get_error(ssl_, done);
  if (has_ended_ || failed_ != 0) return failed_ != 0 ? failed_ : ECONNRESET;
  if (error == openssl::kErrorWantRead) return 0;
  flush();  // the alert, by which the other end knows the reason
  refuse();
}

/// Throws the reason for which OpenSSL has ended the handshake.
void TlsStream::refuse() const {
  const unsigned long code = api_.err_peek_error();
  const char* const text = api_.err_reason_error_string(code);
  const std::string why = text ? std::string(": ") + text : "";
  const int alert = static_cast<int>(code & 0xfff) - openssl::kAlertReasons;
  api_.err_clear_error();
  // The alerts of a wrong proof: that of OpenSSL, and that of RFC 8446.
  if (is_connecting() &&
      (alert == openssl::kAlertIllegalParameter || alert == openssl::kAlertDecryptError)) {
    throw other_secret(hello_);
  }
  throw Error(ErrorKind::kPeerLost, "the other end is no rank of this job" + why);
}

std::string TlsStream::cipher() const {
  const openssl::Cipher* const cipher = api_.get_current_cipher(ssl_);
  const std::string_view name = cipher ? api_.cipher_name(cipher) : "";
  return name.find("CHACHA20") != std::string_view::npos ? "ChaCha20-Poly1305" : "AES-128-GCM";
}

ssize_t TlsStream::send(std::span<const std::byte> bytes) {
  if (sealed_ > bytes.size()) {
    throw Error(ErrorKind::kInternal, "fewer bytes are to be sent than are encrypted already");
  }
  std::size_t done = 0;
  while (!is_damaged_ && flush()) {
    done += std::exchange(sealed_, 0);
    if (done == bytes.size()) return static_cast<ssize_t>(done);
    api_.err_clear_error();
    const auto part = bytes.subspan(done, std::min(bytes.size() - done, kBatchBytes));
    if (since_update_ + part.size() > context_->update_bytes_) {
      api_.key_update(ssl_, openssl::kKeyUpdateNotRequested);  // goes before the next record
      since_update_ = 0;
    }
    std::size_t written = 0;
    if (api_.write_ex(ssl_, part.data(), part.size(), &written) != 1) {
      failed_ = EPROTO;
      break;
    }
    sealed_ = written;
    since_update_ += written;
  }
  if (done > 0) return static_cast<ssize_t>(done);
  errno = is_damaged_ ? EBADMSG : failed_ != 0 ? failed_ : EAGAIN;
  return -1;
}

ssize_t TlsStream::receive(std::span<std::byte> bytes) {
  std::size_t done = 0;
  may_have_more_ = true;
  while (done < bytes.size() && !is_damaged_) {
    std::size_t part = 0;
    api_.err_clear_error();
    if (api_.read_ex(ssl_, bytes.data() + done, bytes.size() - done, &part) == 1) {
      done += part;
      continue;
    }
    may_have_more_ = false;
    const int kind = api_.get_error(ssl_, 0);
    if (kind == openssl::kErrorWantRead) break;
    if (has_ended_ || failed_ != 0 || kind == openssl::kErrorZeroReturn) {
      if (done > 0) return static_cast<ssize_t>(done);
      errno = failed_;
      return failed_ != 0 ? -1 : 0;
    }
    const bool is_alert = (api_.err_peek_error() & 0xfff) >= openssl::kAlertReasons;
    api_.err_clear_error();
    if (is_alert) {
      failed_ = ECONNRESET;  // the peer has ended it, and says why
      break;
    }
    is_damaged_ = true;
  }
  if (done > 0 || bytes.empty()) return static_cast<ssize_t>(done);
  errno = is_damaged_ ? EBADMSG : failed_ != 0 ? failed_ : EAGAIN;
  return -1;
}

bool TlsStream::has_received() const { return may_have_more_ && api_.has_pending(ssl_) == 1; }

/// Sends the records that the socket takes; returns whether none is left.
bool TlsStream::flush() {
  while (sent_ < records_.size() && failed_ == 0) {
    const auto taken =
        ::send(fd_, records_.data() + sent_, records_.size() - sent_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (taken >= 0) {
      sent_ += static_cast<std::size_t>(taken);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return false;
    } else if (errno != EINTR) {
      failed_ = errno;
    }
  }
  if (failed_ != 0) return false;
  records_.clear();
  sent_ = 0;
  return true;
}

// --- the functions that OpenSSL calls

openssl::BioMethod* TlsStream::bio_method(const openssl::Api& api) {
  static openssl::BioMethod* const method = [&] {
    openssl::BioMethod* made = api.bio_meth_new(openssl::kBioSourceSink, "torch_ring");
    if (!made) fail(api, "BIO_meth_new");
    api.bio_meth_set_write(made, write);
    api.bio_meth_set_read(made, read);
    api.bio_meth_set_ctrl(made, control);
    return made;
  }();
  return method;
}

int TlsStream::write(openssl::Bio* bio, const char* bytes, int count) {
  auto& stream = *static_cast<TlsStream*>(openssl::load().bio_get_data(bio));
  const auto part = std::as_bytes(std::span(bytes, static_cast<std::size_t>(count)));
  try {
    stream.records_.insert(stream.records_.end(), part.begin(), part.end());
  } catch (const std::bad_alloc&) {
    stream.failed_ = ENOMEM;
    return -1;
  }
  return count;
}

int TlsStream::read(openssl::Bio* bio, char* room, int count) {
  const openssl::Api& api = openssl::load();
  auto& stream = *static_cast<TlsStream*>(api.bio_get_data(bio));
  api.bio_clear_flags(bio, openssl::kBioRead | openssl::kBioRetry);
  ssize_t received;
  do {
    received = ::recv(stream.fd_, room, static_cast<std::size_t>(count), MSG_DONTWAIT);
  } while (received < 0 && errno == EINTR);
  if (received > 0) return static_cast<int>(received);
  if (received == 0) {
    stream.has_ended_ = true;
  } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
    api.bio_set_flags(bio, openssl::kBioRead | openssl::kBioRetry);
  } else {
    stream.failed_ = errno;
  }
  return received == 0 ? 0 : -1;
}

long TlsStream::control(openssl::Bio* /*bio*/, int command, long /*number*/, void* /*pointer*/) {
  return command == openssl::kBioFlush ? 1 : 0;
}

/// The session of an identity, with its pre-shared key; null if there is no memory.
openssl::Session* TlsStream::session_of(std::span<const std::byte> identity) const {
  // HKDF-Expand(key, "torch_ring tls psk" + identity, 32 bytes)
  static constexpr std::string_view kInfo = "torch_ring tls psk";
  constexpr std::byte kFirst{1};
  const Sha256 psk = hmac_sha256(
      context_->key_, {std::as_bytes(std::span(kInfo)), identity, std::span(&kFirst, 1)});
  openssl::Session* const session = api_.session_new();
  const openssl::Cipher* const cipher = api_.cipher_find(ssl_, kAes128.data());
  if (!session || !cipher) {
    if (session) api_.session_free(session);
    return nullptr;
  }
  api_.session_set1_master_key(session, reinterpret_cast<const unsigned char*>(psk.data()),
                               psk.size());
  api_.session_set_cipher(session, cipher);
  api_.session_set_protocol_version(session, openssl::kTls13);
  return session;
}

int TlsStream::find_session(openssl::Ssl* ssl, const unsigned char* identity, std::size_t bytes,
                            openssl::Session** session) {
  auto& stream = *static_cast<TlsStream*>(openssl::load().get_ex_data(ssl, 0));
  *session = nullptr;
  Identity found;
  if (bytes != sizeof found) return 1;  // a stranger: without a key there is nothing to agree on
  std::memcpy(&found, identity, sizeof found);
  const std::uint32_t rank = stream.hello_.to;
  if (found.magic != Identity().magic || found.zero != 0 || found.to != rank ||
      found.from == rank) {
    return 1;
  }
  stream.hello_ = {found.from, found.to, found.set, found.channel};
  *session = stream.session_of(std::as_bytes(std::span(identity, bytes)));
  return *session != nullptr;
}

int TlsStream::use_session(openssl::Ssl* ssl, const evp_md_st* /*digest*/,
                           const unsigned char** identity, std::size_t* bytes,
                           openssl::Session** session) {
  auto& stream = *static_cast<TlsStream*>(openssl::load().get_ex_data(ssl, 0));
  *identity = reinterpret_cast<const unsigned char*>(stream.identity_.data());
  *bytes = stream.identity_.size();
  *session = stream.session_of(stream.identity_);
  return *session != nullptr;
}

}  // namespace torch_ring
