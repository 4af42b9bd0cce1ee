"""What a request tells routing, and what the answer tells accounting."""

from __future__ import annotations

import asyncio
import io
from typing import Any, cast

import msgspec
import pytest

from gateway.config import KvEventsConfig
from gateway.fleet.registry import State
from gateway.observe.record import Outcome
from policies.base import Decision, FleetView, NoParams, Residency, RoutingRequest, Tier
from policies.chunks import ChunkHasher
from tests.peers import LAST_CHUNK, STREAM_HEAD, FakeWorker, Message, Wire, answer, chunk, event, request, response
from tests.relay_rig import MODEL, Rig, relay

USAGE = {"prompt_tokens": 90, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 64}}
CHUNK_TOKENS = 16


def chat(text: str = "hi", **fields: object) -> bytes:
    return request(msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}))


def completion(ids: list[int], **fields: object) -> bytes:
    body = msgspec.json.encode({"model": MODEL, "prompt": ids, **fields})
    return request(body, path="/v1/completions")


IDS = list(range(100, 100 + 5 * CHUNK_TOKENS + 3))


class Watching:
    """A policy that notes what it is asked and takes the candidate with the longest hit, else the first."""

    name = "watching"
    Params = NoParams

    def __init__(self, params: NoParams | None = None) -> None:
        self.seen: list[tuple[RoutingRequest, FleetView, Residency]] = []

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        self.seen.append((request, fleet, residency))
        row = int(residency.hit_tokens.argmax())
        return Decision(row, int(residency.hit_tokens[row]), reason="hit" if residency.hit_tokens[row] else "load")


class Failing(Watching):
    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        raise ZeroDivisionError


class Answering(Watching):
    """A policy that decides the same whatever it is asked."""

    def __init__(self, decision: Any) -> None:
        self.decision = decision

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        return self.decision


async def ask(rig: Rig, raw: bytes) -> Message:
    async with rig.connect() as client:
        client.send(raw)
        return await client.read_message()


def worker() -> FakeWorker:
    return FakeWorker(answer(response()))


async def test_the_policy_sees_the_prompt_and_its_residency() -> None:
    async with worker() as first, worker() as second, relay([first, second]) as rig:
        policy = rig.services.policies.default = Watching()
        await ask(rig, completion(IDS[::-1], max_tokens=7, user="u1"))
        seen, fleet, residency = policy.seen[0]
        assert (seen.model, seen.prompt_tokens, seen.chunk_tokens) == (MODEL, len(IDS), CHUNK_TOKENS)
        assert (seen.output_tokens, seen.session, len(seen.chunks)) == (7, "u1", 5)
        assert list(fleet.names) == ["w0", "w1"]
        assert residency.hit_tokens.tolist() == [0, 0]

        holder = rig.services.registry.workers["w1"]
        chunks = chunks_of_ids(rig)
        await rig.services.index.store(holder.slot, chunks[:3], Tier.HOST, chunks[0])
        got = await ask(rig, completion(IDS))
        assert got.headers["x-kvway-worker"] == "w1"
        assert got.headers["x-kvway-predicted-hit-tokens"] == str(3 * CHUNK_TOKENS)
        record = await rig.settled()
        assert (record.reason, record.predicted_hit_tokens, record.prompt_tokens) == ("hit", 48, len(IDS))
        assert policy.seen[1][2].by_tier[1].tolist() == [0, 48, 0, 0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi " * 100}], "max_tokens": 9}),
        ("/v1/responses", {"input": "hi " * 100, "max_output_tokens": 9}),
    ],
)
async def test_other_apis_are_routed_by_their_prompts_too(path: str, body: dict[str, object]) -> None:
    async with worker() as first, worker() as second, relay([first, second]) as rig:
        policy = rig.services.policies.default = Watching()
        raw = request(msgspec.json.encode({"model": MODEL, **body}), path=path)
        await ask(rig, raw)
        seen = policy.seen[0][0]
        assert seen.output_tokens == 9
        assert len(seen.chunks) >= 300 // (4 * CHUNK_TOKENS)

        holder = rig.services.registry.workers["w1"]
        await rig.services.index.store(holder.slot, seen.chunks, Tier.HBM, seen.chunks[0])
        await ask(rig, raw)
        assert policy.seen[1][2].hit_tokens[1] == len(seen.chunks) * CHUNK_TOKENS


