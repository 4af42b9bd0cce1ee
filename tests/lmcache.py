"""LMCache's coordinator and servers as peers that answer what they are told to, over real sockets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.peers import FakeWorker, Message, Wire

RECORDED = Path(__file__).parent / "data" / "lmcache-0.5.6"
"""Answers of a real coordinator with chunks of 16 tokens and engines of two ranks."""


def recorded(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_bytes())


def peer(answers: dict[str, Any]) -> FakeWorker:
    """A server that knows ``"METHOD /path"`` → JSON, or ``(status, JSON)``; its answers may change while it runs."""

    async def script(wire: Wire, message: Message) -> None:
        answer = answers.get(f"{message.method} {message.target}", (404, {"detail": "Not Found"}))
        status, content = answer if isinstance(answer, tuple) else (200, answer)
        body = json.dumps(content).encode()
        wire.send(b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))

    return FakeWorker(script)


def asked(server: FakeWorker, method: str, target: str) -> list[Any]:
    """The bodies with which a server was asked for something."""
    found = [message for message in server.requests if (message.method, message.target) == (method, target)]
    return [json.loads(message.body) if message.body else None for message in found]
