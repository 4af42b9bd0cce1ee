"""Workers from the pods or the Services of a Kubernetes cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from gateway.config_workers import KubernetesConfig
from gateway.fleet.discovery.found import Found, Reporter
from gateway.fleet.discovery.kube_api import KubeApi, KubeError, own_namespace
from gateway.fleet.discovery.kube_objects import ZONE_LABEL, Pod, Service, Unusable, engines_of
from gateway.fleet.discovery.kube_reflector import Reflector

log = logging.getLogger("kvway.discovery")

_MAX_ASKED_AT_ONCE: Final = 8
_ZONES_S: Final = 5.0  # workers join without a domain rather than later
_Stamp = tuple[str, str]  # uid and resource version


class KubernetesSource:
    """Follows what a label selector matches.

    Args:
        config: what to follow, and where.

    Raises:
        ConfigError: there is no API server, as far as is known here.
    """

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self._api = KubeApi(config)
        self._zones = _Zones(self._api)
        self._engines: dict[_Stamp, list[Found] | Unusable] = {}  # reading them takes longer than all else
        self._changed = asyncio.Event()
        kind: type[Pod] | type[Service] = Pod if config.kind == "pods" else Service
        self._reflectors = [
            Reflector(self._api, kind, namespace, config, self._changed.set)
            for namespace in config.namespaces or (own_namespace(),)
        ]

    async def run(self, report: Reporter) -> None:
        """See ``Source``."""
        async with self._api, asyncio.TaskGroup() as group:
            for reflector in self._reflectors:
                group.create_task(reflector.run(report.failed))
            while True:
                await self._changed.wait()
                self._changed.clear()
                if all(reflector.tried for reflector in self._reflectors):
                    await self._publish(report)

    async def _publish(self, report: Reporter) -> None:
        objects = [each for reflector in self._reflectors for each in reflector.objects.values()]
        zones = await self._zones.of(each for each in objects if isinstance(each, Pod))
        found: list[Found] = []
        refused: list[str] = []
        engines: dict[_Stamp, list[Found] | Unusable] = {}
        for each in objects:
            stamp = (each.metadata.uid, each.metadata.resource_version)
            engines[stamp] = said = self._engines.get(stamp) or self._read(each, zones.get(each.metadata.uid, ""))
            if isinstance(said, Unusable):
                refused.append(str(said))
            else:
                found += said
        self._engines = engines
        report.found(found, refused, complete=not any(reflector.failing for reflector in self._reflectors))

    def _read(self, engine: Pod | Service, zone: str) -> list[Found] | Unusable:
        try:
            return engines_of(engine, self._config, zone)
        except Unusable as error:
            return error


class _Zones:
    """The failure domain of every pod: its own label, or that of its node.

    A pod keeps what was found first, and be it nothing: a worker whose domain changed would have to join anew.
    """

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._of_pods: dict[str, str] = {}
        self._of_nodes: dict[str, str] = {}
        self._free = asyncio.Semaphore(_MAX_ASKED_AT_ONCE)
        self._told = False

    async def of(self, pods: Iterable[Pod]) -> dict[str, str]:
        """Return uid → zone; empty where it is not known."""
        present = {pod.metadata.uid: pod for pod in pods if pod.address}
        new = [pod for uid, pod in present.items() if uid not in self._of_pods]
        nodes = {pod.spec.node_name for pod in new if pod.spec.node_name and ZONE_LABEL not in pod.metadata.labels}
        with suppress(TimeoutError):
            async with asyncio.timeout(_ZONES_S):
                await asyncio.gather(*(self._ask(node) for node in nodes - self._of_nodes.keys()))
        self._of_pods = {uid: zone for uid, zone in self._of_pods.items() if uid in present}
        in_use = {pod.spec.node_name for pod in present.values()}
        self._of_nodes = {node: zone for node, zone in self._of_nodes.items() if node in in_use}
        for pod in new:
            zone = pod.metadata.labels.get(ZONE_LABEL) or self._of_nodes.get(pod.spec.node_name, "")
            self._of_pods[pod.metadata.uid] = zone
        return self._of_pods

    async def _ask(self, node: str) -> None:
        try:
            async with self._free:
                self._of_nodes[node] = (await self._api.node(node)).metadata.labels.get(ZONE_LABEL, "")
        except KubeError as error:
            if not self._told:
                log.info("the zones of nodes are not known, so that workers have no failure domain: %s", error)
            self._told = True
