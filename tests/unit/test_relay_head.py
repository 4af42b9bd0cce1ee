"""Heads: what passes on, what ends at the gateway, what is refused."""

from __future__ import annotations

import re
import time
from email.utils import formatdate

import pytest

from gateway.errors import BadRequest
from gateway.relay.head import Framing, RequestHead, ResponseHead, origin_form, read_request_head, read_response_head

Header = tuple[bytes, bytes]
HOST = (b"host", b"gateway")


def head(*headers: Header, target: bytes = b"/v1/chat/completions", version: str = "1.1") -> RequestHead:
    return read_request_head(b"POST", target, version, [HOST, *headers], True)


def sent(*headers: Header) -> bytes:
    return head(*headers).for_worker(b"worker:8000", 2)


def test_ordinary_headers_pass_on_in_order_with_their_duplicates() -> None:
    result = sent((b"accept", b"*/*"), (b"x-tag", b"a"), (b"authorization", b"Bearer k"), (b"x-tag", b"b"))
    assert b"accept: */*\r\nx-tag: a\r\nauthorization: Bearer k\r\nx-tag: b\r\n" in result


def test_the_worker_sees_its_own_host_and_the_length_of_what_is_sent() -> None:
    result = sent((b"content-length", b"2"))
    assert result.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nhost: worker:8000\r\n")
    assert result.count(b"host:") == result.count(b"content-length:") == 1
    assert b"content-length: 2\r\n" in result
    assert result.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    "name",
    [
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"upgrade",
        b"http2-settings",
        b"expect",
        b"x-kvway-worker",
        b"x-kvway-anything",
    ],
)
def test_hop_by_hop_and_internal_headers_end_here(name: bytes) -> None:
    assert b"\r\n" + name + b":" not in sent((name, b"value"))


def test_headers_that_connection_names_end_here() -> None:
    result = sent((b"connection", b"keep-alive, X-Secret"), (b"x-secret", b"1"), (b"x-open", b"2"))
    assert b"x-secret" not in result
    assert b"connection" not in result
    assert b"x-open: 2\r\n" in result


def test_a_request_id_is_passed_or_created() -> None:
    assert head((b"x-request-id", b"abc-1")).request_id == "abc-1"
    created = head().request_id
    assert re.fullmatch(r"[0-9a-f]{32}", created)
    assert created != head().request_id
    assert b"x-request-id: abc-1\r\n" in sent((b"x-request-id", b"abc-1"))


@pytest.mark.parametrize("value", [b"", b"a b", b"\xff", b"x" * 129, b"a\tb"])
def test_a_request_id_that_could_hurt_a_log_is_replaced(value: bytes) -> None:
    assert re.fullmatch(r"[0-9a-f]{32}", head((b"x-request-id", value)).request_id)


def test_the_trace_context_passes_untouched() -> None:
    traceparent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert b"traceparent: " + traceparent + b"\r\n" in sent((b"traceparent", traceparent))


def test_a_get_without_a_body_announces_none() -> None:
    result = read_request_head(b"GET", b"/v1/x", "1.1", [HOST], True).for_worker(b"w", 0)
    assert b"content-length" not in result


def test_a_post_without_a_body_announces_an_empty_one() -> None:
    assert b"content-length: 0\r\n" in head().for_worker(b"w", 0)


def test_a_chunked_upload_has_no_announced_length() -> None:
    assert head((b"transfer-encoding", b"Chunked")).content_length is None
    assert head((b"content-length", b"17 ")).content_length == 17
    assert head().content_length == 0


def test_expect_continue_is_for_http_1_1_only() -> None:
    assert head((b"expect", b"100-Continue")).expects_continue
    assert not head((b"expect", b"100-continue"), version="1.0").expects_continue


def test_http_1_0_connections_are_not_kept() -> None:
    old = read_request_head(b"GET", b"/v1/x", "1.0", [], True)
    assert old.http10
    assert not old.keep_alive


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip", b"chunked, chunked", b"x"])
def test_transfer_codings_other_than_chunked_are_refused(coding: bytes) -> None:
    with pytest.raises(BadRequest, match="Transfer-Encoding"):
        head((b"transfer-encoding", coding))


def test_chunked_http_1_0_requests_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"HTTP/1\.0"):
        head((b"transfer-encoding", b"chunked"), version="1.0")


