"""Log probabilities in vLLM's form, as made up as the text: each token is twice as likely as the next likely one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import log
from typing import Any, Final, Protocol

from sim.protocol import ChatBody, CompletionBody, bad_request

_MOST: Final = 20  # vLLM's max_logprobs


class Logprobs(Protocol):
    """What is reported of the tokens of one answer."""

    def report(self, first: int, last: int) -> dict[str, Any]:
        """Return it for the tokens from ``first`` to ``last`` (exclusive)."""
        ...


class ChatLogprobs:
    """Those of a chat.

    Args:
        pieces: text of each token.
        others: texts of other tokens, the same everywhere.
        tops: how many are reported with each token, itself included.
    """

    def __init__(self, pieces: Sequence[str], others: Sequence[str], tops: int) -> None:
        self._pieces = pieces
        self._others = others
        self._tops = tops

    def report(self, first: int, last: int) -> dict[str, Any]:
        """See ``Logprobs``."""
        content = []
        for piece in self._pieces[first:last]:
            likely = [
                {"token": text, "logprob": logprob, "bytes": list(text.encode())}
                for text, logprob in _likeliest(piece, self._others)
            ]
            content.append(likely[0] | {"top_logprobs": likely[: self._tops]})
        return {"content": content}


class TextLogprobs:
    """Those of a text completion.

    Args:
        pieces: text of each token.
        others: texts of other tokens, the same everywhere.
        tops: how many are reported with each token, itself included, which is reported in any case.
    """

    def __init__(self, pieces: Sequence[str], others: Sequence[str], tops: int) -> None:
        self._pieces = pieces
        self._others = others
        self._tops = max(1, tops)
        self._offsets = list(accumulate(map(len, pieces), initial=0))

    def report(self, first: int, last: int) -> dict[str, Any]:
        """See ``Logprobs``."""
        likely = [_likeliest(piece, self._others) for piece in self._pieces[first:last]]
        return {
            "text_offset": self._offsets[first:last],
            "token_logprobs": [each[0][1] for each in likely],
            "tokens": self._pieces[first:last],
            "top_logprobs": [dict(each[: self._tops]) for each in likely],
        }


def asked_logprobs(body: ChatBody | CompletionBody, vocab_size: int) -> int | None:
    """Return how many tokens are to be reported with each of an answer's; None: no log probabilities are asked for.

    Raises:
        ApiError: 400, for what vLLM refuses.
    """
    if isinstance(body, ChatBody):
        field, wanted, asked = "top_logprobs", bool(body.logprobs), body.top_logprobs or 0
    else:
        field, wanted, asked = "logprobs", body.logprobs is not None, body.logprobs or 0
    if asked < -1:
        raise bad_request(f"`{field}` must be a positive value or -1.", field)
    if asked and not wanted:
        raise bad_request("when using `top_logprobs`, `logprobs` must be set to true.", field)
    if asked == -1:
        asked = vocab_size
    if asked > _MOST:
        raise bad_request(
            f"Requested sample logprobs of {asked}, which is greater than max allowed: {_MOST}", "logprobs"
        )
    return asked if wanted else None


def _likeliest(piece: str, others: Sequence[str]) -> list[tuple[str, float]]:
    """Return a token and the others, the likeliest first, with the logarithms of 1/2, 1/4, 1/8 …"""
    return [(text, -rank * log(2)) for rank, text in enumerate(dict.fromkeys((piece, *others)), 1)]
