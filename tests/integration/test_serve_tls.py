"""``kvway serve`` with TLS on both sides: a certificate of its own, and workers behind a private authority."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.config import ServerConfig
from gateway.serving import Server
from gateway.tasks import spawn
from tests.events_rig import until
from tests.integration.conftest import make_certificate
from tests.peers import FakeWorker, Message, Wire, response
from tests.processes import free_ports, kvway, running, write_config

START_S = 40
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
MODELS = msgspec.json.encode({"object": "list", "data": [{"id": "m", "object": "model"}]})


async def engine(wire: Wire, asked: Message) -> None:
    """Answer as a worker does, at least as far as a gateway asks."""
    answers = {"/health": b"", "/metrics": b"", "/v1/models": MODELS, "/v1/chat/completions": b'{"secret":true}'}
    wire.send(response(answers[asked.target]) if asked.target in answers else response(b"", "404 Not Found"))


@pytest.fixture
def serving(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    return context


async def test_clients_probes_and_requests_are_encrypted(
    tmp_path: Path, certificate: tuple[Path, Path], serving: ssl.SSLContext
) -> None:
    port, admin_port = free_ports(2)
    cert, key = map(str, certificate)
    server: dict[str, Any] = {"host": "127.0.0.1", "port": port, "admin_port": admin_port}
    async with FakeWorker(engine, serving) as worker:
        config = {"server": server | {"tls_cert": cert, "tls_key": key}, "workers": [{"url": worker.url}]}
        command = kvway("serve", "-c", write_config(tmp_path, config))
        trusting = ssl.create_default_context(cafile=cert)
        url = f"https://localhost:{port}"
        with running(command, SSL_CERT_FILE=cert):
            async with httpx.AsyncClient(verify=trusting) as client:
                await until(lambda: _is_ready(client, url), within_s=START_S)
                answer = await client.post(f"{url}/v1/chat/completions", json=CHAT)
            assert (answer.status_code, answer.json()) == (200, {"secret": True})
            async with httpx.AsyncClient() as plain:
                with pytest.raises(httpx.TransportError):
                    await plain.get(f"http://localhost:{port}/health")
    assert {"/health", "/v1/models", "/metrics"} <= {message.target for message in worker.requests}


async def test_a_renewed_certificate_is_shown_to_those_who_come_after_it(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    cert, key = make_certificate(shown)
    settings = ServerConfig.model_validate({"tls_cert": cert, "tls_key": key})
    server = Server(FastAPI(), "127.0.0.1", 0, settings, HttpToolsProtocol)
    server.bind()
    serving = spawn(server.run_bound(), "serve")
    await server.up.wait()
    first = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", server.port))
    assert first.strip() == cert.read_text().strip()

    renewed, renewed_key = make_certificate(tmp_path)
    assert server.config.callback_notify is not None  # is called every few seconds
    cert.write_bytes(renewed.read_bytes())
    await server.config.callback_notify()  # its key is yet to come
    assert await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", server.port)) == first
    key.write_bytes(renewed_key.read_bytes())
    await server.config.callback_notify()
    second = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", server.port))
    assert second.strip() == renewed.read_text().strip() != first.strip()
    server.should_exit = True
    await serving


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/ready")).status_code == 200
    except httpx.TransportError:  # it has not begun to listen
        return False
