"""What `kvway load` says of answers that are errors, and of an endpoint and a key that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from sim.load.endpoint import base_url, find_model, read_api_key
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


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("http://a:1/v1?key=hidden", "neither"),
        ("http://a:1#hidden", "neither"),
        ("http://a:0", "no URL of an endpoint"),
        ("http://a:65536", "out of range"),
    ],
)
def test_a_url_that_would_lead_elsewhere_is_refused_and_a_key_in_it_not_shown(url: str, complaint: str):
    with pytest.raises(ValueError, match=complaint) as refused:
        base_url(url)
    assert "hidden" not in str(refused.value)


@pytest.fixture
def locked() -> Iterator[str]:
    """An endpoint that lets nobody in."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("key", "what"), [("", "wants an API key"), ("wrong", "does not accept the API key")])
def test_an_endpoint_that_wants_a_key_says_where_to_put_it(locked: str, key: str, what: str):
    with pytest.raises(ValueError, match=rf"{what} \(status 401\); put it into OPENAI_API_KEY"):
        find_model(locked, key)
