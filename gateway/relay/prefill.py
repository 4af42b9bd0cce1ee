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
from gateway.relay.head import RequestHead
from gateway.relay.legs import PrefillAnswer, read_params
from gateway.relay.plan import Plan
from gateway.relay.retry import REFUSED_STATUSES, Failure, FailureKind, refused_by
from gateway.relay.route import Route, remember
from gateway.relay.services import Services
from gateway.relay.sse import UsageReader
from gateway.relay.upstream import Upstream
from gateway.relay.whole import WholeAnswer
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
        self.ended_at = 0.0
        self.on_failure: Callable[[PrefillLeg], None] | None = None
        self._services = services
        self._head = head
        self._plan = plan
        self._route = route
        self._is_retried = is_retried
        self._pulls = pulls
        self._goes = asyncio.Event()
        self._whole = WholeAnswer(_MAX_BYTES)
        self.task = spawn(self._run(body), f"prefill {head.request_id}")

    @property
    def status(self) -> int:
        """Status of the worker's answer, 0 without one."""
        return self._whole.status

    async def goes(self) -> None:
        """Wait until its worker's turn has come, or it is over before."""
        if self._route.flight.stage == Flight.HELD:
            await self._goes.wait()

    async def done(self) -> None:
        """Wait until it is over; whoever gives up waiting gives it up."""
        try:
            await asyncio.shield(self.task)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Give it up; one that has ended is left alone."""
        self.task.cancel()
        self._whole.drop()
        self._route.end(monotonic())

    async def _run(self, body: bytes) -> None:
        services = self._services
        failure: Failure | None
        try:
            failure = await self._attempt(body)
            if failure is None:
                await self._prefilled()
        except Saturated:
            failure = Failure(FailureKind.REFUSED, "has too many requests waiting")
        finally:
            self._whole.drop()
            self.ended_at = monotonic()
            self._route.end(self.ended_at)
            self._goes.set()
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
        self._goes.set()
        timeout_s = services.timeouts_for(self._plan.model or "").header_s
        try:
            async with asyncio.timeout(timeout_s or None):
                return await services.upstream.of(self.worker).ask(partial(self._send, body)) or self._wrong()
        except TimeoutError:
            return Failure(FailureKind.TIMEOUT, f"sent no answer within {timeout_s:g} s")

    def _send(self, body: bytes, upstream: Upstream) -> asyncio.Future[Failure | None]:
        """Send the request over a connection; return what tells how the answer has ended."""
        outcome, pool = self._whole.expect(upstream), upstream.pool
        upstream.send(self._whole, self._head.for_worker(pool.host, len(body), pool.fields), body, False)
        return outcome

    def _wrong(self) -> Failure | None:
        """Return what is wrong with the worker's answer, which is complete."""
        response = self._whole.head
        assert response is not None
        if response.status < 400:
            return None
        self.refused = response.status < 500 and response.status not in REFUSED_STATUSES
        if self._pulls and response.status == 500:
            return Failure(FailureKind.PARTNER, "could not pull KV")
        return refused_by(response)

    async def _prefilled(self) -> None:
        """Note what the worker has said, and what it holds now."""
        usage = UsageReader()
        body = bytes(self._whole.body)
        usage.feed(body)
        self.answer = PrefillAnswer(read_params(body), usage.cached_tokens)
        self._whole.body.clear()
        self._route.answered(200, monotonic())
        if self._route.to_remember:
            request = self._plan.request
            await remember(self._services, self._route, request.prompt_tokens if request is not None else 0)
