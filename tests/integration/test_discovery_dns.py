"""Workers behind a DNS name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.config_workers import DnsConfig
from gateway.fleet.discovery.dns import DnsSource, of_one_family, resolve
from gateway.fleet.discovery.found import Reporter
from gateway.tasks import spawn, stop
from tests.integration.engine import until

CONFIG = DnsConfig.model_validate(
    {"name": "vllm.ai.svc", "interval_s": 0.01, "timeout_s": 0.2, "worker": {"port": 9000, "kv_events_port": 5557}}
)


class Zone:
    """What the resolver answers: addresses, an error, or nothing at all (None)."""

    def __init__(self, *addresses: str) -> None:
        self.answer: list[str] | OSError | None = list(addresses)
        self.asked = 0

    async def resolve(self, name: str) -> list[str]:
        assert name == "vllm.ai.svc"
        self.asked += 1
        while self.answer is None:
            await asyncio.sleep(0.001)
        if isinstance(self.answer, OSError):
            raise self.answer
        return list(self.answer or ())


@asynccontextmanager
async def following(zone: Zone) -> AsyncIterator[Reporter]:
    report = Reporter("dns[0]", lambda: None)
    task = spawn(DnsSource(CONFIG, zone.resolve).run(report), "dns")
    yield report
    await stop(task)


def urls(report: Reporter) -> list[str]:
    return [found.config.url for found in report.workers]


async def test_every_address_is_a_worker_and_answers_in_another_order_change_nothing() -> None:
    zone = Zone("10.0.0.2", "10.0.0.1", "10.0.0.1")
    async with following(zone) as report:
        await until(lambda: urls(report) == ["http://10.0.0.1:9000", "http://10.0.0.2:9000"])
        first = report.workers[0].config
        assert first.kv_events is not None and first.kv_events.endpoint == "tcp://10.0.0.1:5557"
        before = list(report.workers)
        zone.answer, asked = ["10.0.0.1", "10.0.0.2"], zone.asked
        await until(lambda: zone.asked > asked + 1)
        assert report.workers == before
        zone.answer = ["10.0.0.2", "10.0.0.3"]
        await until(lambda: urls(report) == ["http://10.0.0.2:9000", "http://10.0.0.3:9000"])


@pytest.mark.parametrize("failure", [socket.gaierror(socket.EAI_NONAME, "Name or service not known"), None])
async def test_a_resolver_that_fails_or_is_silent_keeps_the_last_answer(failure: OSError | None) -> None:
    zone = Zone("10.0.0.1")
    async with following(zone) as report:
        await until(lambda: len(report.workers) == 1)
        zone.answer = failure
        await until(lambda: report.errors >= 2)
        assert urls(report) == ["http://10.0.0.1:9000"]
        assert "vllm.ai.svc" in report.problem
        zone.answer = ["10.0.0.9"]
        await until(lambda: urls(report) == ["http://10.0.0.9:9000"])
        assert report.problem == ""


async def test_a_resolver_that_is_silent_is_not_asked_a_second_time_meanwhile() -> None:
    zone = Zone()
    zone.answer = None
    async with following(zone) as report:
        await until(lambda: report.errors >= 2)
        assert zone.asked == 1
        zone.answer = ["10.0.0.9"]  # late, but an answer
        await until(lambda: urls(report) == ["http://10.0.0.9:9000"])


async def test_the_systems_resolver_is_asked() -> None:
    assert set(await resolve("localhost")) <= {"127.0.0.1", "::1"}
    assert await resolve("127.0.0.5") == ["127.0.0.5"]
    with pytest.raises((OSError, UnicodeError)):
        await resolve(f"{'x' * 64}.svc")


def test_a_pod_with_two_addresses_counts_once() -> None:
    assert of_one_family(["fd00::1", "10.0.0.1"]) == ["10.0.0.1"]
    assert of_one_family(["fd00::2", "fd00::1"]) == ["fd00::1", "fd00::2"]
