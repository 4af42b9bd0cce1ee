"""``kvway.yaml``: one file, validated whole before anything starts.

Every field's description and default is what ``docs/configuration.md`` prints (``python -m gateway.config``).
Precedence: environment (``KVWAY_SERVER__PORT=9000``) over file over default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gateway.errors import ConfigError
from policies.base import PolicyError, create_policy

Seconds = Annotated[float, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values do not change after start."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerConfig(Section):
    """The two ports: what clients reach, and what operators reach."""

    host: str = Field("0.0.0.0", description="address of the public port")  # noqa: S104 - a gateway is there to be reached
    port: Port = Field(8000, description="public port: the OpenAI API, /health, /ready")
    admin_host: str = Field("127.0.0.1", description="address of the admin port; keep it off the internet")
    admin_port: Port = Field(8001, description="admin port: /metrics and /admin")
    decision_headers: bool = Field(True, description="answer with x-kvway-worker and x-kvway-predicted-hit-tokens")
    max_body_bytes: int = Field(64 * 2**20, ge=1024, description="request bodies above this get 413")
    keep_alive_s: Seconds = Field(75.0, description="how long an idle client connection stays open")
    drain_s: Seconds = Field(30.0, description="after SIGTERM, how long running requests may go on")
    tls_cert: Path | None = Field(None, description="PEM certificate chain; with tls_key, serve HTTPS")
    tls_key: Path | None = Field(None, description="PEM private key")


class KvEventsConfig(Section):
    """Where a worker publishes its KV cache events."""

    endpoint: str = Field(description="ZMQ endpoint of the engine's publisher, tcp://host:5557")
    replay_endpoint: str | None = Field(None, description="ZMQ endpoint of the engine's replay socket, tcp://host:5558")
    topic: str = Field("", description="topic prefix to subscribe to; empty for all")
    mode: Literal["connect", "bind"] = Field(
        "connect",
        description="connect to the engine's bound publisher, or bind and let the engine connect to us",
    )

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _zmq(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"^(tcp|ipc)://.+", value):
            raise ValueError(f"{value!r} is not a ZMQ endpoint; write tcp://host:port")
        return value


class PrefillConfig(Section):
    """Prefill time of a worker, ``a + b·n + c·n·(p + n/2)``: a start value, corrected by what is observed."""

    a_s: Seconds = Field(0.011, description="fixed seconds per prefill")
    b_s: Seconds = Field(58e-6, description="seconds per new token")
    c_s: Seconds = Field(1.05e-9, description="seconds per new token and context token")


class WorkerConfig(Section):
    """One engine instance."""

    url: str = Field(description="base URL, http://host:port")
    name: str | None = Field(None, description="name in metrics and headers; default host:port")
    models: tuple[str, ...] = Field((), description="model names; empty: ask the worker's /v1/models")
    domain: str = Field("", description="failure domain, for instance the zone")
    kv_events: KvEventsConfig | None = Field(None, description="KV events; without them residency is not known")
    kv_capacity_tokens: int = Field(0, ge=0, description="KV cache size; 0: read it from the worker's metrics")
    prefill: PrefillConfig = Field(PrefillConfig(), description="prefill speed to start from")

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        if not re.match(r"^https?://[^/?#\s]+/?$", value):
            raise ValueError(f"{value!r} is not a worker URL; write http://host:port without a path")
        return value.rstrip("/")


class ModelConfig(Section):
    """How prompts of one model become tokens."""

    tokenizer: Path | None = Field(
        None, description="directory with tokenizer.json (and chat template), or the file itself"
    )
    chat_template: Path | None = Field(None, description="Jinja file that replaces the tokenizer's own template")
    source: Literal["auto", "tokenizer", "engine", "bytes"] = Field(
        "auto",
        description="tokens from the local tokenizer, the engine's /tokenize, or approximate chunks of bytes; "
        "auto takes the tokenizer where there is one, else bytes",
    )


class PromptConfig(Section):
    """Tokens and chunks."""

    chunk_tokens: int = Field(256, ge=1, description="tokens per chunk: a multiple of every engine's block size")
    hash_seed: int = Field(0, ge=0, lt=2**32, description="the same on all replicas that share an index")
    segment_cache_bytes: int = Field(256 * 2**20, ge=0, description="memory for tokenized segments")
    bytes_per_token: float = Field(4.0, gt=0, description="without a tokenizer: estimated bytes of text per token")


class IndexConfig(Section):
    """Who holds what."""

    backend: Literal["memory", "redis"] = Field("memory", description="memory: this process; redis: shared by replicas")
    url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey URL")
    namespace: str = Field("kvway", pattern=r"^[A-Za-z0-9_.-]+$", description="prefix of every key")
    max_chunks: int = Field(4_000_000, ge=1000, description="bound of the memory index; oldest chunks go first")
    ttl_s: Seconds = Field(86_400.0, description="Redis: a chunk not stored again for this long is forgotten")
    timeout_s: Seconds = Field(0.005, description="Redis: a decision waits at most this long for residency")
    speculative_ttl_s: Seconds = Field(
        2.0,
        description="how long a dispatched prompt counts as cached after its first byte, until events confirm it",
    )


class PolicyConfig(Section):
    """Which worker."""

    name: str = Field("expected-cost", description="policy; see docs/policies.md")
    params: dict[str, Any] = Field({}, description="parameters of the policy")

    @model_validator(mode="after")
    def _known(self) -> PolicyConfig:
        try:
            create_policy(self.name, self.params)
        except PolicyError as error:
            raise ValueError(str(error)) from None
        return self


class TimeoutsConfig(Section):
    """Seconds; 0 switches a timeout off."""

    connect_s: Seconds = Field(2.0, description="until a connection to a worker stands")
    header_s: Seconds = Field(
        600.0, description="from sending a request to the response head (includes queue and prefill)"
    )
    idle_s: Seconds = Field(300.0, description="between two reads of a response body")
    total_s: Seconds = Field(0.0, description="whole request")


class RetryConfig(Section):
    """Before the first byte only; never the same worker twice while others exist."""

    max_attempts: int = Field(3, ge=1, le=16, description="attempts per request, the first included")
    budget: float = Field(0.2, ge=0, le=1, description="retries as a share of recent requests")
    budget_min_per_s: float = Field(10.0, ge=0, description="retries per second that are always allowed")
    backoff_s: Seconds = Field(0.025, description="first back-off; doubles per attempt, with full jitter")
    backoff_max_s: Seconds = Field(1.0, description="longest back-off, Retry-After included")


class HealthConfig(Section):
    """Probes and outlier ejection."""

    path: str = Field("/health", description="path of the active probe")
    interval_s: float = Field(2.0, gt=0, description="time between probes of one worker")
    timeout_s: float = Field(1.0, gt=0, description="a probe that takes longer has failed")
    failures: int = Field(3, ge=1, description="consecutive failures, of probes or requests, that eject a worker")
    successes: int = Field(1, ge=1, description="consecutive good probes that bring it back")
    panic_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="workers are not ejected for failing requests when fewer than this share would remain",
    )


class MetricsConfig(Section):
    """Scraping of the workers' /metrics."""

    interval_s: float = Field(1.0, gt=0, description="time between scrapes of one worker")
    stale_s: float = Field(10.0, gt=0, description="older figures are not used")


