"""What `kvway load` says of answers that are errors."""

from __future__ import annotations

import pytest

from sim.load.stream import error_message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"too long","type":"BadRequestError","code":400}}', "too long (400)"),
        (b'{"error":{"message":"too long","code":null}}', "too long"),
        (b'{"error":"too long"}', '{"error":"too long"}'),
        (b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
        (b"\xff", "�"),
        (b"", ""),
    ],
)
def test_an_error_is_told_as_message_and_code_or_as_it_begins(body: bytes, message: str):
    assert error_message(body) == message


@pytest.mark.parametrize("body", [b'{"error":{"message":"%s"}}' % (b"a" * 10_000), b"a" * 10_000])
def test_a_long_error_is_cut(body: bytes):
    assert error_message(body) == "a" * 200
