// SPDX-License-Identifier: Apache-2.0
#include "transport/openssl.h"

#include <dlfcn.h>

#include <array>

#include "core/error.h"
#include "core/symbols.h"

namespace torch_ring::openssl {

namespace {

constexpr std::array kSonames{"libssl.so.3", "libssl.so.1.1"};
constexpr const char* kNeeded = "OpenSSL 1.1.1b or newer, which TORCH_RING_TLS needs";
constexpr unsigned long kOldest = 0x1010102f;  // 1.1.1b

void* open() {
  for (const char* name : kSonames) {
    if (void* loaded = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  }
  std::string why;
  for (const char* name : kSonames) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
    if (why.empty()) why = dlerror();
  }
  throw Error(ErrorKind::kInvalidArgument,
              std::string("TORCH_RING_TLS needs OpenSSL 1.1.1b or newer, and it cannot be "
                          "loaded: ") +
                  why);
}

Api loaded() {
  void* library = open();
  const Symbols symbols(library, "SSL_new", "libssl", kNeeded);
  Api api{};
  api.path = symbols.path();
  unsigned long (*version_number)() = nullptr;
  const char* (*version)(int) = nullptr;
  symbols.get(version_number, "OpenSSL_version_num");
  symbols.get(version, "OpenSSL_version");
  api.version = version(0);
  if (version_number() < kOldest) symbols.fail("is " + api.version);

  symbols.get(api.method, "TLS_method");
  symbols.get(api.ctx_new, "SSL_CTX_new");
  symbols.get(api.ctx_free, "SSL_CTX_free");
  symbols.get(api.ctx_ctrl, "SSL_CTX_ctrl");
  symbols.get(api.ctx_set_ciphersuites, "SSL_CTX_set_ciphersuites");
  symbols.get(api.ctx_set_options, "SSL_CTX_set_options");
  symbols.get(api.ctx_set_num_tickets, "SSL_CTX_set_num_tickets");
  symbols.get(api.ctx_set_find_session, "SSL_CTX_set_psk_find_session_callback");
  symbols.get(api.ctx_set_use_session, "SSL_CTX_set_psk_use_session_callback");
  symbols.get(api.make, "SSL_new");
  symbols.get(api.free, "SSL_free");
  symbols.get(api.set_ex_data, "SSL_set_ex_data");
  symbols.get(api.get_ex_data, "SSL_get_ex_data");
  symbols.get(api.set_bio, "SSL_set_bio");
  symbols.get(api.set_default_read_buffer_len, "SSL_set_default_read_buffer_len");
  symbols.get(api.set_verify, "SSL_set_verify");
  symbols.get(api.set_connect_state, "SSL_set_connect_state");
  symbols.get(api.set_accept_state, "SSL_set_accept_state");
  symbols.get(api.do_handshake, "SSL_do_handshake");
  symbols.get(api.read_ex, "SSL_read_ex");
  symbols.get(api.write_ex, "SSL_write_ex");
  symbols.get(api.has_pending, "SSL_has_pending");
  symbols.get(api.get_error, "SSL_get_error");
  symbols.get(api.key_update, "SSL_key_update");
  symbols.get(api.session_reused, "SSL_session_reused");
  symbols.get(api.get_current_cipher, "SSL_get_current_cipher");
  symbols.get(api.session_new, "SSL_SESSION_new");
  symbols.get(api.session_free, "SSL_SESSION_free");
  symbols.get(api.session_set1_master_key, "SSL_SESSION_set1_master_key");
  symbols.get(api.session_set_cipher, "SSL_SESSION_set_cipher");
  symbols.get(api.session_set_protocol_version, "SSL_SESSION_set_protocol_version");
  symbols.get(api.cipher_find, "SSL_CIPHER_find");
  symbols.get(api.cipher_name, "SSL_CIPHER_get_name");
  symbols.get(api.bio_meth_new, "BIO_meth_new");
  symbols.get(api.bio_meth_set_write, "BIO_meth_set_write");
  symbols.get(api.bio_meth_set_read, "BIO_meth_set_read");
  symbols.get(api.bio_meth_set_ctrl, "BIO_meth_set_ctrl");
  symbols.get(api.bio_new, "BIO_new");
  symbols.get(api.bio_set_data, "BIO_set_data");
  symbols.get(api.bio_get_data, "BIO_get_data");
  symbols.get(api.bio_set_init, "BIO_set_init");
  symbols.get(api.bio_set_flags, "BIO_set_flags");
  symbols.get(api.bio_clear_flags, "BIO_clear_flags");
  symbols.get(api.err_clear_error, "ERR_clear_error");
  symbols.get(api.err_peek_error, "ERR_peek_error");
  symbols.get(api.err_reason_error_string, "ERR_reason_error_string");
  return api;
}

}  // namespace

const Api& load() {
  static const Api& api = *new Api(loaded());  // threads may use it while the process exits
  return api;
}

}  // namespace torch_ring::openssl