class LogConfig(Section):
    """Logs go to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level")
    format: Literal["json", "text"] = Field("json", description="json: one object a line")
    requests: bool = Field(True, description="one line per request")


class Config(Section):
    """The whole of ``kvway.yaml``."""

    server: ServerConfig = ServerConfig()
    workers: tuple[WorkerConfig, ...] = ()
    models: dict[str, ModelConfig] = Field({}, description="per model name; '*' is the default")
    prompt: PromptConfig = PromptConfig()
    index: IndexConfig = IndexConfig()
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    timeouts: TimeoutsConfig = TimeoutsConfig()
    retries: RetryConfig = RetryConfig()
    health: HealthConfig = HealthConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _worker_names_differ(self) -> Config:
        seen: set[str] = set()
        for worker in self.workers:
            name = worker.name or worker.url
            if name in seen:
                raise ValueError(f"workers: two workers are called {name!r}; names must differ")
            seen.add(name)
        return self

    def masked(self) -> dict[str, Any]:
        """Return the configuration as JSON data, with the password of the index URL masked."""
        data = self.model_dump(mode="json")
        data["index"]["url"] = re.sub(r"(://[^:@/]*):[^@/]*@", r"\1:***@", data["index"]["url"])
        return data

    def model_config_for(self, model: str) -> ModelConfig:
        """Return the settings of a model: its own entry, else the one called ``*``, else the defaults."""
        return self.models.get(model) or self.models.get("*") or ModelConfig()


def load_config(
    path: Path | None, environ: Mapping[str, str] = os.environ, overrides: Mapping[str, Any] | None = None
) -> Config:
    """Read and validate a configuration.

    Args:
        path: YAML file, or None for defaults and environment only.
        environ: where ``KVWAY_*`` overrides are looked up.
        overrides: top-level sections that win over file and environment (command-line options).

    Raises:
        ConfigError: the file cannot be read or parsed, or a key or value is wrong. One line per mistake.
    """
    raw: Any = {}
    if path is not None:
        try:
            raw = yaml.safe_load(path.read_text("utf-8")) or {}
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: is not valid YAML: {_one_line(error)}") from None
    source = str(path) if path is not None else "configuration"
    if not isinstance(raw, dict):
        raise ConfigError(f"{source}: must be a mapping of sections such as 'server:' and 'workers:'")
    _apply_environment(raw, environ)
    raw.update(overrides or {})
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {line}" for line in _mistakes(error))) from None


def _apply_environment(raw: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Write ``KVWAY_SECTION__KEY=value`` into ``raw``; values are YAML, so numbers, booleans and lists work."""
    for variable, text in environ.items():
        if not variable.startswith("KVWAY_"):
            continue
        *parents, key = variable.removeprefix("KVWAY_").lower().split("__")
        section = raw
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{variable}: {parent!r} is not a section; use KVWAY_SECTION__KEY")
        try:
            section[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{variable}: is not a valid value: {_one_line(error)}") from None


def _mistakes(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"]) or "(top level)"
        if item["type"] == "extra_forbidden":
            valid = _keys_beside(item["loc"])
            near = get_close_matches(str(item["loc"][-1]), valid, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}"
            lines.append(f"unknown key {where!r}; {hint}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{where}: {message}")
    return lines


def _keys_beside(loc: tuple[int | str, ...]) -> list[str]:
    """Return the valid keys of the section in which ``loc`` lies."""
    model: type[BaseModel] = Config
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        info = model.model_fields.get(part)
        if info is None:  # a key of a mapping, as a model name in `models`
            continue
        nested = _models_in(info.annotation)
        if nested:
            model = nested[0]
    return list(model.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
