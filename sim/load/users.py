"""The locust user: plays conversations, reads streams as they come, and tells locust TTFT, ITL, tokens/s and hits.

Beside its own entry, every request fires these events of type ``stream``:

========  ==================================================
TTFT      ms to the first token
ITL       mean ms between two chunks with text
tokens/s  output tokens per second after the first
cached %  share of the prompt's tokens that were cached
========  ==================================================
"""

from __future__ import annotations

import functools
import ssl
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar

import msgspec
from gevent import GreenletExit
from geventhttpclient.response import HTTPParseError
from locust import FastHttpUser, task
from locust.contrib.fasthttp import ResponseContextManager
from locust.exception import StopUser

from sim.load.schedule import Schedule
from sim.load.stream import ANSWER, Answer, error_message, read_answer


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked.

    Attributes:
        model: name of the model.
        api_key: bearer token, empty for none.
        ignore_eos: whether answers are as long as the scenario says (vLLM, SGLang; others refuse the field).
    """

    model: str
    api_key: str = ""
    ignore_eos: bool = False

    def body(self, request: dict[str, Any]) -> bytes:
        """Return the body of a streamed request."""
        fixed = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        extra = {"ignore_eos": True} if self.ignore_eos else {}
        return msgspec.json.encode({**fixed, **request, **extra})

    def headers(self) -> dict[str, str]:
        """Return the headers of a request: compressed events would come in lumps."""
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        return {**headers, "authorization": f"Bearer {self.api_key}"} if self.api_key else headers


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class LoadUser(FastHttpUser):
    """Takes the next conversation of the schedule and plays it, until there is none.

    Attributes:
        schedule: of this process, set when a test starts.
        target: what is asked, set with it.
        given_up: requests that were still unanswered when the test stopped waiting.
    """

    insecure = False
    ssl_context_factory = staticmethod(_tls)
    network_timeout = 600.0  # a stream may be silent for as long
    schedule: ClassVar[Schedule | None] = None
    target: ClassVar[Target]
    given_up: ClassVar[list[Answer]] = []

    @task
    def play(self) -> None:
        """Play one unit."""
        taken = self.schedule and self.schedule.take()
        if not taken or self.schedule is None:
            raise StopUser
        unit, due = taken
        for turn in unit.turns:
            due += turn.think_s
            if not self.schedule.wait(due):
                raise StopUser
            self._ask(turn.number, due)
            due = perf_counter()

    def _ask(self, number: int, due: float) -> None:
        assert self.schedule is not None
        path, request = self.schedule.scenario.request(number)
        body, headers = self.target.body(request), self.target.headers()
        sent = perf_counter()
        answer = Answer(sent, late_s=max(0.0, sent - due))
        try:
            problem = self._exchange(path, body, headers, answer)
        except GreenletExit:  # locust counts nothing then
            answer.ended = perf_counter()
            self.given_up.append(answer)
            raise
        if not problem:
            self._fire(answer)

    def _exchange(self, path: str, body: bytes, headers: dict[str, str], answer: Answer) -> str:
        """Send a request and read the answer; return what is wrong with it, or an empty text."""
        with self.client.post(
            path,
            data=body,  # type: ignore[arg-type]  # bytes are taken as they are
            headers=headers,
            stream=True,
            catch_response=True,
            context={ANSWER: answer},
        ) as response:
            problem = _read(response, answer)
            answer.ended = perf_counter()
            response.request_meta["response_time"] = answer.latency_s * 1e3
            if problem:
                response.failure(problem)
            else:
                response.success()
        return problem

    def _fire(self, answer: Answer) -> None:
        assert answer.first is not None
        values = {"TTFT": (answer.first - answer.sent) * 1e3}
        if answer.gaps_s:
            values["ITL"] = sum(answer.gaps_s) / len(answer.gaps_s) * 1e3
        if answer.tokens_per_s is not None:
            values["tokens/s"] = answer.tokens_per_s
        if answer.cached_tokens is not None and answer.prompt_tokens:
            values["cached %"] = answer.cached_tokens / answer.prompt_tokens * 100
        for name, value in values.items():
            self.environment.events.request.fire(
                request_type="stream", name=name, response_time=value, response_length=0, exception=None, context={}
            )


def _read(response: ResponseContextManager, answer: Answer) -> str:
    """Read the stream; return what is wrong with it, or an empty text."""
    if not response.status_code:
        return f"no answer: {getattr(response, 'error', None) or 'the connection failed'}"
    if response.status_code != 200:
        return f"status {response.status_code}: {error_message(response.content or b'')}"
    try:
        # `iter_lines` and `iter_content` of locust wait until a kilobyte is there; lines of the stream itself do not.
        read_answer(functools.partial(response.stream.readline, b"\n"), answer, perf_counter)
    except (OSError, ValueError, HTTPParseError) as error:
        return f"the stream broke off: {error}"
    if answer.error or not answer.complete:
        return answer.error or "the stream ended without [DONE]"
    return "" if answer.first is not None else "the answer has no token"
