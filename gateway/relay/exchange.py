"""One request's life: admit, route, forward, retry, account.

``Exchange.run`` tells it in order. While an attempt is under way the coroutine waits, and the ``on_upstream_…`` methods
take the answer's bytes from the worker's connection to the client's.

The head of an answer is held until the first byte of its body: engines send it before they begin to prefill, and until
a byte has reached the client the request can still go to another worker. After that byte there is no second answer: a
stream whose worker dies ends with one error event (or goes on elsewhere: ``resume.py``), all else with a reset.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from gateway.config import AnswerTimeouts
from gateway.errors import GatewayError, NoWorker, UpstreamError, UpstreamTimeout
from gateway.fleet.ledger import Flight
from gateway.fleet.registry import Worker
from gateway.observe.record import Outcome, RequestRecord
from gateway.relay.answer import Answer, Client, ErrorAnswer, own_headers
from gateway.relay.disaggregation import HandOver, hand_over
from gateway.relay.head import RequestHead, ResponseHead
from gateway.relay.pieces import cached_before, its_turn, without_pieces
from gateway.relay.plan import Plan, make_plan
from gateway.relay.report import body_for
from gateway.relay.resume import Resumption, resumption
from gateway.relay.retry import RETRYABLE_STATUSES, Failure, FailureKind, is_repeatable, no_answer, refused_by
from gateway.relay.route import Route, dispatch, remember, retry_delay_s
from gateway.relay.services import Services
from gateway.relay.upstream import Receiver, Upstream

log = logging.getLogger("kvway.relay")


class Exchange:
    """One request and its answer.

    Args:
        services: the other rooms.
        client: where the request came from.
        head: its head.
        refusal: for what is no valid request: the error it is answered with.

    Attributes:
        head: the request's head.
        body: its body, complete before ``run``.
        answer: what the client gets.
        on_upstream_payload: takes what ``on_upstream_data`` is going to bring, without framing, to look at it.
        task: what drives ``run``.
    """

    __slots__ = (
        "_answered",
        "_begun",
        "_client",
        "_collected",
        "_ending",
        "_hand_over",
        "_held",
        "_moved_at",
        "_outcome",
        "_plan",
        "_record",
        "_refusal",
        "_repeatable",
        "_response",
        "_resumption",
        "_route",
        "_sent_at",
        "_services",
        "_timeouts",
        "_upstream",
        "answer",
        "body",
        "head",
        "on_upstream_payload",
        "task",
    )

    def __init__(
        self, services: Services, client: Client, head: RequestHead, refusal: GatewayError | None = None
    ) -> None:
        self._services = services
        self._client = client
        self._timeouts: AnswerTimeouts = services.config.timeouts
        self._refusal = refusal
        self._repeatable = is_repeatable(head.method, head.path)
        self._record = RequestRecord(head.request_id, head.path, 0.0)
        self._answered = False  # the client has all it will get
        self._ending: GatewayError | Outcome | None = None  # why ``task`` was cancelled
        self._plan: Plan | None = None
        self.head = head
        self.body = b""
        self.answer = Answer(client, head)
        self.on_upstream_payload = self.answer.read
        self.task: asyncio.Task[None] | None = None
        # The attempt under way.
        self._route: Route | None = None
        self._upstream: Upstream | None = None
        self._outcome: asyncio.Future[Failure | None] | None = None
        self._response: ResponseHead | None = None
        self._begun = False  # bytes of its answer have been sent
        self._resumption: Resumption | None = None  # where it is switched on for this request
        self._collected: ErrorAnswer | None = None  # so far, of an error that another worker may better
        self._held: ErrorAnswer | None = None  # the last such answer, whole
        self._hand_over: HandOver | None = None  # where prefill and decode may be apart
        self._sent_at = self._moved_at = 0.0

    async def run(self) -> None:
        """Answer the request, whatever happens."""
        self._record.received_at = monotonic()
        if (tracing := self._services.tracing) is not None:
            self.head.fields, self._record.trace = tracing.begin(self.head.method, self.head.fields)
        try:
            if self._ending is not None:
                raise asyncio.CancelledError
            if self._refusal is not None:
                raise self._refusal
            self._services.budget.earn()
            plan = await make_plan(self._services, self.head.method, self.head.path, self.body)
            self._admit(plan)
            await self._forward(plan)
        except GatewayError as error:
            self._fail(error)
        except asyncio.CancelledError:
            self._interrupted()
        except Exception:
            log.exception("request %s failed inside the gateway", self.head.request_id)
            self._fail(GatewayError("The gateway failed to handle this request."))
        finally:
            try:
                if self._route is not None and self._route.to_remember:
                    await remember(self._services, self._route, self.answer.tokens(self._record.prompt_tokens))
            finally:
                self._account()

    def _admit(self, plan: Plan) -> None:
        self._plan = plan
        plan.note(self._record)
        if plan.model is not None:
            self._timeouts = self._services.timeouts_for(plan.model)
        if plan.streamed:
            self._resumption = resumption(self._services, self, plan, self.head.path, self.body)
        if plan.body is not None:
            self.body = plan.body

    async def _forward(self, plan: Plan) -> None:
        """Try workers until one answers.

        Raises:
            GatewayError: none did, and none left an error of its own to pass on.
        """
        services = self._services
        tried: list[Worker] = []
        if services.registry.apart:
            self._hand_over = hand_over(services, self, plan, self._record)
        while True:
            apart = self._hand_over
            route = self._route = await (dispatch(services, plan, tried) if apart is None else apart.dispatch(tried))
            route.note(self._record)
            if not self._record.routed_at:
                self._record.routed_at = monotonic()
            if route.flight.stage == Flight.HELD and not await its_turn(services, plan, route, self.head):
                # the worker has stopped being ready
                self._leave()
                continue
            self._begun = False
            # A request that must not run twice never meets the keep-alive race: it gets a connection of its own.
            failure = await services.upstream.of(route.worker).ask(self._send, fresh=not self._repeatable)
            if failure is None:
                return
            worker = self._leave()
            if apart is not None:
                apart.failed(failure)
            if failure.kind.blames_worker:
                services.health.failed(worker, failure.kind)
            tried.append(worker)
            if self._begun and self._resumption is not None:
                self.body, plan = await self._resumption.continuation()
                plan.prompt = None  # the client waits in the middle of its answer: its rest goes whole
                tried, self._held = [worker], None
                if apart is not None:
                    apart.close()
                    self._hand_over = hand_over(services, self, plan, self._record)
                continue
            delay_s = retry_delay_s(services, plan, tried, failure, self._repeatable)
            if delay_s is None:
                break
            services.observer.retried(worker.name, failure.kind)
            await asyncio.sleep(delay_s)
        if self._held is not None:
            self._response, self._record.worker = self._held.head, self._held.worker
            self.answer.announce(self._response)
            self._begin(self._held.body)
            return
        raise no_answer(failure, worker.name, len(tried))

    def _leave(self) -> Worker:
        """End the request's stay on its worker and return that worker."""
        route = self._route
        assert route is not None
        self._route = None
        route.end(monotonic())
        return route.worker

    def _send(self, upstream: Upstream) -> asyncio.Future[Failure | None]:
        """Send the request over a connection; return what tells how the answer has ended."""
        route, head = self._route, self.head
        assert route is not None
        self._upstream = upstream
        self._outcome = asyncio.get_running_loop().create_future()
        self._sent_at = monotonic()
        receiver: Receiver = self._resumption or self
        if self._hand_over is not None:
            receiver = self._hand_over.receiver(receiver)
        if route.computed_tokens:
            receiver = without_pieces(route, receiver)
        body, pool = body_for(route, head.path, self.body), upstream.pool
        upstream.send(receiver, head.for_worker(pool.host, len(body), pool.fields), body, head.method == b"HEAD")
        return self._outcome

    # The answer's way from the worker to the client

    def on_upstream_head(self, head: ResponseHead) -> None:
        """The worker's response head: nothing is sent yet."""
        self._response = head
        if not self.answer.started:
            self.answer.announce(head)
            self.on_upstream_payload = self.answer.read
        if self._repeatable and head.status in RETRYABLE_STATUSES:
            self._collected = ErrorAnswer(head, self._record.worker)

    def on_upstream_data(self, data: bytes) -> None:
        """Bytes of the body."""
        if self._begun:
            self.answer.moved = True
            self.answer.write(data)
        elif self._collected is None:
            self._begin(data)
        elif not self._collected.add(data):  # too much to keep: it is the answer
            data, self._collected = self._collected.body, None
            self._begin(data)

    def on_upstream_end(self) -> None:
        """The response is complete."""
        self._upstream = None
        response = self._response
        assert response is not None
        if self._collected is not None:
            self._held, self._collected = self._collected, None
            self._resolve(refused_by(response))
            return
        if not self._begun:
            self._begin(b"")
        assert self._route is not None
        self._services.health.answered(self._route.worker, response.status)
        self._resolve(None)

    def on_upstream_lost(self, failure: Failure) -> None:
        """The response ended before it was complete."""
        self._collected = None
        if self._begun:
            self._cut(failure)
        else:
            self._upstream = None
            self._resolve(failure)

    def _begin(self, data: bytes) -> None:
        """Send head and first bytes: from here on the client has its answer, or the next part of it."""
        response, record = self._response, self._record
        assert response is not None
        now = self._moved_at = monotonic()
        self._begun = True
        if self._route is not None:
            self._route.answered(response.status, now)
            if self._route.to_remember:
                self._services.approximate.answered(self._route.worker.slot)
        self.body = b""  # nobody needs it any more, and streams live long
        if self._plan is not None:
            self._plan.prompt = None
        if self._hand_over is not None:
            self._hand_over.begun(self._route)
        if self.answer.started:
            record.resumptions += 1
            self.answer.write(data)
        else:
            record.first_byte_at = now
            record.status = response.status
            record.stream = record.stream or response.is_event_stream
            self.answer.begin(own_headers(record, self._services.config.server), data)
        if self._client.write_paused:
            self.pause()

    # How it can end before its time

    def on_client_gone(self) -> None:
        """The client has left: the worker is told at once, and nobody is blamed."""
        if not self._answered:
            self._drop_upstream()
            self._interrupt(Outcome.CLIENT_GONE)

    def sweep(self, now: float) -> None:
        """Act on timeouts; ``now`` is monotonic seconds."""
        timeouts = self._timeouts
        if timeouts.total_s and now - self._record.received_at >= timeouts.total_s:
            self._interrupt(UpstreamTimeout(f"The request took longer than {timeouts.total_s:g} s (timeouts.total_s)."))
        elif self._upstream is None:
            return
        elif not self._begun:
            if timeouts.header_s and now - self._sent_at >= timeouts.header_s:
                self.abandon(Failure(FailureKind.TIMEOUT, f"sent no byte within {timeouts.header_s:g} s"))
        elif self.answer.moved or self._client.write_paused:
            self.answer.moved = False
            self._moved_at = now
        elif timeouts.idle_s and now - self._moved_at >= timeouts.idle_s:
            self._cut(Failure(FailureKind.IDLE, f"sent nothing for {timeouts.idle_s:g} s"))

    def pause(self) -> None:
        """The client does not keep up: stop reading from the worker."""
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        """It does again."""
        if self._upstream is not None:
            self._upstream.resume()

    def _interrupt(self, reason: GatewayError | Outcome) -> None:
        if self._ending is None and not self._answered and self.task is not None:
            self._ending = reason
            if self._record.received_at:  # a task that is cancelled before it starts does not run at all
                self.task.cancel()

    def _interrupted(self) -> None:
        if self._answered:
            return  # before the interruption came through
        if self._ending is Outcome.CLIENT_GONE:
            self._record.outcome = Outcome.CLIENT_GONE
        else:
            shutdown = NoWorker("The gateway is shutting down; send the request again.", retry_after_s=1)
            self._fail(self._ending if isinstance(self._ending, GatewayError) else shutdown)

    def abandon(self, failure: Failure) -> None:
        """Give up the attempt under way."""
        self._drop_upstream()
        self._collected = None
        self._resolve(failure)

    def _cut(self, failure: Failure) -> None:
        """End an answer that its worker will not end, or have its rest from another."""
        assert self._route is not None
        if self._resumption is not None and self._resumption.accepts(self._route.worker, failure):
            self.abandon(failure)
            return
        self._services.health.failed(self._route.worker, failure.kind)
        self._fail(UpstreamError(f"Worker {self._route.worker.name} {failure.detail} after its answer had begun."))
        self._resolve(None)

    def _fail(self, error: GatewayError) -> None:
        """End with an error of our own, in the form that what was sent so far allows."""
        record = self._record
        if not self.answer.started:
            self.answer.refuse(error)
            record.outcome = Outcome.UPSTREAM_FAILED if isinstance(error, UpstreamError) else Outcome.REJECTED
        elif not self._answered:
            self.answer.cut(error, self._upstream)
            record.outcome = Outcome.CUT
            if self._resumption is not None:
                self._resumption.failed()
        self._drop_upstream()
        record.status = self.answer.status
        record.reason = error.code or error.type

    def _drop_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None

    def _resolve(self, failure: Failure | None) -> None:
        self._answered = failure is None
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(failure)

    def _account(self) -> None:
        record = self._record
        record.ended_at = monotonic()
        self.answer.note_usage(record)
        if self._route is not None:
            if self._route.computed_tokens:
                record.cached_tokens = cached_before(self._services, self._route, record.cached_tokens)
            fetch = self._route.flight.fetch
            if fetch is not None and record.outcome is Outcome.OK and not record.resumptions:
                self._services.fetches.ended(fetch, record.cached_tokens)
            self._leave()
        if self._hand_over is not None:
            self._hand_over.close()
        self._hand_over = self._resumption = None  # they refer to this exchange
        try:
            self._services.observer.finish(record)
        finally:
            self._client.exchange_ended(self)
