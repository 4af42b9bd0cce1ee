"""The set of workers: who they are, what they serve, and the live state that policies read.

All workers' state lies in one matrix (``FleetView.state``), one column of it per worker. The matrix is rebuilt only
when the set of workers changes; a change of health, model or slot merely bumps ``version``, which drops the cached
candidate lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

import numpy as np

from gateway.config import WorkerConfig
from gateway.errors import NoWorker, UnknownModel
from policies.base import COLUMNS, FleetView, Floats, Ints
from policies.pull import NO_GROUP, PullLinks

NO_SLOT = -1
_RUNNING = COLUMNS.index("running")
_NAMED_MODELS = 20  # in an error message; a fleet may serve hundreds of adapters


class State(StrEnum):
    """Whether a worker gets new requests.

    ``READY`` ones do. Where a model has none, its ``EJECTED`` ones do: better a suspect worker than none.
    """

    STARTING = "starting"  # not yet seen healthy
    READY = "ready"
    EJECTED = "ejected"  # failing; comes back by probe
    DRAINING = "draining"  # finishing what it has


@dataclass(slots=True, eq=False)
class Worker:
    """One engine instance with an endpoint.

    ``models`` are the names it answers to: base models map to themselves, LoRA adapters to their base model. ``slot``
    is the position of its present incarnation in the index, ``row`` its column in the registry's state matrix. Until
    ``refill_until`` (monotonic seconds) its residency may be incomplete: some requests ask for a report of it.
    ``fetch_s`` are the seconds per token in which it fetches KV from other workers.
    """

    name: str
    config: WorkerConfig
    host: str
    port: int
    tls: bool
    models: dict[str, str] = field(default_factory=dict)
    state: State = State.STARTING
    slot: int = NO_SLOT
    row: int = -1
    block_size: int = 0
    refill_until: float = 0.0
    fetch_s: float = 0.0
    model_cards: list[dict[str, object]] = field(default_factory=list)

    @classmethod
    def from_config(cls, config: WorkerConfig) -> Worker:
        """Build a worker from its configuration entry; it starts in ``STARTING``."""
        parts = urlsplit(config.url)
        tls = parts.scheme == "https"
        host, port = parts.hostname or "", parts.port or (443 if tls else 80)
        models = {name: name for name in config.models}
        return cls(config.label, config, host, port, tls, models, fetch_s=configured_fetch_s(config))

    @property
    def is_vllm(self) -> bool:
        """Whether its engine says that it is a vLLM."""
        return any(card.get("owned_by") == "vllm" for card in self.model_cards)

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer together that it takes for any of its models; 0 where it does not say."""
        lengths = [card.get("max_model_len") for card in self.model_cards]
        return max((length for length in lengths if isinstance(length, int)), default=0)

    def initial_state(self) -> Floats:
        """Return the worker's column of the state matrix as it joins: what its configuration says, zero elsewhere."""
        prefill, tiers = self.config.prefill, self.config.tiers
        known = {
            "kv_capacity_tokens": self.config.kv_capacity_tokens,
            "prefill_a_s": prefill.a_s,
            "prefill_b_s": prefill.b_s,
            "prefill_c_s": prefill.c_s,
            "reload_host_s": tiers.kv_bytes_per_token / (tiers.host_gb_s * 1e9),
            "reload_disk_s": tiers.kv_bytes_per_token / (tiers.disk_gb_s * 1e9),
            "reload_remote_s": tiers.kv_bytes_per_token / (tiers.remote_gb_s * 1e9),
        }
        return np.array([known.get(column, 0.0) for column in COLUMNS])


@dataclass(slots=True)
class Candidates:
    """The workers that may take one request, row-aligned with ``fleet`` and with ``slots``."""

    model: str
    lora: str | None
    workers: list[Worker]
    slots: list[int]
    fleet: FleetView


@dataclass(slots=True)
class _Selection:
    candidates: Candidates  # with the live state of every worker
    rows: Ints | None  # None: the candidates are every worker, so the live matrix serves without a copy
    names: list[str]
    pulls: PullLinks | None


