"""TLS for the S3 simulator: a certificate authority of its own, and sockets that never wait.

`openssl` makes the certificates, with RSA keys of 2048 bits as those of AWS. The port is the one of a socket: where it
would have to wait, `recv` and `sendmsg` raise BlockingIOError.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

_WAITING = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
_VALID = ("-nodes", "-newkey", "rsa:2048", "-days", "2")


class NoOpenSSL(SystemExit):
    """The command openssl is missing or failed. A script that does not catch it ends with the message."""


def certificates(directory: Path) -> tuple[Path, Path]:
    """Makes an authority and a server of 127.0.0.1: the authority's PEM, and the server's PEM with its key.

    Raises NoOpenSSL.
    """
    names = {name: directory / f"{name}.pem" for name in ("authority", "authority-key", "server", "server-key")}
    common = ("req", "-x509", *_VALID, "-subj")
    authority = ("/CN=simulated cloud", "-addext", "keyUsage=critical,keyCertSign")
    server = ("/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
    server += ("-addext", "basicConstraints=critical,CA:FALSE", "-addext", "extendedKeyUsage=serverAuth")
    signed = ("-CA", names["authority"], "-CAkey", names["authority-key"])
    _openssl(*common, *authority, "-keyout", names["authority-key"], "-out", names["authority"])
    _openssl(*common, *server, *signed, "-keyout", names["server-key"], "-out", names["server"])
    with names["server"].open("ab") as file:
        file.write(names["server-key"].read_bytes())
    return names["authority"], names["server"]


def _openssl(*arguments: str | Path) -> None:
    if not shutil.which("openssl"):
        raise NoOpenSSL("TLS needs the command openssl, version 3 or newer, which is not installed")
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoOpenSSL(f"openssl failed (it must be version 3 or newer): {done.stderr.strip()[-300:]}")


def server_context(certificate: Path) -> ssl.SSLContext:
    """The settings of a server with a PEM of certificate and key. Raises OSError if it cannot be read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


class TlsSocket:
    """A connection over TLS with the methods that the simulator calls. The handshake is part of the first `recv`."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._tls = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self.fileno, self.setsockopt, self.close = self._tls.fileno, self._tls.setsockopt, self._tls.close

    def recv(self, n_bytes: int) -> bytes:
        """Up to `n_bytes`; empty at the end. Raises BlockingIOError and OSError."""
        try:
            return self._tls.recv(n_bytes)
        except _WAITING as error:
            raise BlockingIOError from error

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Sends as much as the kernel takes now, in records of 16 KiB. Raises BlockingIOError and OSError.

        After it, the bytes that were not sent must come first: OpenSSL has already encrypted some of them.
        """
        sent = 0
        for buffer in filter(len, buffers):
            view = memoryview(buffer)
            while view:
                try:
                    n_bytes = self._tls.send(view)
                except _WAITING as error:
                    if not sent:
                        raise BlockingIOError from error
                    return sent
                sent, view = sent + n_bytes, view[n_bytes:]
        return sent

    def sendall(self, content: bytes) -> None:
        """Sends a few bytes."""
        with contextlib.suppress(BlockingIOError):
            self.sendmsg([content])
