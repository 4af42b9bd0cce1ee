"""What a Redis URL says."""

from __future__ import annotations

import pytest

from gateway.index.redis_address import Place, parse_url


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://h", Place("one", (("h", 6379),))),
        ("redis://h:1/2", Place("one", (("h", 1),), db=2)),
        ("rediss://[::1]:1", Place("one", (("::1", 1),), tls=True)),
        ("redis://:p%40ss@h", Place("one", (("h", 6379),), password="p@ss")),
        ("redis://me:p@ss@h", Place("one", (("h", 6379),), username="me", password="p@ss")),
        ("redis://me:p@h", Place("one", (("h", 6379),), username="me", password="p")),
        ("unix:///a/b.sock?db=3", Place("one", path="/a/b.sock", db=3)),
        (
            "redis+sentinel://:p@a,b:2/main/4",
            Place("sentinel", (("a", 26379), ("b", 2)), service="main", db=4, password="p"),
        ),
        ("rediss+cluster://a:1,b", Place("cluster", (("a", 1), ("b", 6379)), tls=True)),
    ],
)
def test_urls_are_understood(url: str, place: Place) -> None:
    assert parse_url(url) == place


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("redis://:secret@h:port", "h:port"),
        ("redis://:secret@:1", "no host"),
        ("redis://:secret@a,b", "redis\\+cluster"),
        ("redis://:secret@h/x", "'x'"),
        ("redis://:secret@h/0?ssl_cert_reqs=none", "keys of their own"),
        ("redis+sentinel://:secret@h", "service"),
        ("redis+cluster://:secret@h/1", "database"),
        ("redis://h/0?password=secret", "keys of their own"),
        ("redis+sentinel://h/main/0?password=secret", "keys of their own"),
        ("redis://:a/secret@h/0", "%2F"),
        ("redis+sentinel://:a/secret@h/main", "%2F"),
        ("redis://:secret?a@h", "%3F"),
        ("redis://:secret#a@h", "%23"),
    ],
)
def test_what_is_wrong_with_a_url_is_told_without_its_password(url: str, what: str) -> None:
    with pytest.raises(ValueError, match=what) as error:
        parse_url(url)
    assert "secret" not in str(error.value)