async def test_the_ledger_counts_the_uncached_part_from_dispatch_to_first_byte() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def script(wire: Wire, _: Message) -> None:
        asked.set()
        await go_on.wait()
        go_on.clear()
        wire.send(STREAM_HEAD, chunk(event("a")))
        await go_on.wait()
        wire.send(LAST_CHUNK)

    async with FakeWorker(script) as only, relay([only]) as rig, rig.connect() as client:
        fleet, holder = rig.services.registry.fleet, rig.services.registry.workers["w0"]
        policy = rig.services.policies.default = Watching()
        prompt = chunks_of_ids(rig)
        await rig.services.index.store(holder.slot, prompt[:2], Tier.HBM, prompt[0])
        client.send(completion(IDS, stream=True))
        await asked.wait()
        uncached = len(IDS) - 2 * CHUNK_TOKENS
        assert fleet.pending_prefill_tokens[0] == uncached
        config = holder.config.prefill
        expected_s = config.a_s + config.b_s * uncached + config.c_s * uncached * (32 + uncached / 2)
        assert fleet.pending_prefill_s[0] == pytest.approx(expected_s)
        assert (fleet.running[0], fleet.decode_tokens[0]) == (1, 0)
        go_on.set()
        await client.reader.readuntil(event("a"))
        assert fleet.pending_prefill_tokens[0] == fleet.pending_prefill_s[0] == 0
        assert (fleet.running[0], fleet.decode_tokens[0]) == (1, len(IDS))
        go_on.set()
        await rig.settled()
        assert policy.seen


def chunks_of_ids(rig: Rig) -> list[bytes]:
    """The chunks of ``IDS``, as the gateway names them."""
    packed = b"".join(token.to_bytes(4, "little") for token in IDS)
    hasher = ChunkHasher(CHUNK_TOKENS, rig.services.config.prompt.hash_seed)
    return hasher.chain(hasher.root(MODEL), packed)


async def test_a_prompt_on_its_way_counts_as_cached_where_it_went() -> None:
    asked = asyncio.Event()

    async def silent(wire: Wire, _: Message) -> None:
        asked.set()
        await wire.gone()

    async with FakeWorker(silent) as first, worker() as second, relay([first, second]) as rig, rig.connect() as client:
        rig.services.policies.default = Watching()
        client.send(completion(IDS))
        await asked.wait()
        async with rig.connect() as other:
            asked.clear()
            other.send(completion(IDS))
            await asked.wait()
        client.close()
        await rig.settled()
        # Given up before its first byte: nothing was prefilled.
        residency = await rig.services.index.residency(chunks_of_ids(rig), [0, 1], CHUNK_TOKENS)
        assert residency.hit_tokens.tolist() == [0, 0]


async def test_a_worker_without_events_is_taken_to_hold_what_it_answered() -> None:
    async with worker() as only, relay([only]) as rig:
        await ask(rig, completion(IDS))
        await rig.settled()
        residency = await rig.services.index.residency(chunks_of_ids(rig), [0], CHUNK_TOKENS)
        assert residency.hit_tokens.tolist() == [5 * CHUNK_TOKENS]


async def test_a_worker_with_events_is_believed_only_for_a_while() -> None:
    async with worker() as only, relay([only], index={"speculative_ttl_s": 0.05}) as rig:
        holder = rig.services.registry.workers["w0"]
        events = KvEventsConfig(endpoint="tcp://127.0.0.1:5557")
        holder.config = holder.config.model_copy(update={"kv_events": events})
        await ask(rig, completion(IDS))
        await rig.settled()
        chunks = chunks_of_ids(rig)
        assert (await rig.services.index.residency(chunks, [0], CHUNK_TOKENS)).hit_tokens.tolist() == [80]
        await asyncio.sleep(0.06)
        assert (await rig.services.index.residency(chunks, [0], CHUNK_TOKENS)).hit_tokens.tolist() == [0]


async def test_a_refused_prompt_is_not_taken_to_be_cached() -> None:
    async with FakeWorker(answer(response(b"{}", "400 Bad Request"))) as only, relay([only]) as rig:
        await ask(rig, completion(IDS))
        await rig.settled()
        residency = await rig.services.index.residency(chunks_of_ids(rig), [0], CHUNK_TOKENS)
        assert residency.hit_tokens.tolist() == [0]


