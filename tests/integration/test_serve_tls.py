"""``kvway serve`` with TLS on both sides: a certificate of its own, and workers behind a private authority."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import trustme

from gateway.app import Gateway
from gateway.config import Config
from tests.events_rig import until
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


async def test_a_certificate_that_is_renewed_is_shown_and_one_without_its_key_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.serving._RENEWAL_S", 0.01)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    first, second = (trustme.CA().issue_cert("localhost") for _ in range(2))
    first.private_key_pem.write_to_path(key)
    first.cert_chain_pems[0].write_to_path(cert)
    server = {"host": "127.0.0.1", "port": 0, "admin_port": 0, "tls_cert": str(cert), "tls_key": str(key)}
    async with Gateway(
        Config.model_validate({"server": server, "workers": [{"url": "http://127.0.0.1:1"}]})
    ) as gateway:

        async def shows(issued: trustme.LeafCert) -> bool:
            shown = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", gateway.port))
            return shown.encode().strip() == issued.cert_chain_pems[0].bytes().strip()

        assert await shows(first)
        second.cert_chain_pems[0].write_to_path(cert)
        await until(lambda: "the certificate before still counts" in caplog.text)
        assert await shows(first)
        second.private_key_pem.write_to_path(key)
        await until(lambda: shows(second))


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/ready")).status_code == 200
    except httpx.TransportError:  # it has not begun to listen
        return False