@pytest.mark.parametrize("version", ["0.9", "2.0"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(version)):
        head(version=version)


def test_http_1_1_needs_one_host() -> None:
    with pytest.raises(BadRequest, match="Host"):
        read_request_head(b"GET", b"/v1/x", "1.1", [], True)
    with pytest.raises(BadRequest, match="Host"):
        head((b"host", b"other"))
    read_request_head(b"GET", b"/v1/x", "1.0", [], True)


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/../metrics",
        b"/v1/./x",
        b"/v1/%2e%2e/x",
        b"/v1/%2E./x",
        b"/v1/..",
        b"/v1/..%2Fmetrics",
        b"/v1/x%2f..%2fmetrics",
        b"/v1/x\\..\\metrics",
        b"/v1/%5c..",
        b"/v1/x#part",
        b"/v1/x?a#b",
    ],
)
def test_targets_that_could_mean_another_path_are_refused(target: bytes) -> None:
    with pytest.raises(BadRequest, match="target"):
        head(target=target)


@pytest.mark.parametrize("target", [b"/v1/a..b", b"/v1/.well-known", b"/v1/a%2f.b", b"/v1/x?path=../y", b"/v1/%20"])
def test_harmless_dots_pass(target: bytes) -> None:
    assert head(target=target).target == target


def test_the_path_is_the_target_without_its_query_as_engines_decode_it() -> None:
    assert head(target=b"/v1/chat%2Fcompletion%73").path == "/v1/chat/completions"
    assert head(target=b"/v1/embeddings?a=/b?c").path == "/v1/embeddings"


def test_an_absolute_target_becomes_a_path() -> None:
    assert origin_form(b"http://gateway:80/v1/x?y") == b"/v1/x?y"
    assert origin_form(b"/v1/x") == b"/v1/x"


@pytest.mark.parametrize("target", [b"*", b"gateway:443", b"http://gateway", b"ftp://gateway/x"])
def test_a_target_without_a_path_is_refused(target: bytes) -> None:
    with pytest.raises(BadRequest, match="not a path"):
        origin_form(target)


def response(*lines: bytes, status: int = 200, to_head: bool = False, version: bytes = b"HTTP/1.1") -> ResponseHead:
    raw = b"\r\n".join((version + b" %d Fine" % status, *lines, b"", b""))
    return read_response_head(raw, status, to_head, b"worker:8000")


def test_a_response_head_passes_as_it_came_with_ours_at_the_end() -> None:
    result = response(b"Content-LENGTH: 2", b"Set-Cookie: a", b"X-Odd:  spaced ", b"Set-Cookie: b")
    assert result.for_client(b"x-request-id: 1\r\n") == (
        b"HTTP/1.1 200 Fine\r\nContent-LENGTH: 2\r\nSet-Cookie: a\r\nX-Odd:  spaced \r\nSet-Cookie: b\r\n"
        b"x-request-id: 1\r\n\r\n"
    )


def test_the_workers_hop_by_hop_headers_end_here() -> None:
    result = response(
        b"Connection: keep-alive, X-Hop", b"Keep-Alive: timeout=5", b"X-Hop: 1", b"X-Request-Id: w", b"Server: v"
    )
    assert result.for_client(b"x-request-id: c\r\n") == b"HTTP/1.1 200 Fine\r\nServer: v\r\nx-request-id: c\r\n\r\n"


@pytest.mark.parametrize("field", [b"Content-Length: 2", b"Transfer-Encoding: chunked"])
def test_a_worker_cannot_call_the_framing_of_its_body_hop_by_hop(field: bytes) -> None:
    result = response(b"Connection: " + field.partition(b":")[0], field)
    assert result.for_client(b"") == b"HTTP/1.1 200 Fine\r\n" + field + b"\r\n\r\n"


def test_an_old_workers_version_is_not_passed_on() -> None:
    assert response(version=b"HTTP/1.0").for_client(b"").startswith(b"HTTP/1.1 200 Fine\r\n")
    assert response(b"Connection: close", version=b"HTTP/1.0").for_client(b"").startswith(b"HTTP/1.1 200 Fine\r\n")