async def test_the_decision_headers_can_be_switched_off() -> None:
    async with worker() as only, relay([only], server={"decision_headers": False}) as rig:
        got = await ask(rig, chat())
        assert not [name for name in got.headers if name.startswith("x-kvway")]


async def test_request_ids_come_back() -> None:
    async with worker() as only, relay([only]) as rig:
        got = await ask(rig, request(b'{"model":"m"}', path="/v1/embeddings", headers={"X-Request-ID": "mine"}))
        assert got.headers["x-request-id"] == "mine"
        assert (await rig.settled()).request_id == "mine"
        refused = await ask(rig, request(b"nonsense", headers={"X-Request-ID": "bad"}))
        assert refused.headers["x-request-id"] == "bad"


async def test_trace_context_and_credentials_reach_the_worker_and_internal_headers_do_not() -> None:
    headers = {"traceparent": "00-1-2-01", "Authorization": "Bearer k", "X-KVWay-Worker": "w9", "Keep-Alive": "5"}
    async with worker() as only, relay([only]) as rig:
        await ask(rig, request(b'{"model":"m"}', path="/v1/embeddings", headers=headers))
        asked = only.requests[0].headers
        assert (asked["traceparent"], asked["authorization"]) == ("00-1-2-01", "Bearer k")
        assert "x-kvway-worker" not in asked
        assert "keep-alive" not in asked


async def test_usage_is_read_from_json_answers() -> None:
    async with FakeWorker(answer(response(msgspec.json.encode({"usage": USAGE})))) as only, relay([only]) as rig:
        await ask(rig, chat())
        record = await rig.settled()
        assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (90, 6, 64)


async def test_usage_is_read_from_streams_whether_the_client_asked_or_not() -> None:
    frame = b"data: " + msgspec.json.encode({"choices": [], "usage": USAGE}) + b"\n\n"
    frames = chunk(event("a")) + chunk(frame[:20]) + chunk(frame[20:]) + LAST_CHUNK
    async with FakeWorker(answer(STREAM_HEAD + frames)) as only, relay([only]) as rig:
        got = await ask(rig, chat(stream=True))
        assert got.raw_body == frames
        record = await rig.settled()
        assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (90, 6, 64)
        assert record.stream
        assert 0 < record.received_at <= record.routed_at <= record.first_byte_at <= record.ended_at


async def test_requests_are_logged_once() -> None:
    log = io.BytesIO()
    async with worker() as only, relay([only], log=log) as rig:
        await ask(rig, chat())
        await rig.settled()
        await asyncio.sleep(0.01)
    (line,) = log.getvalue().splitlines()
    assert msgspec.json.decode(line)["worker"] == "w0"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/v1/responses/resp_1/cancel",
        "/v1/messages/count_tokens",
        "/v1/rerank",
        "/v1/score",
        "/v1/tokenize",
        "/v1/audio/speech",
        "/tokenize",
        "/rerank",
        "/v2/rerank",
    ],
)
async def test_every_other_engine_path_is_forwarded_by_load(path: str) -> None:
    async with worker() as only, relay([only]) as rig:
        got = await ask(rig, request(b'{"model":"m"}', path=path))
        assert got.status == 200
        assert only.requests[0].target == path
        record = await rig.settled()
        assert (record.path, record.model, record.reason) == (path, MODEL, "load")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/health", "/metrics", "/", "/v1x", "/admin/workers"])
async def test_other_paths_are_the_apps(path: str) -> None:
    async with worker() as only, relay([only]) as rig:
        await ask(rig, request(method="GET", path=path))
        assert only.requests == []
        assert rig.records == []


async def test_requests_by_load_go_where_least_is_running() -> None:
    async with worker() as first, worker() as second, relay([first, second]) as rig:
        rig.services.registry.fleet.running[0] += 5
        for _ in range(6):
            await ask(rig, request(b'{"model":"m"}', path="/v1/embeddings"))
        assert (len(first.requests), len(second.requests)) == (0, 6)
        rig.services.registry.fleet.running[0] -= 5


