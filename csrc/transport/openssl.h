// SPDX-License-Identifier: Apache-2.0
// The part of OpenSSL that torch_ring uses: loaded at run time, so that nothing is needed to build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

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
  std::string path;
  std::string version;

  const ssl_method_st* (*method)();
  Context* (*ctx_new)(const ssl_method_st*);
  void (*ctx_free)(Context*);
  long (*ctx_ctrl)(Context*, int command, long number, void* pointer);
  int (*ctx_set_ciphersuites)(Context*, const char*);
  std::uint64_t (*ctx_set_options)(Context*, std::uint64_t);  // unsigned long in 1.1.1
  int (*ctx_set_num_tickets)(Context*, std::size_t);
  void (*ctx_set_find_session)(Context*, FindSession);
  void (*ctx_set_use_session)(Context*, UseSession);

  Ssl* (*make)(Context*);
  void (*free)(Ssl*);
  int (*set_ex_data)(Ssl*, int, void*);
  void* (*get_ex_data)(const Ssl*, int);
  void (*set_bio)(Ssl*, Bio* read, Bio* write);
  void (*set_default_read_buffer_len)(Ssl*, std::size_t);
  void (*set_verify)(Ssl*, int mode, int (*)(int, void*));
  void (*set_connect_state)(Ssl*);
  void (*set_accept_state)(Ssl*);
  int (*do_handshake)(Ssl*);
  int (*read_ex)(Ssl*, void*, std::size_t, std::size_t*);
  int (*write_ex)(Ssl*, const void*, std::size_t, std::size_t*);
  int (*has_pending)(const Ssl*);
  int (*get_error)(const Ssl*, int);
  int (*key_update)(Ssl*, int);
  int (*session_reused)(const Ssl*);
  const Cipher* (*get_current_cipher)(const Ssl*);

  Session* (*session_new)();
  void (*session_free)(Session*);
  int (*session_set1_master_key)(Session*, const unsigned char*, std::size_t);
  int (*session_set_cipher)(Session*, const Cipher*);
  int (*session_set_protocol_version)(Session*, int);
  const Cipher* (*cipher_find)(Ssl*, const unsigned char*);
  const char* (*cipher_name)(const Cipher*);

  BioMethod* (*bio_meth_new)(int type, const char* name);
  int (*bio_meth_set_write)(BioMethod*, int (*)(Bio*, const char*, int));
  int (*bio_meth_set_read)(BioMethod*, int (*)(Bio*, char*, int));
  int (*bio_meth_set_ctrl)(BioMethod*, long (*)(Bio*, int, long, void*));
  Bio* (*bio_new)(const BioMethod*);
  void (*bio_set_data)(Bio*, void*);
  void* (*bio_get_data)(Bio*);
  void (*bio_set_init)(Bio*, int);
  void (*bio_set_flags)(Bio*, int);
  void (*bio_clear_flags)(Bio*, int);

  void (*err_clear_error)();
  unsigned long (*err_peek_error)();
  const char* (*err_reason_error_string)(unsigned long);
};

/// Returns the OpenSSL that this process has loaded, as Python's `ssl` does, or else the system's.
/// It is never unloaded. Thread: any. Errors: Error(kInvalidArgument) if there is none, or an older
/// one than 1.1.1b, which ends a connection after 32 new keys.
const Api& load();

}  // namespace torch_ring::openssl
