"""The endpoint under test, before the test."""

from __future__ import annotations

from urllib.parse import urlsplit

_TIMEOUT_S = 10.0


def base_url(url: str) -> str:
    """Return the URL in front of ``/v1``.

    Raises:
        ValueError: it is no HTTP URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no URL of an endpoint; one looks like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def find_model(url: str, api_key: str) -> str:
    """Return the first model that an endpoint lists.

    Raises:
        ValueError: nothing answers there, or it lists none.
    """
    import httpx

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"no endpoint answers at {url}: {error}") from None
    if answer.status_code != httpx.codes.OK:
        raise ValueError(f"{url}/v1/models answers with status {answer.status_code}; name the model with --model")
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{url}/v1/models names no model; name it with --model") from None
