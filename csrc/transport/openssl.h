// SPDX-License-Identifier: Apache-2.0
// The part of OpenSSL that torch_ring uses: loaded at run time, so that nothing is needed to build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/symbols.h"

// OpenSSL's own names of its types: the functions are called, never defined.
extern "C" {
struct ssl_st;
struct ssl_ctx_st;
struct ssl_method_st;
struct ssl_session_st;
struct ssl_cipher_st;
struct bio_st;
struct bio_method_st;
struct evp_md_st;
}

namespace torch_ring::openssl {

using Ssl = ssl_st;
using Context = ssl_ctx_st;
using Session = ssl_session_st;
using Cipher = ssl_cipher_st;
using Bio = bio_st;
using BioMethod = bio_method_st;

/// Constants of <openssl/ssl.h>, <openssl/tls1.h> and <openssl/bio.h>, the same in 1.1.1 and 3;
/// tests/world/openssl_check.cc compares them with the headers.
inline constexpr int kTls13 = 0x0304;                           // TLS1_3_VERSION
inline constexpr int kErrorWantRead = 2;                        // SSL_ERROR_WANT_READ
inline constexpr int kErrorZeroReturn = 6;                      // SSL_ERROR_ZERO_RETURN
inline constexpr int kVerifyPeer = 1;                           // SSL_VERIFY_PEER
inline constexpr int kKeyUpdateNotRequested = 0;                // SSL_KEY_UPDATE_NOT_REQUESTED
inline constexpr int kControlMode = 33;                         // SSL_CTRL_MODE
inline constexpr int kControlSessionCache = 44;                 // SSL_CTRL_SET_SESS_CACHE_MODE
inline constexpr int kControlReadAhead = 41;                    // SSL_CTRL_SET_READ_AHEAD
inline constexpr int kControlMostVersion = 124;                 // SSL_CTRL_SET_MAX_PROTO_VERSION
inline constexpr int kControlGroups = 92;                       // SSL_CTRL_SET_GROUPS_LIST
inline constexpr int kControlLeastVersion = 123;                // SSL_CTRL_SET_MIN_PROTO_VERSION
inline constexpr long kModeReleaseBuffers = 0x10;               // SSL_MODE_RELEASE_BUFFERS
inline constexpr std::uint64_t kServerPreference = 0x00400000;  // SSL_OP_CIPHER_SERVER_PREFERENCE
inline constexpr std::uint64_t kPrioritizeChacha = 0x00200000;  // SSL_OP_PRIORITIZE_CHACHA
inline constexpr int kBioSourceSink = 0x0400;                   // BIO_TYPE_SOURCE_SINK
inline constexpr int kBioFlush = 11;                            // BIO_CTRL_FLUSH
inline constexpr int kBioRead = 0x01;                           // BIO_FLAGS_READ
inline constexpr int kBioRetry = 0x08;                          // BIO_FLAGS_SHOULD_RETRY
inline constexpr int kAlertIllegalParameter = 47;               // SSL3_AD_ILLEGAL_PARAMETER
inline constexpr int kAlertDecryptError = 51;                   // TLS1_AD_DECRYPT_ERROR
inline constexpr int kAlertReasons = 1000;                      // SSL_AD_REASON_OFFSET

using FindSession = int (*)(Ssl*, const unsigned char* identity, std::size_t bytes, Session**);
using UseSession = int (*)(Ssl*, const evp_md_st*, const unsigned char** identity,
                           std::size_t* bytes, Session**);

/// The functions, by their names without SSL_; see the manual pages of OpenSSL.
struct Api {
  Symbols symbols;
  std::string version;
  std::string path = symbols.path();

  const ssl_method_st* (*method)() = symbols["TLS_method"];
  Context* (*ctx_new)(const ssl_method_st*) = symbols["SSL_CTX_new"];
  void (*ctx_free)(Context*) = symbols["SSL_CTX_free"];
  long (*ctx_ctrl)(Context*, int command, long number, void* pointer) = symbols["SSL_CTX_ctrl"];
  int (*ctx_set_ciphersuites)(Context*, const char*) = symbols["SSL_CTX_set_ciphersuites"];
  std::uint64_t (*ctx_set_options)(Context*, std::uint64_t) =
      symbols["SSL_CTX_set_options"];  // unsigned long in 1.1.1
  int (*ctx_set_num_tickets)(Context*, std::size_t) = symbols["SSL_CTX_set_num_tickets"];
  void (*ctx_set_find_session)(Context*,
                               FindSession) = symbols["SSL_CTX_set_psk_find_session_callback"];
  void (*ctx_set_use_session)(Context*,
                              UseSession) = symbols["SSL_CTX_set_psk_use_session_callback"];

