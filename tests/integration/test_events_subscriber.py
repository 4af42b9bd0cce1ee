"""The subscriber against a real publisher: what arrives is complete and in order, or is said not to be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import pytest
import zmq
import zmq.asyncio

from gateway.config import KvEventsConfig
from gateway.events.subscriber import BURST, FeedStats, Subscriber
from gateway.tasks import spawn, stop
from tests.events_rig import Publisher, free_endpoint, until, without_ipv6

LOST, RESTARTED = "lost", "restarted"


class Witness:
    """A sink that remembers; ``known`` is what a consumer may still believe."""

    def __init__(self) -> None:
        self.stats = FeedStats()
        self.log: list[bytes | str] = []
        self.late = False
        self.open = asyncio.Event()
        self.open.set()

    @property
    def known(self) -> list[bytes]:
        marks = [at for at, entry in enumerate(self.log) if isinstance(entry, str)]
        return self.log[marks[-1] + 1 :] if marks else list(self.log)

    @property
    def marks(self) -> list[str]:
        return [entry for entry in self.log if isinstance(entry, str)]

    async def take(self, payloads: list[bytes]) -> None:
        await self.open.wait()
        assert 0 < len(payloads) <= BURST
        self.log += payloads

    async def lost(self) -> None:
        self.log.append(LOST)

    async def caught_up(self) -> None:
        pass

    async def joined_late(self) -> None:
        assert not self.known
        self.late = True

    async def restarted(self) -> None:
        self.log.append(RESTARTED)

    async def begun_too_late(self) -> None:
        raise AssertionError("the buffer was never silent")


@asynccontextmanager
async def listening(config: KvEventsConfig, silence_s: float = 0.05) -> AsyncIterator[Witness]:
    witness = Witness()
    context = zmq.asyncio.Context()
    task = spawn(Subscriber(config, witness, witness.stats, context, silence_s).run(), "subscriber")
    try:
        yield witness
    finally:
        await stop(task)
        context.destroy(linger=0)


def config_of(publisher: Publisher) -> KvEventsConfig:
    return KvEventsConfig(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Publisher]]:
    started: list[Publisher] = []

    def start(**settings: object) -> Publisher:
        started.append(Publisher(**settings))
        return started[-1]

    yield start
    for publisher in started:
        await publisher.close()


async def publish(publisher: Publisher, *payloads: bytes, drop: bool = False) -> None:
    for payload in payloads:
        await publisher.publish_payload(payload, drop)


async def in_touch(publisher: Publisher, witness: Witness) -> None:
    """Return once what ``publisher`` sends reaches the subscriber; the first message may have come by replay."""
    await publisher.subscribed.wait()
    for greeting in (b"hello", b"hello again"):
        await publish(publisher, greeting)
        await until(lambda greeting=greeting: witness.known[-1:] == [greeting])


@pytest.mark.parametrize("with_topic", [False, True])
async def test_who_comes_late_gets_all_that_the_buffer_has(start, with_topic):
    publisher = start(with_topic=with_topic)
    await publish(publisher, b"0", b"1", b"2")
    async with listening(config_of(publisher)) as witness:
        await until(lambda: witness.log == [b"0", b"1", b"2"])
        assert publisher.replays_asked[0] == 0
    assert (witness.stats.replayed, witness.late) == (3, False)


async def test_a_buffer_that_no_longer_begins_at_the_beginning_is_taken_as_it_is(start):
    publisher = start(buffer=2)
    await publish(publisher, b"0", b"1", b"2")
    async with listening(config_of(publisher)) as witness:
        await until(lambda: witness.log == [b"1", b"2"])
    assert (witness.stats.lost, witness.late) == (0, True)


@pytest.mark.skipif(without_ipv6(), reason="this machine has no IPv6")
async def test_engines_with_ipv6_addresses_are_heard_and_replay(start):
    publisher = start(endpoints=("tcp://[::1]:0", "tcp://[::1]:0"))
    await publish(publisher, b"0", b"1")
    async with listening(config_of(publisher)) as witness:
        await until(lambda: witness.log == [b"0", b"1"])
        await publisher.subscribed.wait()
        await publish(publisher, b"2")
        await until(lambda: witness.log == [b"0", b"1", b"2"])


async def test_messages_arrive_as_they_are_published(start):
    publisher = start(replay=False)
    async with listening(config_of(publisher)) as witness:
        await in_touch(publisher, witness)
        await publish(publisher, b"a", b"b")
        await until(lambda: witness.log == [b"hello", b"hello again", b"a", b"b"])


@pytest.mark.parametrize("with_topic", [False, True])
async def test_a_gap_is_filled_from_the_first_missing_number(start, with_topic):
    publisher = start(with_topic=with_topic)
    async with listening(config_of(publisher), silence_s=30) as witness:
        await in_touch(publisher, witness)
        seen, missing = len(witness.log), publisher.next
        await publish(publisher, b"a", b"b", drop=True)
        await publish(publisher, b"c")
        await until(lambda: witness.log[seen:] == [b"a", b"b", b"c"])
        # The batch before is asked for too: it shows whether this is still the same process.
        assert publisher.replays_asked[-1] == missing - 1
    assert (witness.stats.gaps, witness.stats.lost, witness.marks) == (1, 0, [])


async def test_what_the_buffer_no_longer_has_is_lost_and_the_rest_begins_anew(start):
    publisher = start(buffer=3)
    async with listening(config_of(publisher), silence_s=30) as witness:
        await in_touch(publisher, witness)
        await publish(publisher, b"a", b"b", b"c", drop=True)
        await publish(publisher, b"d")
        await until(lambda: witness.known == [b"b", b"c", b"d"])
    assert (witness.stats.gaps, witness.stats.lost, witness.marks) == (1, 1, [LOST])


async def test_without_a_replay_socket_every_gap_is_a_loss(start):
    publisher = start(replay=False)
    async with listening(config_of(publisher)) as witness:
        await in_touch(publisher, witness)
        await publish(publisher, b"a", drop=True)
        await publish(publisher, b"b")
        await until(lambda: witness.known == [b"b"])
    assert witness.marks == [LOST]


async def test_the_last_messages_are_missed_even_if_none_follow(start):
    publisher = start()
    async with listening(config_of(publisher)) as witness:
        await in_touch(publisher, witness)
        await publish(publisher, b"a", b"b", drop=True)
        await until(lambda: witness.log[-2:] == [b"a", b"b"])
    assert witness.marks == []


async def replaced(start: Callable[..., Publisher], publisher: Publisher) -> Publisher:
    """Return another process on the same endpoints."""
    await publisher.close()
    endpoints = (publisher.endpoint, publisher.replay_endpoint)
    return start(endpoints=endpoints)


async def test_a_restart_is_noticed_when_numbers_go_back(start):
    publisher = start(replay=False)
    async with listening(config_of(publisher)) as witness:
        await in_touch(publisher, witness)
        await publish(publisher, b"old", b"old")
        await until(lambda: len(witness.log) == publisher.next)
        await publisher.close()
        again = start(replay=False, endpoints=(publisher.endpoint, free_endpoint()))
        await again.subscribed.wait()
        await publish(again, b"new 0", b"new 1")
        await until(lambda: witness.known == [b"new 0", b"new 1"])
    assert witness.marks == [RESTARTED]


async def test_a_restart_is_noticed_in_silence(start):
    publisher = start()
    async with listening(config_of(publisher)) as witness:
        await in_touch(publisher, witness)
        again = await replaced(start, publisher)
        await until(lambda: witness.marks == [RESTARTED])
        await publish(again, b"new")
        await until(lambda: witness.known == [b"new"])


async def test_a_restart_is_noticed_when_the_new_process_is_further_along(start):
    publisher = start()
    async with listening(config_of(publisher)) as witness:
        await in_touch(publisher, witness)
        further = [b"new %d" % number for number in range(publisher.next + 5)]
        again = await replaced(start, publisher)
        await publish(again, *further, drop=True)
        await until(lambda: witness.known == further)
    assert witness.marks == [RESTARTED]


async def test_a_restart_is_noticed_when_the_numbers_of_the_new_process_fit(start):
    publisher = start()
    async with listening(config_of(publisher), silence_s=30) as witness:
        await in_touch(publisher, witness)
        again = await replaced(start, publisher)
        await publish(again, b"new 0", b"new 1", drop=True)
        await again.subscribed.wait()
        await publish(again, b"new 2")
        await until(lambda: witness.known == [b"new 0", b"new 1", b"new 2"])
    assert witness.marks == [RESTARTED]


async def test_the_subscriber_may_bind_and_the_engine_connect(start):
    endpoint = free_endpoint()
    publisher = start(connect_to=endpoint)
    config = KvEventsConfig(endpoint=endpoint, replay_endpoint=publisher.replay_endpoint, mode="bind")
    async with listening(config) as witness:
        await in_touch(publisher, witness)


async def test_the_engine_may_come_later(start):
    endpoints = (free_endpoint(), free_endpoint())
    config = KvEventsConfig(endpoint=endpoints[0], replay_endpoint=endpoints[1])
    async with listening(config) as witness:
        await asyncio.sleep(0.05)
        publisher = start(endpoints=endpoints)
        await publish(publisher, b"0")
        await until(lambda: witness.log == [b"0"])


async def test_only_the_topic_asked_for_is_heard(start):
    publisher = start(replay=False)
    config = KvEventsConfig(endpoint=publisher.endpoint, topic="kv@test")
    async with listening(config) as witness:
        await in_touch(publisher, witness)
        await publisher.send_raw(b"load", (99).to_bytes(8, "big"), b"no batch")
        await publish(publisher, b"a")
        await until(lambda: witness.log[-1] == b"a")
    assert (witness.stats.bad_events, witness.marks) == (0, [])


async def test_messages_that_are_no_batches_are_counted_and_left_out(start):
    publisher = start(replay=False)
    async with listening(config_of(publisher)) as witness:
        await in_touch(publisher, witness)
        await publisher.send_raw(b"one frame")
        await publisher.send_raw(b"", b"short", b"x")
        await publish(publisher, b"a")
        await until(lambda: witness.log[-1] == b"a")
    assert (witness.stats.bad_events, witness.marks) == (2, [])


async def test_a_slow_consumer_loses_nothing(start):
    publisher = start()
    async with listening(config_of(publisher)) as witness:
        await in_touch(publisher, witness)
        seen = len(witness.log)
        payloads = [b"%d" % number for number in range(10 * BURST)]
        witness.open.clear()
        await publish(publisher, *payloads)
        witness.open.set()
        await until(lambda: witness.log[seen:] == payloads)
    assert witness.marks == []


@pytest.mark.slow
async def test_a_replay_longer_than_the_engines_queue_is_asked_for_in_parts(start):
    publisher = start(replay_hwm=50)
    payloads = [b"%d " % number * 5000 for number in range(400)]
    await publish(publisher, *payloads)
    async with listening(config_of(publisher)) as witness:
        await until(lambda: witness.log == payloads)
    assert witness.stats.lost == 0


async def test_a_hole_in_a_replay_is_asked_for_again(start):
    publisher = start()
    payloads = [b"%d" % number for number in range(9)]
    await publish(publisher, *payloads)
    publisher.left_out_once = {3, 4, 7}
    async with listening(config_of(publisher), silence_s=30) as witness:
        await until(lambda: witness.log == payloads)
    assert publisher.replays_asked == [0, 2]


async def test_an_endpoint_in_use_is_an_error(start):
    publisher = start()
    with pytest.raises(zmq.ZMQError):
        async with asyncio.timeout(5):
            context = zmq.asyncio.Context()
            config = KvEventsConfig(endpoint=publisher.endpoint, mode="bind")
            try:
                await Subscriber(config, Witness(), FeedStats(), context).run()
            finally:
                context.destroy(linger=0)


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_is_lost_on_the_way_what_is_believed_in_the_end_is_the_truth(start, seed):
    rng = Random(seed)
    publisher = start(buffer=rng.choice([4, 16, 1000]))
    async with listening(config_of(publisher)) as witness:
        for life in range(3):
            payloads = [b"%d/%d" % (life, number) for number in range(rng.randrange(1, 60))]
            for payload in payloads:
                await publish(publisher, payload, drop=rng.random() < 0.3)
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.random() * 0.02)
            await until(lambda payloads=payloads: witness.known[-1:] == payloads[-1:])
            assert witness.known == payloads[-len(witness.known) :]
            publisher = await replaced(start, publisher)
