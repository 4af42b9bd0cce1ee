"""What was cached where a prompt was prefilled replaces what the decode worker reports, and nothing else changes."""

from __future__ import annotations

import pytest

from gateway.relay.cached import CachedTokens
from gateway.relay.head import ResponseHead, read_response_head
from gateway.relay.retry import Failure, FailureKind
from tests.peers import DONE, event

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}\n\n'
STREAM = event("one") + event(r"\"cached_tokens\": 8") + USAGE + DONE
ANSWER = b'{"usage":{"prompt_tokens_details":{"cached_tokens": null}},"choices":[]}'


class Witness:
    """Whom it is passed on to."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.payload = self.data = b""
        self.events: list[str] = []

    def on_upstream_head(self, head: ResponseHead) -> None:
        self.head = head
        self.events.append("head")

    def on_upstream_payload(self, payload: bytes) -> None:
        self.payload += payload

    def on_upstream_data(self, data: bytes) -> None:
        assert self.head is not None
        self.data += data

    def on_upstream_end(self) -> None:
        self.events.append("end")

    def on_upstream_lost(self, failure: Failure) -> None:
        self.events.append(failure.kind)


def head_of(*lines: str, status: int = 200) -> ResponseHead:
    raw = "\r\n".join((f"HTTP/1.1 {status} OK", *lines, "", "")).encode()
    return read_response_head(raw, status, False, b"worker")


STREAM_HEAD = head_of("content-type: text/event-stream", "transfer-encoding: chunked")


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_a_stream_is_rewritten_however_it_is_cut(size: int) -> None:
    witness = Witness()
    receiver = CachedTokens(witness, lambda _: 12345)
    receiver.on_upstream_head(STREAM_HEAD)
    for piece in pieces(STREAM, size):
        receiver.on_upstream_payload(piece)
        receiver.on_upstream_data(piece)  # with its framing, which is not looked at
    receiver.on_upstream_end()
    assert witness.payload == STREAM.replace(b'"cached_tokens":8', b'"cached_tokens":12345')
    assert witness.data.endswith(b"\r\n0\r\n\r\n")
    assert witness.events == ["head", "end"]


def test_an_event_passes_as_soon_as_it_is_whole() -> None:
    witness = Witness()
    receiver = CachedTokens(witness, lambda _: 1)
    receiver.on_upstream_head(STREAM_HEAD)
    receiver.on_upstream_payload(event("one") + event("two")[:9])
    receiver.on_upstream_data(b"...")
    assert witness.payload == event("one")


def test_an_event_of_megabytes_is_not_searched_anew_with_every_piece_of_it() -> None:
    witness = Witness()
    receiver = CachedTokens(witness, lambda _: 1)
    receiver.on_upstream_head(STREAM_HEAD)
    long = b"data: " + b"x" * 4_000_000 + b"\n\n"
    for piece in pieces(long, 1000):  # each would be searched for long: minutes in all
        receiver.on_upstream_payload(piece)
        receiver.on_upstream_data(piece)
    assert witness.payload == long


def test_an_answers_length_changes_with_it() -> None:
    witness = Witness()
    receiver = CachedTokens(witness, lambda _: 12345)
    receiver.on_upstream_head(head_of("Content-Type: application/json", f"Content-Length: {len(ANSWER)}", "x-a: b"))
    for piece in pieces(ANSWER, 10):
        receiver.on_upstream_payload(piece)
        receiver.on_upstream_data(piece)
    assert witness.events == []
    receiver.on_upstream_end()
    assert witness.data == witness.payload == ANSWER.replace(b"null", b"12345")
    assert witness.head is not None
    assert b"\r\nContent-Length: %d\r\nx-a: b\r\n" % (len(ANSWER) + 1) in witness.head.raw


@pytest.mark.parametrize(
    "head",
    [
        head_of("content-type: application/json", "content-length: 5", status=400),
        head_of("content-type: audio/wav", "content-length: 5"),
        head_of("content-type: text/event-stream"),
    ],
    ids=["error", "audio", "until-close"],
)
def test_what_reports_nothing_passes_as_it_comes(head: ResponseHead) -> None:
    witness = Witness()
    receiver = CachedTokens(witness, lambda _: 1)
    receiver.on_upstream_head(head)
    receiver.on_upstream_payload(b"hello")
    receiver.on_upstream_data(b"hello")
    assert (witness.head, witness.payload, witness.data) == (head, b"hello", b"hello")


@pytest.mark.parametrize(
    ("usage", "told"),
    [
        (
            b'{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}',
            b'{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":3}}',
        ),
        (
            b'{"input_tokens":9,"input_tokens_details":{"cached_tokens": 8}}',
            b'{"input_tokens":9,"input_tokens_details":{"cached_tokens": 3}}',
        ),
        (b'{"input_tokens":1,"cache_read_input_tokens":8}', b'{"input_tokens":6,"cache_read_input_tokens":3}'),
        (
            b'{"prompt_tokens_details":{"cached_tokens":8,"created_cache_tokens":1}}',
            b'{"prompt_tokens_details":{"cached_tokens":3,"created_cache_tokens":6}}',
        ),
        (
            b'{"input_tokens_details":{"cached_tokens":8,"cache_write_tokens":1}}',
            b'{"input_tokens_details":{"cached_tokens":3,"cache_write_tokens":6}}',
        ),
        (
            b'{"input_tokens":1,"cache_creation_input_tokens":2,"cache_read_input_tokens":8}',
            b'{"input_tokens":1,"cache_creation_input_tokens":7,"cache_read_input_tokens":3}',
        ),
        (b'{"input_tokens":9,"output_tokens":1}', b'{"input_tokens":9,"output_tokens":1}'),
        (b'{"prompt_tokens_details":{"cached_tokens":null}}', b'{"prompt_tokens_details":{"cached_tokens":null}}'),
    ],
    ids=[
        "chat",
        "responses",
        "messages",
        "chat with writes",
        "responses with writes",
        "messages with writes",
        "messages of which nothing is said",
        "chat of which nothing is said",
    ],
)
def test_the_usage_of_every_api_can_be_less_what_was_computed(usage: bytes, told: bytes) -> None:
    witness = Witness()
    receiver = CachedTokens(witness, lambda cached: None if cached is None else cached - 5)
    receiver.on_upstream_head(STREAM_HEAD)
    before, after = (event("one") + b'data: {"usage":%b,"cached_tokens":8}\n\n' % each for each in (usage, told))
    receiver.on_upstream_payload(before)
    receiver.on_upstream_data(before)
    assert witness.payload == after


def test_where_nothing_is_known_nothing_is_replaced() -> None:
    witness = Witness()
    receiver = CachedTokens(witness, lambda _: None)
    receiver.on_upstream_head(STREAM_HEAD)
    receiver.on_upstream_payload(STREAM)
    receiver.on_upstream_data(STREAM)
    assert witness.payload == STREAM


def test_a_kept_answer_that_is_lost_was_never_begun() -> None:
    witness = Witness()
    receiver = CachedTokens(witness, lambda _: 1)
    receiver.on_upstream_head(head_of("content-type: application/json", "content-length: 50"))
    receiver.on_upstream_payload(ANSWER[:9])
    receiver.on_upstream_data(ANSWER[:9])
    receiver.on_upstream_lost(Failure(FailureKind.RESET, "died"))
    assert witness.events == [FailureKind.RESET]