async def test_idle_workers_share_requests_by_load() -> None:
    async with worker() as first, worker() as second, relay([first, second]) as rig:
        for _ in range(30):
            await ask(rig, request(method="GET", path="/v1/files"))
        assert first.requests
        assert second.requests


async def test_a_forms_model_is_found() -> None:
    form = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\nContent-Type: audio/wav\r\n\r\n'
        + bytes(range(256)) * 100
        + b'\r\n--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n'
    )
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    async with worker() as only, relay([only]) as rig:
        path = "/v1/audio/transcriptions"
        assert (await ask(rig, request(form, path=path, headers=headers))).status == 200
        assert only.requests[0].body == form
        assert (
            await ask(rig, request(form.replace(b"\r\nm\r\n", b"\r\nother\r\n"), path=path, headers=headers))
        ).status == 404


async def test_a_request_without_model_goes_to_the_only_one() -> None:
    async with worker() as first, worker() as second, relay([first, second]) as rig:
        body = b'{"messages":[{"role":"user","content":"hi"}]}'
        assert (await ask(rig, request(body))).status == 200
        assert (await rig.settled()).model == MODEL
        rig.services.registry.workers["w1"].models = {"other": "other"}
        rig.services.registry.touch()
        got = await ask(rig, request(body))
        assert got.status == 400
        assert msgspec.json.decode(got.body)["error"]["param"] == "model"


async def test_without_a_worker_the_answer_is_503_with_retry_after() -> None:
    async with worker() as only, relay([only]) as rig:
        rig.services.registry.set_state(rig.services.registry.workers["w0"], State.DRAINING)
        for raw in (chat(), request(b"{}", path="/v1/embeddings"), request(method="GET", path="/v1/files")):
            got = await ask(rig, raw)
            assert got.status == 503
            assert int(got.headers["retry-after"]) >= 1
            assert msgspec.json.decode(got.body)["error"]["code"] == "no_worker"
            assert await rig.outcome() is Outcome.REJECTED


async def test_a_policy_that_fails_costs_the_choice_not_the_request(caplog: pytest.LogCaptureFixture) -> None:
    async with worker() as first, worker() as second, relay([first, second]) as rig:
        rig.services.policies.default = Failing()
        assert (await ask(rig, chat())).status == 200
        assert (await rig.settled()).reason == "policy_failed"
        assert "watching" in caplog.text


@pytest.mark.parametrize(
    "decision",
    [None, Decision(2), Decision(-1), Decision(cast("int", 0.0)), Decision(0, reason=cast("str", None))],
    ids=["nothing", "beyond the last", "before the first", "no number", "no reason"],
)
async def test_a_policy_that_chooses_none_of_the_candidates_costs_the_choice_not_the_request(
    decision: Decision | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker() as first, worker() as second, relay([first, second]) as rig:
        rig.services.policies.default = Answering(decision)
        assert (await ask(rig, chat())).status == 200
        assert (await rig.settled()).reason == "policy_failed"
        assert "watching" in caplog.text


async def test_a_prompt_that_cannot_be_prepared_costs_the_choice_not_the_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise OSError("tokenizer is gone")

    async with worker() as only, relay([only]) as rig:
        monkeypatch.setattr(rig.services.prompts, "prompt", fail)
        policy = rig.services.policies.default = Watching()
        assert (await ask(rig, chat("x" * 4000))).status == 200
        assert policy.seen[0][0].chunks == []
        assert policy.seen[0][0].prompt_tokens > 900
        assert "tokenizer is gone" in caplog.text


async def test_a_worker_that_left_keeps_its_requests_and_loses_its_idle_connections() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def script(wire: Wire, message: Message) -> None:
        if message.target == "/v1/embeddings":
            asked.set()
            await go_on.wait()
        wire.send(response())

    async with FakeWorker(script) as only, relay([only]) as rig, rig.connect() as client:
        slow = request(b'{"model":"m"}', path="/v1/embeddings")
        client.send(slow)
        await asked.wait()
        await ask(rig, chat())
        assert only.open == 2
        rig.services.registry.remove("w0")
        go_on.set()
        assert (await client.read_message()).status == 200
        await rig.settled()
        async with asyncio.timeout(2):
            while only.open:
                await asyncio.sleep(0.01)
