"""A Kubernetes API server on loopback: lists, watches and nodes as discovery uses them, and faults of real ones."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Object = dict[str, Any]


def pod(name: str, ip: str = "127.0.0.1", ready: bool = True, **metadata: Any) -> Object:
    """A running pod as the API server writes it."""
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ai", "uid": f"uid-{name}", "creationTimestamp": None} | metadata,
        "spec": {"nodeName": "node-1", "containers": [{"name": "engine", "image": "vllm"}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": str(ready), "lastProbeTime": None}],
        },
    }


def service(name: str, address: str = "127.0.0.1", *ports: Object, **metadata: Any) -> Object:
    """A Service as the API server writes it."""
    about = {"name": name, "namespace": "ai", "uid": f"uid-{name}"} | metadata
    return {"kind": "Service", "metadata": about, "spec": {"clusterIP": address, "ports": list(ports)}}


class ApiServer:
    """Holds objects of one namespace and tells watches of their changes, as long as it is let.

    Args:
        tls: serve HTTPS.

    Attributes:
        zones: node name → zone; a node that is not there is refused with 403.
        refusal: what everything is answered with instead: status, headers, message. None: all goes well.
        lists: cleared, lists wait.
        page: most objects in one page of a list.
        token: what it expects to be shown, empty for nothing; None: anything.
        faults: what goes wrong the next time: ``page`` (a list's second page has expired) or ``version`` (what was
            listed is too old to be watched from).
        asked: path and query of every request.
        connections: how many there have been.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.zones: dict[str, str] = {}
        self.refusal: tuple[int, dict[str, str], str] | None = None
        self.lists = asyncio.Event()
        self.lists.set()
        self.page = 500
        self.token: str | None = None
        self.faults: set[str] = set()
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.connections = 0
        self.port = 0
        self._objects: dict[str, Object] = {}
        self._version = 100
        self._history: list[tuple[int, str, Object]] = []
        self._pages: dict[str, list[Object]] = {}
        self._watches: dict[asyncio.StreamWriter, asyncio.Event] = {}
        self._connections: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> ApiServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.lists.set()
        await self.stop()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections, and end those that are open."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()
        while self._connections:
            await asyncio.sleep(0)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def watching(self) -> int:
        return len(self._watches)

    def count(self, *, watches: bool) -> int:
        """How many watches, or lists, were asked for."""
        return sum(("watch" in query) == watches and "/nodes/" not in path for path, query in self.asked)

    def put(self, thing: Object, quietly: bool = False) -> None:
        """Create or change an object; quietly: no watch tells."""
        name = thing["metadata"]["name"]
        self._tell("MODIFIED" if name in self._objects else "ADDED", thing, quietly)
        self._objects[name] = thing

    def delete(self, name: str, quietly: bool = False) -> None:
        """Delete an object; quietly: no watch tells."""
        self._tell("DELETED", self._objects.pop(name), quietly)

    def say(self, kind: str, thing: Object) -> None:
        """Have all watches send a line that means no change: a duplicate, a bookmark, an error."""
        for writer in self._watches:
            _write(writer, {"type": kind, "object": thing})

    def bookmark(self) -> None:
        self._version += 1
        about = {"resourceVersion": str(self._version), "creationTimestamp": None}
        self.say("BOOKMARK", {"kind": "Pod", "metadata": about, "spec": {"containers": None}, "status": {}})

    def cut(self, half: bytes = b'{"type":"DELETED","object":{"metadata":{"na') -> None:
        """Break every watch in the middle of a line."""
        for writer in list(self._watches):
            writer.write(b"%x\r\n%b\r\n" % (len(half), half))
            writer.transport.close()
            self._watches[writer].set()

    def _tell(self, kind: str, thing: Object, quietly: bool) -> None:
        self._version += 1
        thing["metadata"]["resourceVersion"] = str(self._version)
        if not quietly:
            self._history.append((self._version, kind, thing))
            for news in self._watches.values():
                news.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                target = urlsplit(head.split(" ", 2)[1])
                query = dict(parse_qsl(target.query))
                self.asked.append((target.path, query))
                await self._answer(head, target.path, query, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(
        self,
        head: str,
        path: str,
        query: dict[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if self.refusal is not None:
            _refuse(writer, *self.refusal)
        elif self.token is not None and self.token != head.partition("authorization: Bearer ")[2].partition("\r\n")[0]:
            _refuse(writer, 401, {}, "Unauthorized")
        elif "/nodes/" in path:
            node = path.rpartition("/")[2]
            if node in self.zones:
                about = {"name": node, "labels": {"topology.kubernetes.io/zone": self.zones[node]}}
                _reply(writer, 200, {"kind": "Node", "metadata": about})
            else:
                _refuse(writer, 403, {}, f'nodes "{node}" is forbidden')
        elif "watch" in query:
            await self._watch(query, reader, writer)
        else:
            await self.lists.wait()
            self._list(query, writer)

    def _list(self, query: dict[str, str], writer: asyncio.StreamWriter) -> None:
        if "continue" in query and self._strikes("page"):
            _refuse(writer, 410, {}, "The provided continue parameter is too old")
            return
        items = self._pages.pop(query.get("continue", ""), None)
        items = list(self._objects.values()) if items is None else items
        about = {"resourceVersion": str(self._version)}
        if len(items) > self.page:
            about["continue"] = f"page-{len(self.asked)}"
            self._pages[about["continue"]] = items[self.page :]
        _reply(writer, 200, {"kind": "PodList", "metadata": about, "items": items[: self.page] or None})

    def _strikes(self, fault: str) -> bool:
        strikes = fault in self.faults
        self.faults.discard(fault)
        return strikes

    async def _watch(self, query: dict[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = int(query["resourceVersion"])
        if self._strikes("version"):
            _refuse(writer, 410, {}, f"too old resource version: {sent}")
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        news = self._watches[writer] = asyncio.Event()
        gone = asyncio.ensure_future(reader.read(1))
        gone.add_done_callback(lambda _: news.set())
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(int(query["timeoutSeconds"])):
                    await self._tell_all(sent, news, gone, writer)
                    return
            writer.write(b"0\r\n\r\n")
        finally:
            gone.cancel()
            await asyncio.wait([gone])
            del self._watches[writer]

    async def _tell_all(
        self, sent: int, news: asyncio.Event, gone: asyncio.Future[bytes], writer: asyncio.StreamWriter
    ) -> None:
        while not gone.done() and not writer.transport.is_closing():
            for version, kind, thing in self._history:
                if version > sent:
                    sent = version
                    _write(writer, {"type": kind, "object": thing})
            news.clear()
            await news.wait()


def _write(writer: asyncio.StreamWriter, line: Object) -> None:
    text = json.dumps(line).encode() + b"\n"
    for part in (text[:20], text[20:]):  # a line need not come in one piece
        writer.write(b"%x\r\n%b\r\n" % (len(part), part))


def _refuse(writer: asyncio.StreamWriter, status: int, headers: dict[str, str], message: str) -> None:
    _reply(writer, status, {"kind": "Status", "code": status, "message": message}, headers)


def _reply(writer: asyncio.StreamWriter, status: int, content: Object, headers: dict[str, str] | None = None) -> None:
    body = json.dumps(content).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{lines}\r\n".encode() + body)
