"""The certificate of the public port, which may be renewed while the gateway runs."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

log = logging.getLogger("kvway.serving")


class Certificate:
    """A certificate chain and its key in two files.

    Args:
        context: shows what they hold now.
        cert: PEM file.
        key: PEM file.

    Raises:
        OSError: a file is not there.
    """

    def __init__(self, context: ssl.SSLContext, cert: Path, key: Path) -> None:
        self._context = context
        self._cert = cert
        self._key = key
        self._written_at = self._look()

    async def renew(self) -> None:
        """Show clients that connect from now on what the files hold now, if that can be used."""
        try:
            written_at = self._look()
            if written_at == self._written_at:
                return
            self._written_at = written_at
            # One file may have been written, the other not yet: such a pair would spoil the context in use.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._cert, self._key)
            self._context.load_cert_chain(self._cert, self._key)
        except OSError as error:  # SSLError is one
            log.error("the certificate has changed, but cannot be used", extra={"reason": str(error)})
        else:
            log.info("the certificate has changed")

    def _look(self) -> tuple[int, int]:
        return self._cert.stat().st_mtime_ns, self._key.stat().st_mtime_ns