  Ssl* (*make)(Context*) = symbols["SSL_new"];
  void (*free)(Ssl*) = symbols["SSL_free"];
  int (*set_ex_data)(Ssl*, int, void*) = symbols["SSL_set_ex_data"];
  void* (*get_ex_data)(const Ssl*, int) = symbols["SSL_get_ex_data"];
  void (*set_bio)(Ssl*, Bio* read, Bio* write) = symbols["SSL_set_bio"];
  void (*set_default_read_buffer_len)(Ssl*,
                                      std::size_t) = symbols["SSL_set_default_read_buffer_len"];
  void (*set_verify)(Ssl*, int mode, int (*)(int, void*)) = symbols["SSL_set_verify"];
  void (*set_connect_state)(Ssl*) = symbols["SSL_set_connect_state"];
  void (*set_accept_state)(Ssl*) = symbols["SSL_set_accept_state"];
  int (*do_handshake)(Ssl*) = symbols["SSL_do_handshake"];
  int (*read_ex)(Ssl*, void*, std::size_t, std::size_t*) = symbols["SSL_read_ex"];
  int (*write_ex)(Ssl*, const void*, std::size_t, std::size_t*) = symbols["SSL_write_ex"];
  int (*has_pending)(const Ssl*) = symbols["SSL_has_pending"];
  int (*get_error)(const Ssl*, int) = symbols["SSL_get_error"];
  int (*key_update)(Ssl*, int) = symbols["SSL_key_update"];
  int (*session_reused)(const Ssl*) = symbols["SSL_session_reused"];
  const Cipher* (*get_current_cipher)(const Ssl*) = symbols["SSL_get_current_cipher"];

  Session* (*session_new)() = symbols["SSL_SESSION_new"];
  void (*session_free)(Session*) = symbols["SSL_SESSION_free"];
  int (*session_set1_master_key)(Session*, const unsigned char*,
                                 std::size_t) = symbols["SSL_SESSION_set1_master_key"];
  int (*session_set_cipher)(Session*, const Cipher*) = symbols["SSL_SESSION_set_cipher"];
  int (*session_set_protocol_version)(Session*, int) = symbols["SSL_SESSION_set_protocol_version"];
  const Cipher* (*cipher_find)(Ssl*, const unsigned char*) = symbols["SSL_CIPHER_find"];
  const char* (*cipher_name)(const Cipher*) = symbols["SSL_CIPHER_get_name"];

  BioMethod* (*bio_meth_new)(int type, const char* name) = symbols["BIO_meth_new"];
  int (*bio_meth_set_write)(BioMethod*,
                            int (*)(Bio*, const char*, int)) = symbols["BIO_meth_set_write"];
  int (*bio_meth_set_read)(BioMethod*, int (*)(Bio*, char*, int)) = symbols["BIO_meth_set_read"];
  int (*bio_meth_set_ctrl)(BioMethod*,
                           long (*)(Bio*, int, long, void*)) = symbols["BIO_meth_set_ctrl"];
  Bio* (*bio_new)(const BioMethod*) = symbols["BIO_new"];
  void (*bio_set_data)(Bio*, void*) = symbols["BIO_set_data"];
  void* (*bio_get_data)(Bio*) = symbols["BIO_get_data"];
  void (*bio_set_init)(Bio*, int) = symbols["BIO_set_init"];
  void (*bio_set_flags)(Bio*, int) = symbols["BIO_set_flags"];
  void (*bio_clear_flags)(Bio*, int) = symbols["BIO_clear_flags"];

  void (*err_clear_error)() = symbols["ERR_clear_error"];
  unsigned long (*err_peek_error)() = symbols["ERR_peek_error"];
  const char* (*err_reason_error_string)(unsigned long) = symbols["ERR_reason_error_string"];
};

/// Returns the OpenSSL that this process has loaded, as Python's `ssl` does, or else the system's.
/// It is never unloaded. Thread: any. Errors: Error(kInvalidArgument) if there is none, or an older
/// one than 1.1.1b, which ends a connection after 32 new keys.
const Api& load();

}  // namespace torch_ring::openssl