class Registry:
    """Workers by name, and the candidates for a model.

    Attributes:
        workers: the set.
        fleet: their live state, as this gateway counts and measures it.
        elsewhere: what other replicas have in flight, of the shape of ``fleet.state``; None where nobody has anything.
        version: changes with the set of candidates of any model.
        apart: whether any worker has a role, so that prefill and decode may be apart.
    """

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.fleet = FleetView([])
        self.elsewhere: Floats | None = None
        self.version = 0
        self.apart = False
        self._selections: dict[str, _Selection] = {}
        self._prefilling: dict[str, _Selection | None] = {}
        self._listeners: list[Callable[[Worker, bool], None]] = []
        self._state_listeners: list[Callable[[Worker], None]] = []

    def on_change(self, listener: Callable[[Worker, bool], None]) -> None:
        """Call ``listener(worker, joined)`` whenever a worker joins (True) or leaves (False)."""
        self._listeners.append(listener)

    def on_state(self, listener: Callable[[Worker], None]) -> None:
        """Call ``listener(worker)`` whenever a worker's state has changed."""
        self._state_listeners.append(listener)

    def add(self, worker: Worker) -> None:
        """Add a worker, or replace the one of the same name."""
        if worker.name in self.workers:
            self.remove(worker.name)
        self._rebuild([*self.workers.values(), worker])
        for listener in self._listeners:
            listener(worker, True)

    def remove(self, name: str) -> None:
        """Forget a worker; requests in flight on it keep their connections. Unknown names are ignored."""
        worker = self.workers.get(name)
        if worker is None:
            return
        self._rebuild(other for other in self.workers.values() if other is not worker)
        worker.row = -1
        for listener in self._listeners:
            listener(worker, False)

    def touch(self) -> None:
        """Say that a worker's state, models or slot changed: candidate lists are selected anew."""
        self.version += 1
        self._selections.clear()
        self._prefilling.clear()

    def set_state(self, worker: Worker, state: State) -> None:
        """Change whether a worker gets new requests."""
        if worker.state is not state:
            worker.state = state
            self.touch()
            for listener in self._state_listeners:
                listener(worker)

    def set_fetch_s(self, worker: Worker, seconds: float) -> None:
        """Change the seconds per token in which a worker fetches KV, for all views of it."""
        worker.fetch_s = seconds
        if self.fleet.pulls is not None:
            self.fleet.pulls.s_per_token[worker.row] = seconds
        for selection in (*self._selections.values(), *self._prefilling.values()):
            if selection is not None and selection.pulls is not None and selection.rows is not None:
                selection.pulls.s_per_token[selection.rows == worker.row] = seconds

    def candidates(self, model: str) -> Candidates:
        """Return the workers that may take a request for ``model`` (a base model or an adapter) whole, or decode it.

        Workers with role ``prefill`` are among them only where no other is ready.

        Raises:
            UnknownModel: no worker, healthy or not, serves a model of this name.
            NoWorker: some do, but all are starting or draining; or a starting one has yet to say what it serves.
        """
        return self._view(self._selections.get(model) or self._select(model))

    def prefilling(self, model: str) -> Candidates:
        """Return the workers that prefill prompts of ``model`` for others to decode.

        Raises:
            NoWorker: none is ready.
        """
        if model not in self._prefilling:
            found = [worker for worker in self.workers.values() if worker.config.role == "prefill"]
            ready = [worker for worker in found if worker.state is State.READY and model in worker.models]
            self._prefilling[model] = self._selection(model, ready) if ready else None
        selection = self._prefilling[model]
        if selection is None:
            raise NoWorker(f"No worker with role prefill is ready for model {model!r}.", retry_after_s=1)
        return self._view(selection)

    def _view(self, selection: _Selection) -> Candidates:
        found, rows, fleet, elsewhere = selection.candidates, selection.rows, self.fleet, self.elsewhere
        if rows is not None:
            fleet = FleetView(selection.names, fleet.state[:, rows], self.version, selection.pulls)
            if elsewhere is not None:
                fleet.state += elsewhere[:, rows]
        elif elsewhere is not None:
            fleet = FleetView(fleet.names, fleet.state + elsewhere, fleet.version, fleet.pulls)
        else:
            return found
        return Candidates(found.model, found.lora, found.workers, found.slots, fleet)

    def running(self) -> Floats:
        """Return the number of requests on each worker, those of other replicas included; shape ``[n]``."""
        running = self.fleet.running
        return running if self.elsewhere is None else running + self.elsewhere[_RUNNING]

    def any_ready(self) -> bool:
        """Return whether at least one worker takes requests."""
        return any(worker.state is State.READY for worker in self.workers.values())

    def model_names(self) -> list[str]:
        """Return every model name that some worker serves, sorted."""
        return sorted({name for worker in self.workers.values() for name in worker.models})

    def _select(self, model: str) -> _Selection:
        serving = [worker for worker in self.workers.values() if model in worker.models]
        if not serving:
            raise self._not_served(model)
        ready = _most_able(serving)
        if not ready:
            states = ", ".join(f"{worker.name} is {worker.state}" for worker in serving)
            raise NoWorker(f"No worker is ready for model {model!r}: {states}.", retry_after_s=1)
        selection = self._selections[model] = self._selection(model, ready)
        return selection

    def _selection(self, model: str, ready: list[Worker]) -> _Selection:
        base = ready[0].models[model]
        everyone = len(ready) == len(self.workers)
        slots = [worker.slot for worker in ready]
        return _Selection(
            candidates=Candidates(base, None if base == model else model, ready, slots, self.fleet),
            rows=None if everyone else np.array([worker.row for worker in ready], np.int64),
            names=[worker.name for worker in ready],
            pulls=pull_links(ready),
        )

    def _not_served(self, model: str) -> UnknownModel | NoWorker:
        silent = [
            worker.name for worker in self.workers.values() if not worker.models and worker.state is State.STARTING
        ]
        if silent or not self.workers:
            who = f"{', '.join(silent[:3])} has not yet said what it serves" if silent else "there are no workers yet"
            return NoWorker(f"No worker is known to serve {model!r}: {who}.", retry_after_s=1)
        names = self.model_names()
        known = ", ".join(names[:_NAMED_MODELS]) + (", …" if len(names) > _NAMED_MODELS else "")
        return UnknownModel(f"The model {model!r} is not served here. Models served: {known or 'none'}.", param="model")

    def _rebuild(self, workers: Iterable[Worker]) -> None:
        members = list(workers)
        rows = np.array([worker.row for worker in members], np.int64)
        stay = rows >= 0
        state = np.zeros((len(COLUMNS), len(members)))
        state[:, stay] = self.fleet.state[:, rows[stay]]
        for row, worker in enumerate(members):
            if worker.row < 0:
                state[:, row] = worker.initial_state()
            worker.row = row
        self.workers = {worker.name: worker for worker in members}
        self.elsewhere = None
        self.apart = any(worker.config.role != "mixed" for worker in members)
        self.touch()
        self.fleet = FleetView([worker.name for worker in members], state, self.version, pull_links(members))


def configured_fetch_s(config: WorkerConfig) -> float:
    """Return the seconds per token in which a worker fetches KV, as configured."""
    return config.tiers.kv_bytes_per_token / (config.pull.gb_s * 1e9)


def pull_links(workers: Sequence[Worker]) -> PullLinks | None:
    """Return who of ``workers`` can fetch KV from whom, in their order; None where nobody can."""
    groups = [worker.config.pull.group for worker in workers]
    numbers = {group: number for number, group in enumerate(dict.fromkeys(filter(None, groups)))}
    if not numbers:
        return None
    s_per_token = [worker.fetch_s for worker in workers]
    latency_s = [worker.config.pull.latency_s for worker in workers]
    numbered = [numbers.get(group, NO_GROUP) for group in groups]
    return PullLinks(np.array(numbered, np.int64), np.array(s_per_token), np.array(latency_s))


def _most_able(workers: list[Worker]) -> list[Worker]:
    """Return those that should take whole requests, and decode: ready rather than ejected, not those that prefill."""
    for state in (State.READY, State.EJECTED):
        among = [worker for worker in workers if worker.state is state]
        if found := [worker for worker in among if worker.config.role != "prefill"] or among:
            return found
    return []
