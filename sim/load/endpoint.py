"""The endpoint under test, before the test."""

from __future__ import annotations

import os
import re
from typing import Final
from urllib.parse import urlsplit

_TIMEOUT_S: Final = 10.0
_KEY: Final = re.compile(r"[!-~]*")


def base_url(url: str) -> str:
    """Return the URL in front of ``/v1``.

    Raises:
        ValueError: it is no HTTP URL, or has more than a path.
    """
    parts = urlsplit(url)
    if parts.query or parts.fragment:  # not shown: some have their key there
        raise ValueError("the URL of an endpoint has neither ? nor #; an API key goes into OPENAI_API_KEY")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"{url!r} is no URL of an endpoint; one looks like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def shown_url(url: str) -> str:
    """Return a URL without the user and the password that may be in it."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def read_api_key(variable: str) -> str:
    """Return the API key in an environment variable, without the newline that a file ends with; empty for none.

    Raises:
        ValueError: no header can hold it.
    """
    key = os.environ.get(variable, "").strip()
    if not _KEY.fullmatch(key):
        raise ValueError(f"the API key in {variable} has characters that no key has: spaces, line breaks or accents")
    return key


def find_model(url: str, api_key: str) -> str:
    """Return the first model that an endpoint lists.

    Raises:
        ValueError: nothing answers there, or it lists none.
    """
    import httpx

    where = shown_url(url)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"no endpoint answers at {where}: {error}") from None
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        key = "does not accept the API key" if api_key else "wants an API key"
        raise ValueError(f"{where} {key} (status {answer.status_code}); put it into OPENAI_API_KEY (--api-key-env)")
    if answer.status_code != httpx.codes.OK:
        raise ValueError(f"{where}/v1/models answers with status {answer.status_code}; name the model with --model")
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{where}/v1/models names no model; name it with --model") from None
