"""The three calls of the Kubernetes API that discovery needs: list, watch, and get a node.

They are plain HTTP with JSON, a watch being a line of JSON per change, so that httpx, which is here anyway, does. What
needs thought, when to list anew, is in ``kube_reflector.py``, and would be ours with any client library.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Generic, TypeVar

import httpx
import msgspec

from gateway.config_workers import KubernetesConfig
from gateway.errors import ConfigError
from gateway.fleet.discovery.kube_objects import Node, Status
from gateway.fleet.polling import system_authorities

T = TypeVar("T")

_CALL_S: Final = 30.0  # a list of thousands of pods takes seconds
_NODE_S: Final = 2.0
_PAGE: Final = 500
_MAX_LINE_BYTES: Final = 16 * 2**20  # etcd holds 1.5 MB per object
_MAX_PAGE_BYTES: Final = 512 * 2**20
_MAX_RETRY_AFTER_S: Final = 60.0
_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class KubeError(Exception):
    """The API server did not do what was asked.

    Attributes:
        retry_after_s: how long it wants to be left alone.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Gone(KubeError):
    """The resource version is too old, or not reached yet: a list must begin anew."""


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct, Generic[T]):
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)
    items: list[T] | None = None


class WatchLine(msgspec.Struct):
    """One line of a watch; what ``object`` is depends on ``type``."""

    type: str
    object: msgspec.Raw


