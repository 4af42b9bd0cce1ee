"""Hot prefixes get a second home, between real sockets and simulated workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import msgspec
import pytest

from gateway.app import Gateway
from gateway.config import Config, ReplicationConfig
from gateway.fleet.registry import State
from gateway.relay.plan import make_plan
from gateway.replication.replicator import Replicator
from gateway.replication.seen import SeenPrompts
from policies.chunks import ChunkHasher
from sim.faults import Fault
from sim.server import SimWorker
from tests.events_rig import until
from tests.gateway_rig import sim_workers
from tests.peers import FakeWorker, Message, Wire, request
from tests.relay_rig import relay
from tests.sharing_rig import ask, completion, config_for, predicted, replicas
from tests.valkey import Valkey

STORY = "The lighthouse keeper wrote down every ship that passed. " * 12
REPLICATION = {"interval_s": 3600, "least_uses": 4, "least_tokens": 64}  # looks are taken by the tests
ONE_WORKER = {"name": "prefix-hash", "params": {"load_factor": 1000}}  # for all that share a first chunk
SHARED: dict[str, Any] = {"policy": ONE_WORKER, "replication": REPLICATION}
USES = 5
PATH = "/v1/completions"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30) as client:
        yield client


def configured(workers: Sequence[SimWorker], domains: str, **sections: Any) -> dict[str, Any]:
    """One letter per worker names its failure domain, a dot none."""
    sections = {"index": {"backend": "memory"}, "policy": ONE_WORKER, **sections}
    config = config_for(workers, "", **sections)
    config["replication"] = REPLICATION | sections.get("replication", {})
    for entry, domain in zip(config["workers"], domains, strict=True):
        entry["domain"] = domain.strip(".")
    return config


@contextlib.asynccontextmanager
async def serving(workers: Sequence[SimWorker], domains: str, **sections: Any) -> AsyncIterator[Gateway]:
    async with Gateway(Config.model_validate(configured(workers, domains, **sections))) as gateway:
        fleet = gateway.registry.workers.values()
        await until(lambda: all(worker.state is State.READY and worker.models and worker.slot >= 0 for worker in fleet))
        yield gateway


async def use(client: httpx.AsyncClient, gateway: Gateway, prefix: str = STORY, **fields: Any) -> str:
    """Let some clients share a prefix; return the worker that all of them were sent to."""
    answers = [await ask(client, gateway, f"{prefix}Question {number}?", **fields) for number in range(USES)]
    assert all(answer.status_code == 200 for answer in answers)
    [worker] = {answer.headers["x-kvway-worker"] for answer in answers}
    return worker


async def look(*gateways: Gateway) -> None:
    """Have a look, all at the same time, and see the warm-ups through."""
    replicators = [gateway.replicator for gateway in gateways if gateway.replicator is not None]
    await asyncio.gather(*(replicator.look() for replicator in replicators))
    await until(lambda: not any(replicator.under_way for replicator in replicators))


def samples(gateway: Gateway, name: str) -> dict[str, float]:
    """Return the samples of a metric with one label, by its value."""
    found = {}
    for line in gateway.observer.render().decode().splitlines():
        if line.startswith(name + "{"):
            found[line.split('"')[1]] = float(line.rpartition(" ")[2])
    return found


def warm_ups(gateway: Gateway) -> dict[str, float]:
    return samples(gateway, "kvway_replication_warmups_total")


def skipped(gateway: Gateway) -> dict[str, float]:
    return samples(gateway, "kvway_replication_skipped_total")


def by_domains(gateway: Gateway) -> dict[str, float]:
    return samples(gateway, "kvway_replication_prefixes")


async def holders(gateway: Gateway) -> set[str]:
    """Return the workers that are believed to hold the story."""
    hits = await predicted(gateway, STORY)
    return {worker for worker, hit in hits.items() if hit > 100}


async def cached_without(client: httpx.AsyncClient, gateway: Gateway, worker: str, **fields: Any) -> tuple[str, int]:
    """Send a request while ``worker`` takes none; return where it went, and the tokens that were cached there."""
    gateway.registry.set_state(gateway.registry.workers[worker], State.DRAINING)
    answer = await ask(client, gateway, f"{STORY}A new question?", **fields)
    usage = answer.json()["usage"]
    return answer.headers["x-kvway-worker"], usage["prompt_tokens_details"]["cached_tokens"]


async def test_a_hot_prefix_gets_a_home_in_another_failure_domain(client: httpx.AsyncClient) -> None:
    async with sim_workers(3) as workers, serving(workers, "aab") as gateway:
        first = await use(client, gateway)
        assert await holders(gateway) == {first}
        await look(gateway)
        assert warm_ups(gateway) == {"completed": 1}
        assert by_domains(gateway) == {"0": 0, "1": 1, "2": 0}
        answer = await client.get(f"http://127.0.0.1:{gateway.admin_port}/admin/replication")
        [prefix] = answer.json()["prefixes"]
        assert (prefix["model"], prefix["uses"], prefix["tokens"] > 100) == ("tiny", USES, True)
        assert prefix["domains"] == [gateway.registry.workers[first].config.domain]
        [other] = await holders(gateway) - {first}
        domains = {gateway.registry.workers[each].config.domain for each in (first, other)}
        assert domains == {"a", "b"}
        [third] = {"w0", "w1", "w2"} - {first, other}
        gateway.registry.set_state(gateway.registry.workers[third], State.DRAINING)
        where, cached = await cached_without(client, gateway, first)
        assert where == other
        assert cached > 100


@pytest.mark.slow
async def test_without_domains_every_worker_is_one_and_two_of_them_are_enough(client: httpx.AsyncClient) -> None:
    async with sim_workers(3) as workers, serving(workers, "...") as gateway:
        await use(client, gateway)
        for _ in range(3):
            await look(gateway)
            await use(client, gateway)
        assert len(await holders(gateway)) == 2
        assert warm_ups(gateway) == {"completed": 1}
        assert by_domains(gateway)["2"] == 1


@pytest.mark.slow
async def test_in_one_failure_domain_there_is_no_second_home(client: httpx.AsyncClient) -> None:
    async with sim_workers(2) as workers, serving(workers, "aa") as gateway:
        await use(client, gateway)
        await look(gateway)
        assert skipped(gateway) == {"no_room": 1}
        assert not warm_ups(gateway)


@pytest.mark.parametrize("threshold", [{"least_uses": USES + 1}, {"least_tokens": 10_000}])
async def test_what_few_ask_for_or_is_short_stays_where_it_is(
    client: httpx.AsyncClient, threshold: dict[str, int]
) -> None:
    async with sim_workers(2) as workers, serving(workers, "ab", replication=threshold) as gateway:
        await use(client, gateway)
        await look(gateway)
        assert gateway.replicator is not None and gateway.replicator.held == []
        assert not warm_ups(gateway)


async def test_switched_off_nothing_is_kept_and_nothing_looks(client: httpx.AsyncClient) -> None:
    async with sim_workers(2) as workers, serving(workers, "ab", replication={"enabled": False}) as gateway:
        await use(client, gateway)
        assert gateway.replicator is None and gateway.services.seen is None
        assert b"kvway_replication" not in gateway.observer.render()
        answer = await client.get(f"http://127.0.0.1:{gateway.admin_port}/admin/replication")
        assert answer.json() == {"enabled": False, "prefixes": []}


async def test_the_background_task_looks_by_itself(client: httpx.AsyncClient) -> None:
    replication = {"interval_s": 0.3}
    async with sim_workers(2) as workers, serving(workers, "ab", replication=replication) as gateway:

        async def is_held_twice() -> bool:
            await use(client, gateway)
            return len(await holders(gateway)) == 2 and warm_ups(gateway) == {"completed": 1}

        await until(is_held_twice)


async def test_what_warm_ups_take_has_a_bound(client: httpx.AsyncClient) -> None:
    async with sim_workers(2) as workers, serving(workers, "ab", replication={"prefill_share": 1e-6}) as gateway:
        for number in range(3):
            await use(client, gateway, f"Number {number}. {STORY}")
        await look(gateway)
        assert warm_ups(gateway) == {"completed": 1}  # on credit; what it cost is not earned back for hours
        assert skipped(gateway) == {"budget": 2}


async def test_a_busy_fleet_is_left_alone(client: httpx.AsyncClient) -> None:
    async with sim_workers(2) as workers, serving(workers, "ab") as gateway:
        first = await use(client, gateway)
        flight = gateway.ledger.dispatch(gateway.registry.workers[first], 9000, 9000, 60.0, monotonic())
        assert gateway.replicator is not None
        await gateway.replicator.look()
        assert skipped(gateway) == {"load": 1}
        flight.end(monotonic())
        await use(client, gateway)
        await look(gateway)
        assert warm_ups(gateway) == {"completed": 1}


async def test_a_full_worker_gets_no_copies(client: httpx.AsyncClient) -> None:
    async with sim_workers(2) as workers, serving(workers, "ab", metrics={"interval_s": 3600}) as gateway:
        first = await use(client, gateway)
        [other] = {"w0", "w1"} - {first}
        gateway.registry.fleet.kv_usage[gateway.registry.workers[other].row] = 0.95
        await look(gateway)
        assert skipped(gateway) == {"no_room": 1}


@pytest.mark.parametrize("fields", [{"cache_salt": "tenant"}, {"model": "poet"}])
async def test_a_prefix_is_warmed_under_its_salt_and_for_its_adapter(
    client: httpx.AsyncClient, fields: dict[str, str]
) -> None:
    async with sim_workers(2, adapters=("poet",)) as workers, serving(workers, "ab") as gateway:
        first = await use(client, gateway, **fields)
        await look(gateway)
        _, cached = await cached_without(client, gateway, first, **fields)
        _, of_others = await cached_without(client, gateway, first)
        assert cached > 100
        assert of_others == 0


async def test_without_a_tokenizer_a_whole_request_is_sent_for_one_token(client: httpx.AsyncClient) -> None:
    async with sim_workers(2, events=False) as workers, serving(workers, "ab", models={}) as gateway:
        first = await use(client, gateway)
        await look(gateway)
        assert warm_ups(gateway) == {"completed": 1}
        assert len(await holders(gateway)) == 2
        _, cached = await cached_without(client, gateway, first)
        assert cached > 100


async def test_warm_ups_are_in_no_metric_of_requests_and_in_no_recording(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    recorder = {"directory": str(tmp_path), "flush_s": 0.02}
    async with sim_workers(2) as workers, serving(workers, "ab", recorder=recorder) as gateway:
        await use(client, gateway)
        before = samples(gateway, "kvway_prompt_tokens_total"), samples(gateway, "kvway_decisions_total")
        await look(gateway)
        assert warm_ups(gateway) == {"completed": 1}
        assert (samples(gateway, "kvway_prompt_tokens_total"), samples(gateway, "kvway_decisions_total")) == before
        columns = ("pending_prefill_tokens", "pending_prefill_s", "running", "decode_tokens")
        assert not any(gateway.registry.fleet.column(column).any() for column in columns)
    lines = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert sum("input" in line for line in lines) == USES


@pytest.mark.slow
async def test_a_warm_up_that_fails_is_no_retry_and_the_next_look_tries_again(client: httpx.AsyncClient) -> None:
    share = {"prefill_share": 1.0}  # less has not earned a second warm-up by then
    async with sim_workers(2) as workers, serving(workers, "ab", replication=share) as gateway:
        first = await use(client, gateway)
        workers[first == "w0"].begin_fault(Fault("error503", count=1))
        await look(gateway)
        assert warm_ups(gateway) == {"failed": 1}
        assert not samples(gateway, "kvway_retries_total")
        assert await holders(gateway) == {first}
        await use(client, gateway)
        await look(gateway)
        assert warm_ups(gateway) == {"failed": 1, "completed": 1}


async def test_a_worker_that_refuses_warm_ups_is_not_asked_again_for_a_while() -> None:
    async def script(wire: Wire, message: Message) -> None:
        only_clients = b"401 Unauthorized" if b'"max_tokens":1,' in message.body else b"200 OK"
        wire.send(b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}" % only_clients)

    async with FakeWorker(script) as one, FakeWorker(script) as other:
        async with relay([one, other], policy=ONE_WORKER) as rig, rig.connect() as wire:
            rig.services.seen = SeenPrompts(2**20)
            config = ReplicationConfig.model_validate(REPLICATION)
            replicator = Replicator(config, rig.services, ChunkHasher(16), rig.services.seen)
            for _ in range(2):
                for number in range(USES):
                    wire.send(request(msgspec.json.encode(completion(f"{STORY}{number}", model="m")), path=PATH))
                    assert (await wire.read_message()).status == 200
                await replicator.look()
                await until(lambda: not replicator.under_way)
        assert len(one.requests) + len(other.requests) == 2 * USES + 1


def warm_ups_of_all(gateways: Sequence[Gateway]) -> float:
    return sum(sum(warm_ups(gateway).values()) for gateway in gateways)


@pytest.mark.slow
async def test_of_two_replicas_one_warms_a_prefix(valkey: Valkey, client: httpx.AsyncClient) -> None:
    async with sim_workers(3) as workers, replicas(workers, valkey, **SHARED) as gateways:
        for _ in range(2):
            for gateway in gateways:
                await use(client, gateway)
            await look(*gateways)
            assert warm_ups_of_all(gateways) == 1


@pytest.mark.slow
async def test_what_the_first_replica_does_not_see_the_second_warms_one_look_later(
    valkey: Valkey, client: httpx.AsyncClient
) -> None:
    async with sim_workers(3) as workers, replicas(workers, valkey, **SHARED) as gateways:
        end = await end_of_the_story(gateways[0])
        second = next(gateway for gateway in gateways if gateway.sharing is not None and gateway.sharing.rank(end))
        for due in (0, 1):
            await use(client, second)
            await look(*gateways)
            assert warm_ups_of_all(gateways) == due


async def end_of_the_story(gateway: Gateway) -> str:
    """Return the hash of the last chunk that all questions share."""
    chains = []
    for number in range(2):
        body = msgspec.json.encode(completion(f"{STORY}Question {number}?"))
        plan = await make_plan(gateway.services, b"POST", PATH, body, counts=False)
        assert plan.request is not None
        chains.append(plan.request.chunks)
    return [one for one, other in zip(*chains, strict=False) if one == other][-1].hex()