def test_a_dechunked_response_does_not_say_it_is_chunked() -> None:
    result = response(b"Transfer-Encoding: chunked", b"Trailer: X", b"Content-Type: text/event-stream")
    assert b"Transfer-Encoding: chunked\r\n" in result.for_client(b"")
    assert result.for_client(b"", dechunked=True) == b"HTTP/1.1 200 Fine\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize(
    ("result", "framing"),
    [
        (response(b"Content-Length: 5"), Framing.LENGTH),
        (response(b"Transfer-Encoding: chunked"), Framing.CHUNKED),
        (response(b"Transfer-Encoding: gzip, Chunked"), Framing.CHUNKED),
        (response(b"Transfer-Encoding: gzip"), Framing.UNTIL_CLOSE),
        (response(b"Transfer-Encoding: xchunked"), Framing.UNTIL_CLOSE),
        (response(), Framing.UNTIL_CLOSE),
        (response(b"Content-Length: 5", status=204), Framing.NONE),
        (response(b"Content-Length: 5", status=304), Framing.NONE),
        (response(b"Content-Length: 5", to_head=True), Framing.NONE),
    ],
)
def test_the_end_of_a_body_is_found_as_rfc_9112_says(result: ResponseHead, framing: Framing) -> None:
    assert result.framing is framing


def test_event_streams_are_recognised_unless_they_are_compressed() -> None:
    assert response(b"Content-Type: text/event-stream; charset=utf-8").is_event_stream
    assert not response(b"Content-Type: application/json").is_event_stream
    assert not response(b"Content-Type: text/event-stream", b"Content-Encoding: gzip").is_event_stream


def test_usage_is_looked_for_in_readable_json_and_event_streams() -> None:
    assert response(b"Content-Type: application/json").is_readable
    assert response(b"Content-Type: text/event-stream").is_readable
    assert not response(b"Content-Type: audio/mpeg").is_readable
    assert not response(b"Content-Type: application/json", b"Content-Encoding: br").is_readable


def test_retry_after_is_read_in_seconds_or_as_a_date() -> None:
    assert response(b"Retry-After: 7").retry_after_s == 7
    in_an_hour = formatdate(time.time() + 3600, usegmt=True).encode()
    assert 3000 < response(b"Retry-After: " + in_an_hour).retry_after_s <= 3600
    assert response(b"Retry-After: Fri, 31 Dec 1999 23:59:59 GMT").retry_after_s == 0
    assert response(b"Retry-After: soon").retry_after_s == 0
    assert response().retry_after_s == 0


@pytest.mark.parametrize(
    ("location", "passed"),
    [
        (b"http://worker:8000/v1/models?a=b", b"/v1/models?a=b"),
        (b"HTTPS://Worker:8000/v1/models", b"/v1/models"),
        (b"//worker:8000/v1/models", b"/v1/models"),
        (b"http://worker:8000", b"/"),
        (b"http://worker:8000?a=b", b"/?a=b"),
        (b"http://worker:8000//elsewhere/x", b"/.//elsewhere/x"),
        (b"http://worker:8000/\\elsewhere/x", b"/./\\elsewhere/x"),
    ],
)
def test_a_redirect_to_the_worker_itself_becomes_relative(location: bytes, passed: bytes) -> None:
    result = response(b"Content-Length: 0", b"Location: " + location, b"X-After: 1", status=307)
    expected = b"HTTP/1.1 307 Fine\r\nContent-Length: 0\r\nLocation: " + passed + b"\r\nX-After: 1\r\n\r\n"
    assert result.for_client(b"") == expected
    assert result.fields[b"location"].strip() == passed


@pytest.mark.parametrize(
    "location",
    [b"/v1/models", b"http://worker:80001/x", b"http://worker/x", b"https://elsewhere/?to=http://worker:8000/x", b""],
)
def test_other_redirects_pass_as_they_are(location: bytes) -> None:
    result = response(b"Location: " + location, status=307)
    assert result.for_client(b"") == b"HTTP/1.1 307 Fine\r\nLocation: " + location + b"\r\n\r\n"


def test_a_location_that_is_no_redirect_passes_as_it_is() -> None:
    created = response(b"Location: http://worker:8000/v1/files/1", status=201)
    assert b"Location: http://worker:8000/v1/files/1\r\n" in created.for_client(b"")