class KubeApi:
    """An API server, and the way to it. Calls are made inside of ``async with``.

    Args:
        config: where it is; by default the one of the cluster we run in.

    Raises:
        ConfigError: it is not said where, and we run in no cluster; or the authorities cannot be read.
    """

    def __init__(self, config: KubernetesConfig) -> None:
        # Another server is not to learn the token with which ours is asked.
        self._token_file = config.token_file or (None if config.api_url else _ACCOUNT / "token")
        self._url = (config.api_url or _in_cluster()).rstrip("/")
        self._tls = _authorities(config.ca_file)
        self._client: httpx.AsyncClient

    async def __aenter__(self) -> KubeApi:
        self._client = httpx.AsyncClient(
            base_url=self._url, timeout=httpx.Timeout(None, connect=5.0), verify=self._tls, trust_env=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def list_all(
        self, resource: str, namespace: str, selector: str, kind: type[T], at_least: str = ""
    ) -> tuple[list[T], str]:
        """Return all objects that a selector matches, and the resource version to watch from.

        Args:
            resource: ``pods`` or ``services``.
            namespace: where.
            selector: of labels.
            kind: what an object is read as.
            at_least: a resource version; the server may answer from its cache if that is no older. Empty: the newest.

        Raises:
            Gone: ``at_least`` is of no use to the server, or pages changed under way.
            KubeError: any other failure.
        """
        query = {"labelSelector": selector, "limit": str(_PAGE)}
        if at_least:
            query |= {"resourceVersion": at_least, "resourceVersionMatch": "NotOlderThan"}
        objects: list[T] = []
        while True:
            async with self._get(f"/api/v1/namespaces/{namespace}/{resource}", query, resource, _CALL_S) as response:
                page = _read(await _body(response, _MAX_PAGE_BYTES), _List[kind])  # type: ignore[valid-type]
            if not page.metadata.resource_version:  # of a proxy in between: as a list, it would empty the fleet
                raise KubeError(f"{self._url} answers something that is no list of {resource}")
            objects += page.items or []
            if not page.metadata.continue_:
                return objects, page.metadata.resource_version
            query = {"labelSelector": selector, "limit": str(_PAGE), "continue": page.metadata.continue_}

    async def watch(
        self, resource: str, namespace: str, selector: str, version: str, time_s: float
    ) -> AsyncGenerator[WatchLine, None]:
        """Yield what changes after ``version``, until the server ends the watch; half a line at the end is dropped.

        Args:
            resource: see ``list_all``, as for the two that follow.
            namespace: where.
            selector: of labels.
            version: from a list or an earlier watch.
            time_s: after which the server is asked to end it, in whole seconds.

        Raises:
            Gone: the server does not know what came after ``version`` any more.
            KubeError: any other failure.
        """
        query = {
            "watch": "1",
            "labelSelector": selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, int(time_s))),
        }
        async with self._get(f"/api/v1/namespaces/{namespace}/{resource}", query, resource, None) as response:
            async for line in _lines(response):
                change = _read(line, WatchLine)
                if change.type == "ERROR":
                    status = _read(change.object, Status)
                    raise _refusal(f"the watch of {resource} in {namespace}", resource, status, status.code)
                yield change

    async def node(self, name: str) -> Node:
        """Return a node.

        Raises:
            KubeError: it is not to be had.
        """
        async with self._get(f"/api/v1/nodes/{name}", {}, "nodes", _NODE_S) as response:
            return _read(await _body(response, _MAX_LINE_BYTES), Node)

    @asynccontextmanager
    async def _get(
        self, path: str, query: dict[str, str], resource: str, timeout_s: float | None
    ) -> AsyncIterator[httpx.Response]:
        """Open a 200 answer. Whatever fails while it is read becomes a ``KubeError``, too."""
        where = f"{self._client.base_url.host}{path}"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream("GET", path, params=query, headers=self._headers()) as response,
            ):
                if response.status_code != 200:
                    status = _status(await _body(response, _MAX_LINE_BYTES))
                    retry_after = response.headers.get("retry-after", "")
                    raise _refusal(where, resource, status, response.status_code, retry_after)
                yield response
        except TimeoutError:
            raise KubeError(f"{where} does not answer within {timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise KubeError(f"{where} fails: {error or type(error).__name__}") from None

    def _headers(self) -> dict[str, str]:
        if self._token_file is None:
            return {}
        try:
            return {"authorization": f"Bearer {self._token_file.read_text('ascii').strip()}"}
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            raise KubeError(f"the token in {self._token_file} cannot be read: {error}") from None


def own_namespace() -> str:
    """Return the namespace of the pod we run in; ``default`` outside of a cluster."""
    try:
        return (_ACCOUNT / "namespace").read_text("utf-8").strip() or "default"
    except OSError:
        return "default"


def _in_cluster() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            "discovery.kubernetes: this is no pod of a cluster (KUBERNETES_SERVICE_HOST is not set); give api_url, for "
            "instance http://127.0.0.1:8001 after `kubectl proxy`"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _authorities(path: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=path) if path.exists() else system_authorities()
    except OSError as error:
        raise ConfigError(f"discovery.kubernetes: ca_file {path} cannot be used: {error}") from None


def _refusal(where: str, resource: str, status: Status, code: int, retry_after: str = "") -> KubeError:
    message = f"{where} answers {code} {status.message or status.reason}".rstrip()
    if code in (410, 504):  # expired; not yet in this server's cache
        return Gone(message)
    if hint := _hint(code, resource):
        message += f"; {hint}"
    return KubeError(message, min(float(retry_after), _MAX_RETRY_AFTER_S) if retry_after.isdecimal() else 0.0)


def _hint(code: int, resource: str) -> str:
    match code, resource:
        case 401, _:
            return "the token of the service account is not accepted: is it mounted (automountServiceAccountToken)?"
        case 403, "nodes":
            return "give the service account a ClusterRole with get on nodes, see docs/discovery.md"
        case 403, _:
            return f"give the service account a Role with list and watch on {resource} there, see docs/discovery.md"
    return ""


def _status(body: bytes) -> Status:
    try:
        return msgspec.json.decode(body, type=Status)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Status(message=body[:200].decode("utf-8", "replace"))


def _read(body: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise KubeError(f"the API server answers what cannot be read: {error}") from None


async def _body(response: httpx.Response, limit: int) -> bytes:
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > limit:
            raise KubeError(f"{response.url.path} answers more than {limit} bytes")
    return bytes(body)


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line:
                yield line
        if len(rest) > _MAX_LINE_BYTES:
            raise KubeError(f"{response.url.path} sends a line of more than {_MAX_LINE_BYTES} bytes")
