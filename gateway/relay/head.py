"""HTTP/1.1 heads: which headers pass on, which end here, and what is too ambiguous to forward.

llhttp has read the head before anything here sees it, and has refused bare LF, folded lines, blanks before a colon,
doubled or non-numeric Content-Length, and Content-Length beside Transfer-Encoding. What it accepts and a proxy must not
is refused here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from enum import Enum
from random import getrandbits
from typing import Final
from urllib.parse import unquote

import msgspec

from gateway.errors import BadRequest, HeadTooLarge

Header = tuple[bytes, bytes]

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 256

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"upgrade",
    }
)
_WRITTEN_BY_US: Final = frozenset(
    {b"content-length", b"expect", b"host", b"trailer", b"transfer-encoding", b"x-request-id"}
)
_READ_FROM_REQUEST: Final = _HOP_BY_HOP | _WRITTEN_BY_US
_DROPPED_FROM_RESPONSE: Final = _HOP_BY_HOP | {b"x-request-id"}
_NEVER_NOMINATED: Final = frozenset({b"", b"close", b"content-length", b"keep-alive", b"transfer-encoding", b"upgrade"})
_INTERNAL: Final = b"x-kvway-"

_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_DOT_SEGMENT: Final = re.compile(r"[/\\]\.{1,2}([/\\]|$)")
_LOCATION: Final = re.compile(rb"(\r\nlocation:[ \t]*)(?:https?:)?//([^/?#\s]*)([^\r]*)", re.IGNORECASE)
_ABSOLUTE_FORM: Final = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)


class RequestHead(msgspec.Struct):
    """A request's head, as far as forwarding it needs it.

    Attributes:
        method: as the client wrote it.
        target: path and query, raw.
        path: the target without its query, decoded.
        fields: the header lines that go on to the worker, each with its CRLF.
        content_length: announced body length, 0 where there is none, None for a chunked body.
        request_id: the client's X-Request-Id, or a new one.
        keep_alive: whether the client's connection outlives the response.
        http10: the client speaks HTTP/1.0 and cannot read chunked bodies.
        expects_continue: the client waits for ``100 Continue`` before it sends the body.
    """

    method: bytes = b""
    target: bytes = b""
    path: str = ""
    fields: bytes = b""
    content_length: int | None = 0
    request_id: str = ""
    keep_alive: bool = False
    http10: bool = False
    expects_continue: bool = False

    def for_worker(self, host: bytes, body_length: int, own_fields: bytes = b"") -> bytes:
        """Return the head to send to the worker at ``host``, with a body of ``body_length`` bytes.

        ``own_fields`` are header lines that this worker gets besides; they win over the client's.
        """
        length = b""
        if body_length or self.content_length is None or self.method in (b"POST", b"PUT", b"PATCH"):
            length = b"content-length: %d\r\n" % body_length
        return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%b%bx-request-id: %b\r\n\r\n" % (
            self.method,
            self.target,
            host,
            own_fields,
            self.fields,
            length,
            self.request_id.encode(),
        )


def field_lines(fields: Mapping[str, str]) -> bytes:
    """Return the header lines of a request of our own, each with its CRLF."""
    return "".join([f"{name}: {value}\r\n" for name, value in fields.items()]).encode()


def read_request_head(
    method: bytes, target: bytes, version: str, headers: list[Header], keep_alive: bool
) -> RequestHead:
    """Read a head that llhttp has accepted.

    Args:
        method: as the client wrote it.
        target: in origin form.
        version: ``1.1``, or what else the client claims to speak.
        headers: names in lower case.
        keep_alive: whether the client's connection may outlive the response.

    Raises:
        BadRequest: the head could mean one thing to us and another to the worker.
    """
    kept: list[bytes] = []
    read: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _READ_FROM_REQUEST:
            read[name] = read[name] + b"," + value if name in read else value
        elif not name.startswith(_INTERNAL):
            kept += (name, b": ", value, b"\r\n")
    http10 = version == "1.0"
    connection = read.get(b"connection")
    if connection is not None and (nominated := _nominated(connection)):
        kept = [b"%b: %b\r\n" % header for header in headers if _passes_on(header[0], nominated)]
    content_length: int | None = int(read.get(b"content-length", 0))
    if (coding := read.get(b"transfer-encoding")) is not None:
        _check_transfer_coding(coding, http10)
        content_length = None
    _check_host(read.get(b"host"), version)
    request_id = read.get(b"x-request-id")
    return RequestHead(
        method=method,
        target=target,
        path=_path(target),
        fields=b"".join(kept),
        content_length=content_length,
        request_id=new_request_id() if request_id is None else _safe_request_id(request_id),
        keep_alive=keep_alive and not http10,
        http10=http10,
        expects_continue=b"expect" in read and not http10 and read[b"expect"].strip().lower() == b"100-continue",
    )


def check_head_size(target: bytes, headers: list[Header], received: int) -> None:
    """Check the size of a request's head.

    Args:
        target: as the client wrote it.
        headers: all of them.
        received: bytes of reads that brought nothing else.

    Raises:
        HeadTooLarge: it is above a limit.
    """
    size = len(target) + sum(len(name) + len(value) + 4 for name, value in headers)
    if max(size, received) > MAX_HEAD_BYTES or len(headers) > MAX_HEADERS:
        raise head_too_large()


def head_too_large() -> HeadTooLarge:
    """Return what is said about a request's head above a limit."""
    return HeadTooLarge(f"The request head is above {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers.")


