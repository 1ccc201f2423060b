# SPDX-License-Identifier: Apache-2.0
"""TlsStream: TLS 1.3 over a connected socket, from a key that both ends have.

As between ranks (csrc/transport/tls.h): a pre-shared key with an ephemeral exchange (psk_dhe_ke),
no certificates, no tickets. The launcher has no native module, and Python's `ssl` takes pre-shared
keys from 3.13 on only; so OpenSSL is called through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import hmac
import importlib.util
import socket
import time
from typing import Any

from torch_ring.errors import InvalidArgumentError

__all__ = ["TlsStream", "load_openssl"]

# Constants of <openssl/ssl.h>, the same in 1.1.1 and 3.
_TLS13 = 0x0304
_CONTROL_LEAST_VERSION = 123
_ERROR_NONE, _ERROR_WANT_READ = 0, 2

_OLDEST = 0x1010102F  # 1.1.1b
_CIPHER = b"TLS_AES_128_GCM_SHA256"
_IDENTITY = b"torch_ring membership\0"  # as a text of C
_INFO = b"torch_ring membership tls "
_RECORD_BYTES = 1 << 14
_LEAST_WAIT_S = 0.001  # 0 would mean: do not wait

_P, _I, _U = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_UsePsk = ctypes.PYFUNCTYPE(_U, _P, _P, _P, _U, _P, _U)  # ssl, hint, identity, room, psk, room
_FindPsk = ctypes.PYFUNCTYPE(_U, _P, _P, _P, _U)  # ssl, identity, psk, room
_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # the type of the result, then those of the arguments
    "OpenSSL_version_num": (ctypes.c_ulong,),
    "TLS_method": (_P,),
    "SSL_CTX_new": (_P, _P),
    "SSL_CTX_ctrl": (ctypes.c_long, _P, _I, ctypes.c_long, _P),
    "SSL_CTX_set_ciphersuites": (_I, _P, ctypes.c_char_p),
    "SSL_CTX_set_num_tickets": (_I, _P, ctypes.c_size_t),
    "SSL_new": (_P, _P),
    "SSL_free": (None, _P),
    "SSL_set_bio": (None, _P, _P, _P),
    "SSL_set_psk_client_callback": (None, _P, _UsePsk),
    "SSL_set_psk_server_callback": (None, _P, _FindPsk),
    "SSL_set_connect_state": (None, _P),
    "SSL_set_accept_state": (None, _P),
    "SSL_do_handshake": (_I, _P),
    "SSL_session_reused": (_I, _P),
    "SSL_read": (_I, _P, _P, _I),
    "SSL_write": (_I, _P, ctypes.c_char_p, _I),
    "SSL_get_error": (_I, _P, _I),
    "BIO_s_mem": (_P,),
    "BIO_new": (_P, _P),
    "BIO_read": (_I, _P, _P, _I),
    "BIO_write": (_I, _P, ctypes.c_char_p, _I),
    "ERR_clear_error": (None,),
    "ERR_peek_error": (ctypes.c_ulong,),
    "ERR_reason_error_string": (ctypes.c_char_p, ctypes.c_ulong),
}


@functools.cache
def load_openssl() -> Any:
    """Return the functions of the OpenSSL that Python's `ssl` uses, or else of the system's.

    They keep the interpreter's lock: they do not wait, and the process cannot exit, where OpenSSL
    frees its memory, while a daemon thread is in one of them.

    Raises:
        InvalidArgumentError: there is none, or none that is new enough.
    """
    spec = importlib.util.find_spec("_ssl")
    for file in (spec.origin if spec else None, "libssl.so.3", "libssl.so.1.1"):
        if file is None:
            continue
        try:
            openssl = ctypes.PyDLL(file)
            for name, (result, *arguments) in _FUNCTIONS.items():
                function = getattr(openssl, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError):
            continue
        if openssl.OpenSSL_version_num() >= _OLDEST:
            return openssl
    raise InvalidArgumentError(
        "TORCH_RING_TLS needs OpenSSL 1.1.1b or newer, and this host has none: install it (Debian: "
        "libssl3)"
    )


@functools.cache
def _context() -> int:
    """Return the SSL_CTX of all connections."""
    openssl = load_openssl()
    context: int | None = openssl.SSL_CTX_new(openssl.TLS_method())
    if (
        context is None
        or openssl.SSL_CTX_ctrl(context, _CONTROL_LEAST_VERSION, _TLS13, None) != 1
        or openssl.SSL_CTX_set_ciphersuites(context, _CIPHER) != 1
        or openssl.SSL_CTX_set_num_tickets(context, 0) != 1
    ):
        raise MemoryError("SSL_CTX_new of OpenSSL")
    return context


class TlsStream:
    """One end of a TLS connection over a socket, which its owner keeps open and closes.

    The constructor shakes hands. The end of the stream is that of the socket: each message of
    torch_ring has a length.

    Thread: one. Blocking: each call, for the socket's timeout. Errors: OSError.

    Args:
        connection: a connected socket.
        key: the key of the job.
        name: the accepting end, as both ends know it: nobody can redirect a connection.
        accepts: whether this end has accepted the connection.
    """

    def __init__(self, connection: socket.socket, key: bytes, name: str, *, accepts: bool) -> None:
        openssl = self._openssl = load_openssl()
        self._connection = connection
        ssl = self._ssl = openssl.SSL_new(_context())
        self._received, self._records = [openssl.BIO_new(openssl.BIO_s_mem()) for _ in "rw"]
        if not (ssl and self._received and self._records):
            raise MemoryError("SSL_new of OpenSSL")
        openssl.SSL_set_bio(ssl, self._received, self._records)  # it frees them
        # HKDF-Expand (RFC 5869) to one block
        psk = hmac.new(key, _INFO + name.encode() + b"\1", hashlib.sha256).digest()

        def find(_ssl: int, _identity: int, psk_at: int, _room: int) -> int:
            ctypes.memmove(psk_at, psk, len(psk))
            return len(psk)

        def use(_ssl: int, _hint: int, identity: int, _most: int, psk_at: int, room: int) -> int:
            ctypes.memmove(identity, _IDENTITY, len(_IDENTITY))
            return find(_ssl, identity, psk_at, room)

        self._callbacks = _FindPsk(find), _UsePsk(use)  # OpenSSL keeps no reference
        if accepts:
            openssl.SSL_set_psk_server_callback(ssl, self._callbacks[0])
            openssl.SSL_set_accept_state(ssl)
        else:
            openssl.SSL_set_psk_client_callback(ssl, self._callbacks[1])
            openssl.SSL_set_connect_state(ssl)
        if not self._call(openssl.SSL_do_handshake):
            raise ConnectionResetError("the peer has closed the connection")
        if openssl.SSL_session_reused(ssl) != 1:  # it has shown a certificate
            raise ConnectionAbortedError("TLS: the other end has not used the key")

    def __del__(self) -> None:
        if getattr(self, "_ssl", None):
            self._openssl.SSL_free(self._ssl)

    def recv(self, count: int) -> bytes:
        """Return 1 to `count` bytes; none: the peer has closed the connection."""
        room = ctypes.create_string_buffer(min(count, _RECORD_BYTES))
        received = self._call(self._openssl.SSL_read, room, len(room))
        return room.raw[:received]

    def sendall(self, data: bytes) -> None:
        """Send all bytes."""
        self._call(self._openssl.SSL_write, data, len(data))

    def _call(self, function: Any, *arguments: Any) -> int:
        """Return the result of a function of OpenSSL; 0: the peer has closed the connection."""
        openssl, connection = self._openssl, self._connection
        room = ctypes.create_string_buffer(_RECORD_BYTES)
        timeout_s = connection.gettimeout()
        end = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while True:
                openssl.ERR_clear_error()
                result: int = function(self._ssl, *arguments)
                error = openssl.SSL_get_error(self._ssl, result)
                reason = openssl.ERR_reason_error_string(openssl.ERR_peek_error()) or b"no reason"
                while (count := openssl.BIO_read(self._records, room, len(room))) > 0:
                    connection.sendall(room.raw[:count])  # an alert, too: it tells the reason
                if error == _ERROR_NONE:
                    return result
                if error != _ERROR_WANT_READ:
                    raise ConnectionAbortedError(f"TLS: {reason.decode()}")
                if end is not None:
                    connection.settimeout(max(_LEAST_WAIT_S, end - time.monotonic()))
                if not (data := connection.recv(_RECORD_BYTES)):
                    return 0
                openssl.BIO_write(self._received, data, len(data))
        finally:
            if connection.fileno() >= 0:
                connection.settimeout(timeout_s)
