"""A simulated worker as a real HTTP and ZMQ server: to whoever looks from outside, a vLLM 0.32.

``SimWorker`` runs one inside an asyncio program, ``serve`` as a process of its own (``kvway worker``).
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Self

import uvicorn
import zmq
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sim.cache import CacheEvent
from sim.clock import WorkerClock
from sim.endpoints import Endpoints, FaultGate
from sim.engine_loop import EngineLoop
from sim.faults import Fault, Faults
from sim.handover import HandOvers
from sim.inference import Inference
from sim.kv_events import EventPublisher
from sim.metrics import WorkerMetrics
from sim.profiles import find_profile
from sim.settings import WorkerSettings
from sim.tokens import load_tokenizer
from sim.worker import Worker

__all__ = ["Fault", "SimWorker", "WorkerSettings", "serve"]


class SimWorker:
    """A simulated worker, serving between ``async with`` and its end.

    Args:
        settings: what it is.

    Attributes:
        url: base URL of its HTTP server; the port is the real one even where 0 was asked for.
        publisher: of its KV events, with the real endpoints; None without events.
        engine: the engine inside, for tests to look at.
        died: set once the fault ``die`` has struck.

    Raises:
        ValueError: the tokenizer cannot be read, or an event endpoint cannot be bound (on entering).
        OSError: the HTTP port cannot be bound (on entering).
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.url = ""
        self.publisher: EventPublisher | None = None
        self.died = asyncio.Event()
        self._faults = Faults()
        self._answering = asyncio.Event()
        self._answering.set()
        self._hang: asyncio.TimerHandle | None = None
        self._replays: asyncio.Task[None] | None = None
        self._http: uvicorn.Server | None = None

    async def __aenter__(self) -> Self:
        settings = self.settings
        tokenizer = load_tokenizer(settings.tokenizer)
        worker = Worker(settings.limits, find_profile(settings.profile))
        clock = WorkerClock(settings.speed)
        metrics = WorkerMetrics(worker, clock, settings.model, settings.adapters)
        self.engine = EngineLoop(worker, clock, metrics, self._faults, self._publish)
        self._hand_overs = HandOvers(settings, clock, self._faults, worker.profile.kv_bytes_per_token)
        inference = Inference(settings, tokenizer, self.engine, metrics, self._faults, self._hand_overs)
        listener = _listen(settings.host, settings.port)
        try:
            self._start_events()
        except ValueError:
            listener.close()
            raise
        parts = (self.engine, inference, metrics, self.publisher, self._hand_overs, self.begin_fault)
        endpoints = Endpoints(settings, tokenizer, *parts)
        await self._start_http(endpoints, listener)
        for fault in settings.faults:
            self.begin_fault(fault)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop_everything()
        tasks = [*self._http.server_state.tasks] if self._http is not None else []
        tasks += [self._replays] if self._replays is not None else []
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._hand_overs.close()

    def begin_fault(self, fault: Fault) -> None:
        """Do something wrong from now on; ``none`` ends it."""
        self._faults.set(fault)
        if fault.kind == "die":
            self._drop_everything()
            self.died.set()
        elif fault.kind == "hang":
            self._end_hang()
            self._answering.clear()
            self.engine.pause()
            if fault.seconds:
                self._hang = asyncio.get_running_loop().call_later(fault.seconds, self._end_hang)
        elif fault.kind == "none":
            self._end_hang()

    def _end_hang(self) -> None:
        if self._hang is not None:
            self._hang.cancel()
            self._hang = None
        self._answering.set()
        self.engine.resume()

    def _publish(self, events: list[CacheEvent]) -> None:
        if self.publisher is not None:
            self.publisher.publish(events)

    def _start_events(self) -> None:
        settings = self.settings
        if settings.kv_events is None:
            return
        try:
            self.publisher = EventPublisher(
                settings.block_size,
                settings.kv_events,
                settings.kv_replay,
                settings.kv_topic,
                settings.event_format,
                settings.replay_format,
                settings.kv_connect,
                {adapter: number for number, adapter in enumerate(settings.adapters, 1)},
            )
        except zmq.ZMQError as error:
            endpoints = ", ".join(filter(None, (settings.kv_events, settings.kv_replay)))
            raise ValueError(f"KV event endpoints {endpoints}: {error}") from None
        self._replays = asyncio.get_running_loop().create_task(self.publisher.serve_replays())

    async def _start_http(self, endpoints: Endpoints, listener: socket.socket) -> None:
        app = FaultGate(endpoints.app(), self._faults, self._answering)
        config = uvicorn.Config(app, http=_Protocol, ws="none", lifespan="off", log_config=None, access_log=False)
        config.load()
        # `Server.serve` would take the process's signals; its parts do not.
        self._http = uvicorn.Server(config)
        self._http.lifespan = config.lifespan_class(config)
        await self._http.startup(sockets=[listener])
        self._hand_overs.address = _address(listener)
        self.url = "http://{}:{}".format(*self._hand_overs.address)

    def _drop_everything(self) -> None:
        """Close every socket at once and abort every sequence, as the end of a process does."""
        if self._http is not None:
            for server in self._http.servers:
                server.close()
            for connection in list(self._http.server_state.connections):
                connection.transport.abort()
        if self._hang is not None:
            self._hang.cancel()
        self._answering.set()
        self.engine.close()
        self._hand_overs.drop()
        if self._replays is not None:
            self._replays.cancel()
        if self.publisher is not None:
            self.publisher.close()


class _Protocol(HttpToolsProtocol):
    """Uvicorn's HTTP protocol, which shows its transport to the application: a stream is cut there."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["transport"] = self.transport  # type: ignore[typeddict-unknown-key]


async def serve(settings: WorkerSettings, started: Callable[[SimWorker], None] | None = None) -> int:
    """Run a worker until SIGTERM, SIGINT or the fault ``die``.

    Args:
        settings: what it is.
        started: called once it answers.

    Returns:
        Exit code of the process: 0 after a signal, 1 after ``die``.

    Raises:
        ValueError, OSError: as ``SimWorker``.
    """
    loop = asyncio.get_running_loop()
    async with SimWorker(settings) as worker:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        if started is not None:
            started(worker)
        ends = [loop.create_task(event.wait()) for event in (stopped, worker.died)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        return 1 if worker.died.is_set() else 0


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}, port {port}: {error.strerror}") from None
    return listener


def _address(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()[:2]
    return (f"[{host}]" if ":" in host else host), port
