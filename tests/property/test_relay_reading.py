"""However the bytes of a body are cut, accounting reads the same and clients get the same."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.relay.chunked import LAST_CHUNK, Dechunker, chunk
from gateway.relay.sse import UsageReader

USAGE = {"prompt_tokens": 70, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": 64, "audio": None}}
EVENTS = b"".join(
    b"data: " + msgspec.json.encode({"choices": [{"delta": {"content": f'"usage" {n}'}}], "usage": usage}) + b"\n\n"
    for n, usage in enumerate([None, None, USAGE])
)
STREAM = EVENTS + b"data: [DONE]\n\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % len(data) for place in places)})
    return [data[start:end] for start, end in pairwise(edges)]


cuts = st.lists(st.integers(0, 10_000), max_size=40)


@given(cuts)
def test_usage_is_found_wherever_reads_cut_a_json_answer(places: list[int]) -> None:
    body = msgspec.json.encode({"id": "x", "choices": [{"text": "y" * 40}], "usage": USAGE})
    reader = UsageReader()
    for piece in cut(body, places):
        reader.feed(piece)
    assert (reader.prompt_tokens, reader.output_tokens, reader.cached_tokens) == (70, 8, 64)


@given(cuts)
def test_usage_is_found_wherever_a_stream_is_cut(places: list[int]) -> None:
    reader = UsageReader()
    for piece in cut(STREAM, places):
        reader.feed(piece)
    assert (reader.prompt_tokens, reader.output_tokens, reader.cached_tokens) == (70, 8, 64)


@given(st.binary(max_size=300), st.lists(st.binary(max_size=40), max_size=8))
def test_no_bytes_trouble_the_reader(first: bytes, more: list[bytes]) -> None:
    reader = UsageReader()
    for data in (b'"usage": {' + first, *more):
        reader.feed(data)
    assert len(reader._carry) <= 4096


@given(st.binary(min_size=1, max_size=200), cuts, cuts)
def test_a_chunked_body_loses_its_framing_and_nothing_else(
    body: bytes, chunk_places: list[int], places: list[int]
) -> None:
    wire = b"".join(chunk(piece) for piece in cut(body, chunk_places)) + LAST_CHUNK
    payload: list[bytes] = []
    dechunker = Dechunker(payload.append)
    for piece in cut(wire, places):
        dechunker.feed(piece)
    assert b"".join(payload) == body
