"""A copy of some objects of a cluster, kept up to date: a watch for speed, a list for truth.

Each list is followed by a watch from its resource version, and each watch by a list, after ``relist_s`` at the latest.
So whatever a watch may lose (a delete while it was cut, its whole connection without a sign) is put right by the next
list, and there is no other way to recover. A list that follows a watch asks for nothing older than what is known: the
API server answers it from its cache, and it cannot lead back in time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing, suppress
from time import monotonic
from typing import Final, Generic, TypeVar

import msgspec

from gateway.config_workers import KubernetesConfig
from gateway.fleet.discovery.kube_api import Gone, KubeApi, KubeError, WatchLine
from gateway.fleet.discovery.kube_objects import Anything, Pod, Service

T = TypeVar("T", bound=Pod | Service)

_FIRST_PAUSE_S: Final = 0.1
_MAX_PAUSE_S: Final = 5.0
_STEADY_S: Final = 1.0  # what fails after so long is no repetition
_LISTED_PER_S: Final = 20.0  # a thousand pods are listed every 50 s


class Reflector(Generic[T]):
    """The objects that a selector matches in one namespace.

    Args:
        api: where they are.
        kind: ``Pod`` or ``Service``.
        namespace: which.
        config: selector and times.
        changed: called when ``objects`` may have changed, and after every list.

    Attributes:
        objects: by name; stays while the API server cannot be reached.
        tried: whether a list has come, or could not be had.
        failing: whether the last list or watch failed, so that ``objects`` may be outdated.
    """

    def __init__(
        self,
        api: KubeApi,
        kind: type[T],
        namespace: str,
        config: KubernetesConfig,
        changed: Callable[[], None],
    ) -> None:
        self._api = api
        self._kind = kind
        self._resource = config.kind
        self._namespace = namespace
        self._selector = config.selector
        self._relist_s = config.relist_s
        self._changed = changed
        self.objects: dict[str, T] = {}
        self.tried = False
        self.failing = False

    async def run(self, failed: Callable[[str], None]) -> None:
        """Keep ``objects`` up to date until cancelled; ``failed`` is told what goes wrong."""
        version, failures = "", 0
        while True:
            began = monotonic()
            try:
                version = await self._list(version)
                version = await self._watch(version)
                failures = 0
            except KubeError as error:
                if not isinstance(error, Gone) or failures:  # to be told once to list anew is no failure
                    self.failing = True
                    failed(str(error))
                self.tried = True
                self._changed()
                version, failures = "", 1 if monotonic() - began > _STEADY_S else failures + 1
                pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures - 1, 10)) * random.uniform(0.5, 1.0)
                await asyncio.sleep(max(error.retry_after_s, pause_s))

    async def _list(self, at_least: str) -> str:
        objects, version = await self._api.list_all(
            self._resource, self._namespace, self._selector, self._kind, at_least
        )
        self.objects = {each.metadata.name: each for each in objects}
        self.tried, self.failing = True, False
        self._changed()
        return version

    async def _watch(self, version: str) -> str:
        """Take in changes after ``version`` until it is time for a list; return the version then reached."""
        time_s = max(self._relist_s, len(self.objects) / _LISTED_PER_S) * random.uniform(0.8, 1.0)
        watch = self._api.watch(self._resource, self._namespace, self._selector, version, time_s)
        began = monotonic()
        # The server ends a watch in good order, and its connection serves again; a silent one is given up.
        with suppress(TimeoutError):
            async with asyncio.timeout(1.2 * time_s), aclosing(watch) as lines:
                async for line in lines:
                    version = self._take(line) or version
        if monotonic() - began < time_s / 2:
            raise KubeError(f"the watch of {self._resource} in {self._namespace} ended early")
        return version

    def _take(self, line: WatchLine) -> str:
        try:
            if line.type == "BOOKMARK":
                bookmark: Anything = msgspec.json.decode(line.object, type=Anything)
                return bookmark.metadata.resource_version
            changed: T = msgspec.json.decode(line.object, type=self._kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise KubeError(f"the watch of {self._resource} sends what cannot be read: {error}") from None
        if line.type == "DELETED":
            self.objects.pop(changed.metadata.name, None)
        else:
            self.objects[changed.metadata.name] = changed
        self._changed()
        return changed.metadata.resource_version
