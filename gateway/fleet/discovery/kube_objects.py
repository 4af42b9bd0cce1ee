"""What pods and Services say of the engines in them: only the fields that are read, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from pydantic import ValidationError

from gateway.config_workers import FoundConfig, KubernetesConfig
from gateway.fleet.discovery.found import Found, engines_at

ZONE_LABEL: Final = "topology.kubernetes.io/zone"
_PREFIX: Final = "kvway.io/"
_LISTS: Final = {"models"}
_SETTINGS: Final = {
    "scheme": "scheme",
    "models": "models",
    "domain": "domain",
    "topology": "topology",
    "kv-capacity-tokens": "kv_capacity_tokens",
    "kv-events-port": "kv_events_port",
    "kv-replay-port": "kv_replay_port",
    "kv-topic": "kv_topic",
    "data-parallel-size": "data_parallel_size",
}
"""Annotation, without its prefix → key of ``FoundConfig``."""
_ROLES: Final = {"both": "mixed", "prefill-decode": "mixed"}  # as llm-d calls them
_ENDED: Final = ("Succeeded", "Failed")


class Metadata(msgspec.Struct, rename="camel"):
    """Of any object."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Anything(msgspec.Struct):
    """An object of which only the metadata matter: a bookmark."""

    metadata: Metadata


class Status(msgspec.Struct):
    """How the API server explains a refusal."""

    code: int = 0
    reason: str = ""
    message: str = ""


class Node(msgspec.Struct):
    """A machine of the cluster."""

    metadata: Metadata


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""


class _PodStatus(msgspec.Struct, rename="camel"):
    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: list[_Condition] = []


class Pod(msgspec.Struct):
    """A pod."""

    metadata: Metadata
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)

    @property
    def address(self) -> str:
        """Where it can be reached now; empty before it has an address, and when it has ended."""
        return "" if self.status.phase in _ENDED else self.status.pod_ip

    @property
    def is_ready(self) -> bool:
        """Whether it should get new requests: it passes its readiness probes, and is not being deleted."""
        ready = any(each.type == "Ready" and each.status == "True" for each in self.status.conditions)
        return ready and self.metadata.deletion_timestamp is None


class _ServicePort(msgspec.Struct):
    port: int
    name: str = ""


class _ServiceSpec(msgspec.Struct, rename="camel"):
    cluster_ip: str = msgspec.field(default="", name="clusterIP")
    ports: list[_ServicePort] = []


class Service(msgspec.Struct):
    """A Service; one with an address of its own stands for one engine."""

    metadata: Metadata
    spec: _ServiceSpec = msgspec.field(default_factory=_ServiceSpec)

    @property
    def address(self) -> str:
        """Its address in the cluster; empty while it has none."""
        return self.spec.cluster_ip

    @property
    def is_ready(self) -> bool:
        """Whether it should get new requests: it is not being deleted."""
        return self.metadata.deletion_timestamp is None

    @property
    def port(self) -> int | None:
        """Its port called ``http``, else its first one."""
        ports = self.spec.ports
        return next((each.port for each in ports if each.name == "http"), ports[0].port if ports else None)


class Unusable(Exception):
    """An object cannot be used as an engine; the message names it and says what to change."""


def engines_of(engine: Pod | Service, config: KubernetesConfig, zone: str = "") -> list[Found]:
    """Return the engines of a pod or Service: one, or one per port; each again one per data-parallel rank.

    Args:
        engine: the object. Without an address it has no engines.
        config: of the source; the object's annotations win over it.
        zone: failure domain, where nothing else says it.

    Raises:
        Unusable: an annotation or label cannot be understood, or the Service has no address of its own.
    """
    address, about = engine.address, engine.metadata
    if not address or about.annotations.get(_PREFIX + "ignore") == "true":
        return []
    if address == "None":
        raise Unusable(f"Service {about.name} is headless; use kind: pods, or discovery.dns with its name")
    settings = _settings(engine, config, zone)
    name = about.name if len(config.namespaces) < 2 else f"{about.name}.{about.namespace}"
    ports = _ports(about) or [engine.port or settings.port if isinstance(engine, Service) else settings.port]
    several = len(ports) > 1
    try:
        return [
            Found(entry, about.uid, engine.is_ready, asks=settings.kv_events_port is None)
            for number, port in enumerate(ports)
            for entry in engines_at(address, port, f"{name}-{port}" if several else name, settings, number)
        ]
    except ValidationError as error:  # a rank's port beyond the last one, for instance
        raise Unusable(f"{_called(engine)}: {error.errors(include_url=False)[0]['msg']}") from None


def _settings(engine: Pod | Service, config: KubernetesConfig, zone: str) -> FoundConfig:
    about = engine.metadata
    changes: dict[str, Any] = {}
    if zone and not config.worker.domain:
        changes["domain"] = zone
    if (role := about.labels.get(config.role_label)) is not None:
        changes["role"] = _ROLES.get(role, role)
    for annotation, key in _SETTINGS.items():
        if (value := about.annotations.get(_PREFIX + annotation)) is not None:
            changes[key] = _listed(value) if key in _LISTS else value
    if not changes:
        return config.worker
    try:
        # Annotations are text: validated as Python values, "8000" is a number.
        return FoundConfig.model_validate(config.worker.model_dump() | changes)
    except ValidationError as error:
        raise Unusable(f"{_called(engine)}: {_mistakes(error, config.role_label)}") from None


def _ports(about: Metadata) -> list[int]:
    text = about.annotations.get(_PREFIX + "port", "")
    ports = _listed(text)
    if not all(port.isdecimal() and 0 < int(port) <= 65535 for port in ports):
        raise Unusable(f"{about.name}: annotation {_PREFIX}port is {text!r}; write a port, or several: 8000,8001")
    return [int(port) for port in ports]


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _mistakes(error: ValidationError, role_label: str) -> str:
    sources: Mapping[str, str] = {key: f"annotation {_PREFIX}{name}" for name, key in _SETTINGS.items()}
    sources = {**sources, "role": f"label {role_label}"}
    return "; ".join(
        f"{sources.get(str(item['loc'][0]), item['loc'][0])} is {item['input']!r}: {item['msg']}"
        for item in error.errors(include_url=False)
    )


def _called(engine: Pod | Service) -> str:
    return f"{type(engine).__name__.lower()} {engine.metadata.name} in {engine.metadata.namespace}"
