"""Token counts, read in passing."""

from __future__ import annotations

import msgspec
import pytest

from gateway.relay.sse import UsageReader, end_of_events, error_event, split_events

USAGE = {
    "prompt_tokens": 500,
    "total_tokens": 564,
    "completion_tokens": 64,
    "prompt_tokens_details": {"cached_tokens": 256},
}


def counts(*reads: bytes) -> tuple[int | None, int | None, int | None]:
    reader = UsageReader()
    for data in reads:
        reader.feed(data)
    return reader.prompt_tokens, reader.output_tokens, reader.cached_tokens


def event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def test_a_json_answer_reports_its_usage() -> None:
    body = msgspec.json.encode({"id": "x", "choices": [{"text": "hi"}], "usage": USAGE, "kv_transfer_params": None})
    assert counts(body) == (500, 64, 256)


def test_a_stream_reports_usage_in_its_last_event() -> None:
    events = [event({"choices": [], "usage": None}), event({"choices": [], "usage": USAGE}), b"data: [DONE]\n\n"]
    assert counts(*events) == (500, 64, 256)
    assert counts(b"".join(events)) == (500, 64, 256)


def test_running_usage_is_kept_up_to_date() -> None:
    reads = [event({"usage": {"prompt_tokens": 9, "completion_tokens": n}}) for n in range(1, 6)]
    assert counts(*reads) == (9, 5, None)


def test_an_answer_without_usage_reports_nothing() -> None:
    assert counts(event({"choices": [{"delta": {"content": "usage"}}]}), b"data: [DONE]\n\n") == (None, None, None)


def test_generated_text_that_looks_like_usage_is_not_taken_for_it() -> None:
    text = '"usage": {"prompt_tokens": 1, "completion_tokens": 2}'
    assert counts(event({"choices": [{"delta": {"content": text}}]})) == (None, None, None)


def test_anthropics_input_tokens_are_those_that_were_not_cached() -> None:
    start = event({"type": "message_start", "message": {"usage": {"input_tokens": 12, "cache_read_input_tokens": 8}}})
    assert counts(start, event({"type": "message_delta", "usage": {"output_tokens": 3}})) == (20, 3, 8)


def test_the_names_of_responses_are_understood() -> None:
    usage = {"input_tokens": 12, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 3}
    assert counts(event({"type": "response.completed", "response": {"usage": usage}})) == (12, 3, 8)


@pytest.mark.parametrize("null", [b'"usage":null', b'"usage" : null', b'"usage":\tnull'])
def test_null_usage_is_passed_over(null: bytes) -> None:
    assert counts(b'{"choices":[],' + null + b"}") == (None, None, None)


def test_pretty_printed_json_is_understood() -> None:
    assert counts(msgspec.json.format(msgspec.json.encode({"usage": USAGE}), indent=4)) == (500, 64, 256)


def test_an_endless_usage_object_is_given_up() -> None:
    reader = UsageReader()
    reader.feed(b'"usage": {"prompt_tokens": 5,')
    for _ in range(100):
        reader.feed(b" " * 1000)
    assert len(reader._carry) <= 4096
    reader.feed(event({"usage": USAGE}))
    assert reader.prompt_tokens == 500


def test_absurd_counts_are_ignored() -> None:
    assert counts(b'{"usage":{"prompt_tokens":99999999999999999999,"completion_tokens":4}}') == (None, 4, None)


def test_an_error_event_closes_an_event_it_interrupts() -> None:
    path = "/v1/completions"
    assert error_event(b'{"error":{}}', path, mid_event=False) == b'data: {"error":{}}\n\n'
    assert error_event(b'{"error":{}}', path, mid_event=True) == b'\n\ndata: {"error":{}}\n\n'


@pytest.mark.parametrize(
    ("pieces", "mid_event"),
    [
        ([b"data: 1\n\n"], False),
        ([b"data: 1\r\n\r\n"], False),
        ([b"data: {"], True),
        ([b"data: 1\n"], True),
        ([b"data: 1\n", b"\n"], False),
        ([b"data: 1\n\n", b'data: {"usage": {'], True),
    ],
)
def test_a_stream_is_between_events_after_an_empty_line(pieces: list[bytes], mid_event: bool) -> None:
    reader = UsageReader()
    for piece in pieces:
        reader.feed(piece)
    assert reader.mid_event is mid_event


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\n\n"])
def test_an_event_ends_with_an_empty_line_however_it_is_cut(end: bytes) -> None:
    event = b"event: a\r\ndata: 1"
    for seen in range(len(event + end)):
        assert end_of_events((event + end)[:seen], 0) == 0
        assert end_of_events(event + end, seen) == len(event + end)
        assert end_of_events(event + end + event, seen) == len(event + end)
    assert split_events(event + end + event + end) == [event, event]
