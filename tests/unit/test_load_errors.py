"""What `kvway load` says of answers that are errors, and of an endpoint and a key that cannot be used."""

from __future__ import annotations

import pytest

from sim.load.endpoint import find_model, read_api_key
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


@pytest.mark.parametrize("key", ["sec\nret", "sec ret", "sécret"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(ValueError, match="the API key in MY_KEY has characters") as refused:
        read_api_key("MY_KEY")
    assert "ret" not in str(refused.value)


def test_a_password_in_a_url_is_not_shown():
    with pytest.raises(ValueError, match=r"no endpoint answers at http://\[::1\]:1: "):
        find_model("http://me:hidden@[::1]:1", "")
