// SPDX-License-Identifier: Apache-2.0
// The declarations in csrc/transport/openssl.h agree with OpenSSL's headers: it is only compiled.
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <type_traits>

#include "transport/openssl.h"

namespace torch_ring::openssl {

static_assert(kTls13 == TLS1_3_VERSION);
static_assert(kErrorWantRead == SSL_ERROR_WANT_READ);
static_assert(kErrorZeroReturn == SSL_ERROR_ZERO_RETURN);
static_assert(kVerifyPeer == SSL_VERIFY_PEER);
static_assert(kKeyUpdateNotRequested == SSL_KEY_UPDATE_NOT_REQUESTED);
static_assert(kControlMode == SSL_CTRL_MODE && kControlReadAhead == SSL_CTRL_SET_READ_AHEAD);
static_assert(kControlSessionCache == SSL_CTRL_SET_SESS_CACHE_MODE && SSL_SESS_CACHE_OFF == 0);
static_assert(kControlLeastVersion == SSL_CTRL_SET_MIN_PROTO_VERSION);
static_assert(kModeReleaseBuffers == SSL_MODE_RELEASE_BUFFERS);
static_assert(kServerPreference == SSL_OP_CIPHER_SERVER_PREFERENCE);
static_assert(kPrioritizeChacha == SSL_OP_PRIORITIZE_CHACHA);
static_assert(kBioSourceSink == BIO_TYPE_SOURCE_SINK && kBioFlush == BIO_CTRL_FLUSH);
static_assert(kBioRead == BIO_FLAGS_READ && kBioRetry == BIO_FLAGS_SHOULD_RETRY);
static_assert(kControlMostVersion == SSL_CTRL_SET_MAX_PROTO_VERSION);
static_assert(kControlGroups == SSL_CTRL_SET_GROUPS_LIST);
static_assert(kAlertIllegalParameter == SSL3_AD_ILLEGAL_PARAMETER);
static_assert(kAlertDecryptError == TLS1_AD_DECRYPT_ERROR);
static_assert(kAlertReasons == SSL_AD_REASON_OFFSET);

#define SAME(member, function) \
  static_assert(std::is_same_v<decltype(Api::member), decltype(&function)>)
SAME(method, TLS_method);
SAME(ctx_new, SSL_CTX_new);
SAME(ctx_free, SSL_CTX_free);
SAME(ctx_ctrl, SSL_CTX_ctrl);
SAME(ctx_set_ciphersuites, SSL_CTX_set_ciphersuites);
SAME(ctx_set_options, SSL_CTX_set_options);
SAME(ctx_set_num_tickets, SSL_CTX_set_num_tickets);
SAME(ctx_set_find_session, SSL_CTX_set_psk_find_session_callback);
SAME(ctx_set_use_session, SSL_CTX_set_psk_use_session_callback);
SAME(make, SSL_new);
SAME(set_default_read_buffer_len, SSL_set_default_read_buffer_len);
SAME(session_free, SSL_SESSION_free);
SAME(free, SSL_free);
SAME(set_ex_data, SSL_set_ex_data);
SAME(get_ex_data, SSL_get_ex_data);
SAME(set_bio, SSL_set_bio);
SAME(set_connect_state, SSL_set_connect_state);
SAME(set_accept_state, SSL_set_accept_state);
SAME(do_handshake, SSL_do_handshake);
SAME(read_ex, SSL_read_ex);
SAME(write_ex, SSL_write_ex);
SAME(has_pending, SSL_has_pending);
SAME(get_error, SSL_get_error);
SAME(key_update, SSL_key_update);
SAME(session_reused, SSL_session_reused);
SAME(get_current_cipher, SSL_get_current_cipher);
SAME(session_new, SSL_SESSION_new);
SAME(session_set1_master_key, SSL_SESSION_set1_master_key);
SAME(session_set_cipher, SSL_SESSION_set_cipher);
SAME(session_set_protocol_version, SSL_SESSION_set_protocol_version);
SAME(cipher_find, SSL_CIPHER_find);
SAME(cipher_name, SSL_CIPHER_get_name);
SAME(bio_meth_new, BIO_meth_new);
SAME(bio_meth_set_write, BIO_meth_set_write);
SAME(bio_meth_set_read, BIO_meth_set_read);
SAME(bio_meth_set_ctrl, BIO_meth_set_ctrl);
SAME(bio_new, BIO_new);
SAME(bio_set_data, BIO_set_data);
SAME(bio_get_data, BIO_get_data);
SAME(bio_set_init, BIO_set_init);
SAME(bio_set_flags, BIO_set_flags);
SAME(bio_clear_flags, BIO_clear_flags);
SAME(err_clear_error, ERR_clear_error);
SAME(err_peek_error, ERR_peek_error);
SAME(err_reason_error_string, ERR_reason_error_string);

}  // namespace torch_ring::openssl
