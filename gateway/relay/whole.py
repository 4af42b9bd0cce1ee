"""An answer to a request of our own that is read as a whole, and not passed on."""

from __future__ import annotations

import asyncio

from gateway.relay.head import ResponseHead
from gateway.relay.retry import Failure, FailureKind
from gateway.relay.upstream import Upstream


class WholeAnswer:
    """A worker's answer as it arrives; a ``Receiver``. Whoever asks calls ``expect``, and then sends the request.

    Args:
        max_bytes: bound on the body; beyond it the answer is given up.

    Attributes:
        head: of the answer, None before it has come.
        body: so far, without framing.
    """

    __slots__ = ("_max_bytes", "_outcome", "_upstream", "body", "head")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._upstream: Upstream | None = None
        self._outcome: asyncio.Future[Failure | None]
        self.head: ResponseHead | None = None
        self.body = bytearray()

    @property
    def status(self) -> int:
        """Status of the answer, 0 without one."""
        return 0 if self.head is None else self.head.status

    def expect(self, upstream: Upstream) -> asyncio.Future[Failure | None]:
        """Expect it over a connection; return what tells how it has ended."""
        self._upstream = upstream
        self._outcome = asyncio.get_running_loop().create_future()
        return self._outcome

    def drop(self) -> None:
        """Give it up, unless it is complete."""
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None

    def on_upstream_head(self, head: ResponseHead) -> None:
        """Its head."""
        self.head = head

    def on_upstream_payload(self, payload: bytes) -> None:
        """A piece of its body."""
        self.body += payload

    def on_upstream_data(self, data: bytes) -> None:
        """The same with its framing."""
        if len(self.body) > self._max_bytes:
            self.drop()
            self._resolve(Failure(FailureKind.MALFORMED, f"answered with more than {self._max_bytes} bytes"))

    def on_upstream_end(self) -> None:
        """It is complete."""
        self._upstream = None
        self._resolve(None)

    def on_upstream_lost(self, failure: Failure) -> None:
        """It ended before that."""
        self._upstream = None
        self._resolve(failure)

    def _resolve(self, failure: Failure | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result(failure)
