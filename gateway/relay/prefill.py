"""A request for a prompt's prefill alone: sent, seen through and accounted for by its own task.

It is one leg of a request that goes over two workers, a piece of a long prompt, or a warm-up of ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Final

from gateway.errors import Saturated
from gateway.fleet.ledger import Flight
from gateway.relay.head import RequestHead, ResponseHead
from gateway.relay.legs import PrefillAnswer, read_params
from gateway.relay.retry import REFUSED_STATUSES, Failure, FailureKind, refused_by
from gateway.relay.route import Plan, Route, remember
from gateway.relay.services import Services
from gateway.relay.sse import UsageReader
from gateway.relay.upstream import Upstream
from gateway.tasks import spawn

_MAX_BYTES: Final = 16 * 2**20  # the numbers of the blocks of a million tokens are below 1 MB


class PrefillLeg:
    """One request to one prefill worker, under way since it was built.

    Args:
        services: the other rooms.
        head: of the client's request.
        plan: the request's plan.
        route: where it goes; ends with the leg.
        body: what is sent.
        is_retried: where it fails, another worker is tried, which is to be counted.
        pulls: it pulls KV from another worker, whose fault it is where it answers 500.

    Attributes:
        worker: where it goes.
        hit_tokens: prompt tokens that are believed to be cached there.
        task: what sees it through; cancelled, the worker is told at once.
        answer: what the worker said, once the prompt is prefilled.
        failure: why it is not, once that is known.
        refused: the worker found the request itself wrong.
        status: of the worker's answer, 0 without one.
        ended_at: monotonic seconds, 0 until then.
        on_failure: told when it fails.
    """

    def __init__(
        self,
        services: Services,
        head: RequestHead,
        plan: Plan,
        route: Route,
        body: bytes,
        is_retried: bool = True,
        pulls: bool = False,
    ) -> None:
        self.worker = route.worker
        self.hit_tokens = route.hit_tokens
        self.answer: PrefillAnswer | None = None
        self.failure: Failure | None = None
        self.refused = False
        self.status = 0
        self.ended_at = 0.0
        self.on_failure: Callable[[PrefillLeg], None] | None = None
        self._services = services
        self._head = head
        self._plan = plan
        self._route = route
        self._is_retried = is_retried
        self._pulls = pulls
        self._upstream: Upstream | None = None
        self._response: ResponseHead | None = None
        self._body = bytearray()
        self._outcome: asyncio.Future[Failure | None]
        self.task = spawn(self._run(body), f"prefill {head.request_id}")

    def cancel(self) -> None:
        """Give it up; one that has ended is left alone."""
        self.task.cancel()
        self._drop_upstream()
        self._route.end(monotonic())

    async def _run(self, body: bytes) -> None:
        services = self._services
        timeout_s = services.timeouts_for(self._plan.model or "").header_s
        failure: Failure | None
        try:
            async with asyncio.timeout(timeout_s or None):
                failure = await self._attempt(body)
            if failure is None:
                await self._prefilled()
        except TimeoutError:
            failure = Failure(FailureKind.TIMEOUT, f"sent no answer within {timeout_s:g} s")
        except Saturated:
            failure = Failure(FailureKind.REFUSED, "has too many requests waiting")
        finally:
            self._drop_upstream()
            self.ended_at = monotonic()
            self._route.end(self.ended_at)
        self.failure = failure
        if failure is None:
            services.health.succeeded(self.worker)
            return
        if failure.kind.blames_worker:
            services.health.failed(self.worker, failure.kind)
        if self._is_retried:
            services.observer.retried(self.worker.name, failure.kind)
        if self.on_failure is not None:
            self.on_failure(self)

    async def _attempt(self, body: bytes) -> Failure | None:
        """Wait for the worker's turn, send the request and wait for its answer."""
        services, request = self._services, self._plan.request
        assert request is not None
        flight = self._route.flight
        if (
            services.dispatcher is not None
            and flight.stage == Flight.HELD
            and not await services.dispatcher.turn(flight, request)
        ):
            return Failure(FailureKind.REFUSED, "has stopped being ready")
        return await services.upstream.of(self.worker).ask(partial(self._send, body))

    def _send(self, body: bytes, upstream: Upstream) -> asyncio.Future[Failure | None]:
        """Send the request over a connection; return what tells how the answer has ended."""
        self._upstream = upstream
        self._outcome = asyncio.get_running_loop().create_future()
        pool = upstream.pool
        upstream.send(self, self._head.for_worker(pool.host, len(body), pool.fields), body, False)
        return self._outcome

    async def _prefilled(self) -> None:
        """Note what the worker has said, and what it holds now."""
        usage = UsageReader()
        body = bytes(self._body)
        usage.feed(body)
        self.answer = PrefillAnswer(read_params(body), usage.cached_tokens)
        self._body.clear()
        self._route.answered(200, monotonic())
        if self._route.to_remember:
            request = self._plan.request
            await remember(self._services, self._route, request.prompt_tokens if request is not None else 0)

    def _drop_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None

    def _resolve(self, failure: Failure | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result(failure)

    # The worker's answer

    def on_upstream_head(self, head: ResponseHead) -> None:
        """Its head."""
        self._response = head
        self.status = head.status
        self._body.clear()

    def on_upstream_payload(self, payload: bytes) -> None:
        """A piece of its body."""
        self._body += payload

    def on_upstream_data(self, data: bytes) -> None:
        """The same with its framing."""
        if len(self._body) > _MAX_BYTES:
            self._drop_upstream()
            self._resolve(Failure(FailureKind.MALFORMED, f"answered with more than {_MAX_BYTES} bytes"))

    def on_upstream_end(self) -> None:
        """It is complete."""
        self._upstream = None
        response = self._response
        assert response is not None
        if response.status < 400:
            self._resolve(None)
            return
        self.refused = response.status < 500 and response.status not in REFUSED_STATUSES
        if self._pulls and response.status == 500:
            self._resolve(Failure(FailureKind.PARTNER, "could not pull KV"))
        else:
            self._resolve(refused_by(response))

    def on_upstream_lost(self, failure: Failure) -> None:
        """It ended before that."""
        self._upstream = None
        self._resolve(failure)
