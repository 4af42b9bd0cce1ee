"""``kvway.yaml``: one file, validated whole before anything starts.

Every field's description and default is what ``docs/configuration.md`` prints (``python -m gateway.config``).
Precedence: environment (``KVWAY_SERVER__PORT=9000``) over file over default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from gateway.config_observe import LogConfig as LogConfig
from gateway.config_observe import RecorderConfig as RecorderConfig
from gateway.config_observe import TracingConfig as TracingConfig
from gateway.config_sections import OnDisk, Port, Seconds, Section
from gateway.config_source import describe_mistakes, overlay_environment, read_yaml, without_password
from gateway.config_workers import CacheControlConfig as CacheControlConfig
from gateway.config_workers import DisaggregationConfig, DiscoveryConfig, Workers
from gateway.config_workers import KvEventsConfig as KvEventsConfig
from gateway.config_workers import PrefillConfig as PrefillConfig
from gateway.config_workers import ReplicationConfig as ReplicationConfig
from gateway.config_workers import WorkerConfig as WorkerConfig
from gateway.errors import ConfigError
from gateway.index.redis_address import parse_url
from policies.base import PolicyError, create_policy
from policies.order import OrderError, create_order

RoutePath = Literal["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
"""Where prompts are sent whose worker is chosen by a policy."""


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
    tls_cert: OnDisk | None = Field(None, description="PEM certificate chain; with tls_key: HTTPS; may be renewed")
    tls_key: OnDisk | None = Field(None, description="PEM private key")

    @model_validator(mode="after")
    def _tls_whole(self) -> ServerConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together; give both or neither")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> ServerConfig:
        if self.port == self.admin_port != 0:
            raise ValueError(f"port and admin_port are both {self.port}; the admin port must be another one")
        return self


class AnswerTimeouts(Section):
    """How long a worker may take over an answer. Seconds; 0 switches a timeout off."""

    header_s: Seconds = Field(
        600.0, description="from sending a request to the first byte of its answer (includes queue and prefill)"
    )
    idle_s: Seconds = Field(300.0, description="between two reads of a response body")
    total_s: Seconds = Field(0.0, description="whole request")


class TimeoutsConfig(AnswerTimeouts):
    """Seconds; 0 switches a timeout off."""

    connect_s: Seconds = Field(2.0, description="until a connection to a worker stands")
    client_s: Seconds = Field(
        60.0, description="without progress on the client's side: a request half sent, or an answer not read"
    )


class ResumptionConfig(Section):
    """A stream whose worker dies is continued on another worker from the text sent so far; see docs/streams.md."""

    max_per_stream: int = Field(0, ge=0, le=16, description="how often one stream may be continued; 0: never")
    max_text_bytes: int = Field(
        256 * 2**10, ge=1, description="text kept of each open stream; longer answers are not continued"
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


class ModelConfig(Section):
    """How prompts of one model become tokens, how long its requests may take, and whether streams are continued."""

    tokenizer: Path | None = Field(
        None, description="directory with tokenizer.json (and chat template), or the file itself"
    )
    hub: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?(@[A-Za-z0-9_./-]+)?$",
        description="instead of tokenizer: repository on the Hugging Face hub, owner/name or owner/name@revision; its "
        "tokenizer files are downloaded at start unless they are in the cache (HF_HOME, HF_TOKEN and HF_HUB_OFFLINE "
        "count)",
    )
    chat_template: OnDisk | None = Field(None, description="Jinja file that replaces the tokenizer's own template")
    source: Literal["auto", "tokenizer", "engine", "bytes"] = Field(
        "auto",
        description="tokens from the local tokenizer, the engine's /tokenize, or approximate chunks of bytes; "
        "auto takes the tokenizer where there is one, else bytes",
    )
    media: Literal["prefix", "engine"] = Field(
        "prefix",
        description="prompts with images, audio or video are known up to the first of these; engine: a worker renders "
        "them first, fetching and processing the media, and they are known in full (vLLM with --enable-scale-out)",
    )
    trust_request_chat_template: bool = Field(
        False,
        description="the engines take chat templates from requests (vLLM's flag of this name) and are asked for the "
        "tokens; without it such requests go by load",
    )
    pass_token_ids: bool = Field(
        False,
        description="send the token ids along, so that the engine does not tokenize again: for vLLM 0.32 and later, "
        "which takes them for chats; see docs/prompts.md",
    )
    timeouts: AnswerTimeouts | None = Field(None, description="instead of the top-level ones, for this model")
    resumption: ResumptionConfig | None = Field(None, description="instead of the top-level one, for this model")
    policy: PolicyConfig | None = Field(None, description="instead of the top-level one and of routes, for this model")

    @property
    def tokenizer_files(self) -> Path | str | None:
        """Where the tokenizer comes from: a path, or a repository of the hub."""
        return self.hub if self.tokenizer is None else self.tokenizer

    @model_validator(mode="after")
    def _tokenizer_given(self) -> ModelConfig:
        if self.source == "tokenizer" and self.tokenizer_files is None:
            raise ValueError("source is 'tokenizer', but no tokenizer is given; add tokenizer: with its directory")
        if self.tokenizer is not None and self.hub is not None:
            raise ValueError("tokenizer and hub exclude each other; keep the one that is to be used")
        return self


class SelfCheckConfig(Section):
    """Prompts that an engine renders, too, in the background; a model that differs once is left to the engine."""

    rate: float = Field(0.002, ge=0, le=1, description="share of prompts that are checked; 0 switches the check off")
    max_per_minute: int = Field(10, ge=1, description="no more checks than this in a minute")


class PromptConfig(Section):
    """Tokens and chunks."""

    chunk_tokens: int = Field(256, ge=1, description="tokens per chunk: a multiple of every engine's block size")
    hash_seed: int = Field(0, ge=0, lt=2**32, description="the same on all replicas that share an index")
    segment_cache_bytes: int = Field(
        256 * 2**20, ge=0, description="memory for tokenized segments, known messages and chunk hashes"
    )
    bytes_per_token: float = Field(4.0, gt=0, description="without a tokenizer: estimated bytes of text per token")
    self_check: SelfCheckConfig = SelfCheckConfig()


class IndexConfig(Section):
    """Who holds what."""

    backend: Literal["memory", "redis"] = Field("memory", description="memory: this process; redis: shared by replicas")
    url: str = Field(
        "redis://127.0.0.1:6379/0",
        pattern=r"^(rediss?(\+sentinel|\+cluster)?|unix)://.+",
        description="Redis or Valkey: `redis://host:port/db`, `redis+sentinel://host:port,host:port/service/db`, "
        "`redis+cluster://host:port,host:port` or `unix:///path`; `rediss` instead of `redis`: with TLS",
    )
    username: str | None = Field(None, description="Redis: user; wins over that in the URL")
    password: str | None = Field(None, repr=False, description="Redis: password; wins over that in the URL")
    password_file: OnDisk | None = Field(None, description="Redis: file with the password, read at every connection")
    sentinel_password: str | None = Field(
        None, repr=False, description="password of the Sentinels, where they have one"
    )
    sentinel_password_file: OnDisk | None = Field(None, description="file with it, read at every connection")
    tls_ca: OnDisk | None = Field(None, description="Redis: PEM file of CAs to trust, instead of the system's")
    tls_cert: OnDisk | None = Field(None, description="Redis: PEM certificate chain to show; goes with tls_key")
    tls_key: OnDisk | None = Field(None, description="Redis: PEM private key of tls_cert")
    tls_verify: Literal["full", "ca", "none"] = Field(
        "full", description="Redis: ca accepts a certificate for another host name, none accepts any"
    )
    namespace: str = Field("kvway", pattern=r"^[A-Za-z0-9_.-]+$", description="prefix of every key")
    max_chunks: int = Field(4_000_000, ge=1000, description="bound of the memory index; oldest chunks go first")
    ttl_s: Seconds = Field(86_400.0, description="Redis: a chunk not stored again for this long is forgotten")
    timeout_s: Seconds = Field(0.005, description="Redis: a decision waits at most this long for residency")
    speculative_ttl_s: Seconds = Field(
        2.0,
        description="how long a dispatched prompt counts as cached after its first byte, until events confirm it",
    )
    resync_drift: float = Field(
        0.3,
        ge=0,
        le=1,
        description="a worker whose predicted and reported cached tokens differ by more than this share is read anew; "
        "0: never",
    )
    refill_share: float = Field(
        0.05,
        ge=0,
        le=1,
        description="after a start or a loss, for two minutes: share of the requests to a vLLM that ask it to report "
        "what it holds (vllm_xargs.kv_cache_report_mode); 0 where gateways that are no replicas of this one listen too",
    )

    @field_validator("url")
    @classmethod
    def _leads_somewhere(cls, value: str) -> str:
        parse_url(value)
        return value

    @model_validator(mode="after")
    def _secrets_go_together(self) -> IndexConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together; give both or neither")
        if self.password is not None and self.password_file is not None:
            raise ValueError("password and password_file exclude each other; give one")
        if self.sentinel_password is not None and self.sentinel_password_file is not None:
            raise ValueError("sentinel_password and sentinel_password_file exclude each other; give one")
        return self


class DispatchConfig(Section):
    """When a request goes to its worker: at once, or held here until its turn."""

    order: str = Field(
        "least-work",
        description="none, or in which order held requests go on: fifo, least-work, fair; see docs/dispatch.md",
    )
    params: dict[str, Any] = Field({}, description="parameters of the order")
    budget_tokens: int = Field(
        8192, ge=1, description="uncached tokens that a worker is given at a time, about what one engine step takes in"
    )
    max_held: int = Field(1000, ge=1, description="held per worker; further requests for it get 429")
    piece_tokens: int = Field(
        8192,
        ge=0,
        description="under least-work, prompts with more than twice as many uncached tokens are computed in pieces of "
        "so many, about budget_tokens; 0: as a whole; see docs/dispatch.md",
    )
    make_room: bool = Field(
        True,
        description="under least-work, conversations that have lost their context wait for room on a worker that is "
        "busy prefilling; see docs/dispatch.md",
    )

    @model_validator(mode="after")
    def _known(self) -> DispatchConfig:
        if self.order != "none":
            try:
                create_order(self.order, self.params)
            except OrderError as error:
                raise ValueError(str(error)) from None
        return self


class RouteConfig(Section):
    """What is different for the requests to one path."""

    policy: PolicyConfig | None = Field(None, description="instead of the top-level one, where the model has none")


class RetryConfig(Section):
    """Before the first byte only; never the same worker twice while others exist."""

    max_attempts: int = Field(3, ge=1, le=16, description="attempts per request, the first included")
    budget: float = Field(0.2, ge=0, le=1, description="retries as a share of recent requests")
    budget_min_per_s: float = Field(10.0, ge=0, description="retries per second that are always allowed")
    backoff_s: Seconds = Field(0.025, description="first back-off; doubles per attempt, with full jitter")
    backoff_max_s: Seconds = Field(1.0, description="longest back-off, Retry-After included")


class HealthConfig(Section):
    """Probes and outlier ejection."""

    path: str = Field("/health", pattern=r"^/[!-~]*$", description="path of the active probe")
    interval_s: float = Field(2.0, gt=0, description="time between probes of one worker")
    timeout_s: float = Field(1.0, gt=0, description="a probe that takes longer has failed")
    failures: int = Field(3, ge=1, description="consecutive failures, of probes or requests, that eject a worker")
    successes: int = Field(1, ge=1, description="consecutive good probes that bring it back")
    ejection_max_s: Seconds = Field(
        60.0, description="longest ejection; each one that follows soon after a return lasts twice as long as the last"
    )
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


class Config(Section):
    """The whole of ``kvway.yaml``."""

    server: ServerConfig = ServerConfig()
    workers: Workers = ()
    discovery: DiscoveryConfig = DiscoveryConfig()
    models: dict[str, ModelConfig] = Field({}, description="a model name, or `*` for all others")
    prompt: PromptConfig = PromptConfig()
    index: IndexConfig = IndexConfig()
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    routes: dict[RoutePath, RouteConfig] = Field(
        {}, description="one of " + ", ".join(f"`{path}`" for path in get_args(RoutePath))
    )
    dispatch: DispatchConfig = Field(default_factory=DispatchConfig)
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    replication: ReplicationConfig = ReplicationConfig()
    cache_control: CacheControlConfig = CacheControlConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    retries: RetryConfig = RetryConfig()
    resumption: ResumptionConfig = ResumptionConfig()
    health: HealthConfig = HealthConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()
    recorder: RecorderConfig = RecorderConfig()

    @model_validator(mode="after")
    def _passed_ids_are_checked(self) -> Config:
        for name, model in self.models.items():
            if model.pass_token_ids and not self.prompt.self_check.rate:
                raise ValueError(f"models.{name}.pass_token_ids is on, so prompt.self_check.rate must be above 0")
        return self

    @model_validator(mode="after")
    def _pieces_have_chunks(self) -> Config:
        if 0 < self.dispatch.piece_tokens < self.prompt.chunk_tokens:
            raise ValueError(
                f"dispatch.piece_tokens ({self.dispatch.piece_tokens}) must be 0 or at least prompt.chunk_tokens "
                f"({self.prompt.chunk_tokens})"
            )
        return self

    def masked(self) -> dict[str, Any]:
        """Return the configuration as JSON data, with its secrets masked."""
        data = self.model_dump(mode="json")
        data["index"]["url"] = without_password(data["index"]["url"])
        for secret in ("password", "sentinel_password"):
            data["index"][secret] = data["index"][secret] and "***"
        data["recorder"]["salt"] = data["recorder"]["salt"] and "***"
        return data

    def model_config_for(self, model: str) -> ModelConfig:
        """Return the settings of a model: its own entry, else the one called ``*``, else the defaults."""
        return self.models.get(model) or self.models.get("*") or ModelConfig()


def load_config(path: Path | None, environ: Mapping[str, str] = os.environ, worker_urls: Sequence[str] = ()) -> Config:
    """Read and validate a configuration.

    Args:
        path: YAML file, or None for defaults and environment only.
        environ: where ``KVWAY_*`` overrides are looked up.
        worker_urls: of the option ``--worker``; they stand in place of the section ``workers``.

    Raises:
        ConfigError: the file cannot be read or parsed, or a key or value is wrong. One line per mistake.
    """
    raw = read_yaml(path) if path is not None else {}
    mistakes: list[str] = []
    origins = overlay_environment(raw, environ, Config, mistakes)
    if worker_urls:
        raw["workers"] = [{"url": url} for url in worker_urls]
        origins["workers",] = "--worker"
    try:
        config = Config.model_validate(raw, context="files must exist")
    except ValidationError as error:
        mistakes += describe_mistakes(error, Config, str(path or "configuration"), origins)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return config


if __name__ == "__main__":
    from gateway.config_docs import reference

    print(reference(), end="")