def head_without_upgrade(method: bytes, target: bytes, version: str, headers: list[Header]) -> bytes:
    """Return a request's head, as a client that offers no other protocol would have sent it."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version.encode(), b"".join(lines))


def new_request_id() -> str:
    """Return a random id of 32 hex digits."""
    return f"{getrandbits(128):032x}"


def _safe_request_id(value: bytes) -> str:
    """Return a client's id, or a new one where it could hurt a log or a header."""
    value = value.strip()
    return value.decode("ascii") if _REQUEST_ID.fullmatch(value) else new_request_id()


def _passes_on(name: bytes, nominated: set[bytes]) -> bool:
    return name not in _READ_FROM_REQUEST and name not in nominated and not name.startswith(_INTERNAL)


def _nominated(connection: bytes) -> set[bytes]:
    """Return the headers that ``Connection`` declares to be for the next hop only; never those that frame the body."""
    return {token.strip().lower() for token in connection.split(b",")} - _NEVER_NOMINATED


def _check_transfer_coding(coding: bytes, http10: bool) -> None:
    if http10:
        raise BadRequest("Transfer-Encoding is not part of HTTP/1.0; send Content-Length.")
    if coding.strip().lower() != b"chunked":
        raise BadRequest(f"Transfer-Encoding {coding.decode('latin-1')!r} is not supported; use 'chunked'.")


def _check_host(host: bytes | None, version: str) -> None:
    if version not in ("1.0", "1.1"):
        raise BadRequest(f"HTTP/{version} is not spoken here; use HTTP/1.1.")
    if host is None and version == "1.1":
        raise BadRequest("The Host header is missing.")
    if host is not None and b"," in host:
        raise BadRequest("There is more than one Host header.")


def origin_form(target: bytes) -> bytes:
    """Return a request target as path and query, without scheme and authority.

    Raises:
        BadRequest: it has no path: ``*``, or the authority of a CONNECT.
    """
    if target.startswith(b"/"):
        return target
    path, absolute = _ABSOLUTE_FORM.subn(b"", target, count=1)
    if not absolute or not path.startswith(b"/"):
        raise BadRequest(f"The request target {target[:200].decode('latin-1')!r} is not a path.")
    return path


def _path(target: bytes) -> str:
    """Return the path of a target, as engines read it: with what is percent-encoded decoded.

    Raises:
        BadRequest: a fragment, or a path that a worker may read as another one.
    """
    path = target.partition(b"?")[0].decode("ascii", "replace")
    if "%" in path:
        path = unquote(path)
    if b"#" in target or ("." in path and _DOT_SEGMENT.search(path)):
        raise BadRequest(f"The request target {path[:200]!r} contains a fragment or a dot segment.")
    return path


class Framing(Enum):
    """How the end of a response's body is found."""

    NONE = "none"  # the response has no body
    LENGTH = "length"
    CHUNKED = "chunked"
    UNTIL_CLOSE = "until-close"


class ResponseHead(msgspec.Struct):
    """A worker's response head.

    Attributes:
        status: HTTP status.
        raw: the head's bytes, up to and including the empty line.
        fields: values by name, both in lower case, blanks around values included; of repeated headers the last.
        framing: how the body ends.
        is_event_stream: the body is an SSE stream that can be read in passing.
        is_readable: the same, or JSON.
        reframed: the body passes in whole chunks of our own, not as the worker cut it.
    """

    status: int
    raw: bytes
    fields: dict[bytes, bytes]
    framing: Framing
    is_event_stream: bool
    is_readable: bool
    reframed: bool = False

    @property
    def retry_after_s(self) -> float:
        """``Retry-After`` in seconds from now, given as such or as a date; 0 where it is absent."""
        value = self.fields.get(b"retry-after", b"").strip()
        if value.isdigit():
            return float(value)
        try:
            return max(0.0, parsedate_to_datetime(value.decode("latin-1")).timestamp() - time.time())
        except ValueError:
            return 0.0

    def for_client(self, added: bytes, dechunked: bool = False) -> bytes:
        """Return the head to send to the client: the worker's lines as they came, hop-by-hop ones left out.

        Args:
            added: our own header lines, each with its CRLF.
            dechunked: the body is sent without its chunked framing.
        """
        dropped = _DROPPED_FROM_RESPONSE | {b"transfer-encoding", b"trailer"} if dechunked else _DROPPED_FROM_RESPONSE
        if dropped.isdisjoint(self.fields):
            return b"".join((b"HTTP/1.1", self.raw[8:-2], added, b"\r\n"))
        dropped |= _nominated(self.fields.get(b"connection", b""))
        status_line, *lines = self.raw[:-4].split(b"\r\n")
        kept = [line for line in lines if line.partition(b":")[0].lower() not in dropped]
        return b"\r\n".join((b"HTTP/1.1" + status_line[8:], *kept, added + b"\r\n"))


def read_response_head(raw: bytes, status: int, to_head_request: bool, host: bytes) -> ResponseHead:
    """Read a response head that llhttp has accepted.

    Args:
        raw: the head's bytes, up to and including the empty line.
        status: its status.
        to_head_request: it answers a HEAD request, so no body follows whatever it announces.
        host: the ``Host`` the request was sent to; a redirect to it is made relative.
    """
    if 300 <= status < 400:
        raw = _LOCATION.sub(lambda location: _relative_location(location, host), raw)
    lines = raw[:-4].lower().split(b"\r\n")
    fields = dict([line.split(b":", 1) for line in lines[1:]])
    if to_head_request or status in (204, 304):
        framing = Framing.NONE
    elif (coding := fields.get(b"transfer-encoding")) is not None:
        framing = Framing.CHUNKED if coding.rpartition(b",")[2].strip() == b"chunked" else Framing.UNTIL_CLOSE
    else:
        framing = Framing.LENGTH if b"content-length" in fields else Framing.UNTIL_CLOSE
    content_type = fields.get(b"content-type", b"").lstrip()
    plain = b"content-encoding" not in fields
    is_event_stream = plain and content_type.startswith(b"text/event-stream")
    is_readable = is_event_stream or (plain and content_type.startswith(b"application/json"))
    return ResponseHead(status, raw, fields, framing, is_event_stream, is_readable)


def _relative_location(location: re.Match[bytes], host: bytes) -> bytes:
    """Return a ``Location`` line without the worker's address: clients cannot reach it, and need not know it."""
    name, authority, target = location.groups()
    if authority.lower() != host.lower():
        return location[0]
    if not target.startswith(b"/"):
        return name + b"/" + target
    # A path of two slashes would be read as the name of another host.
    return name + (b"/." if target[1:2] in (b"/", b"\\") else b"") + target
