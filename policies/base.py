"""What every policy sees and returns, and the registry that finds a policy by name.

Shapes: ``n`` is the number of candidate workers, one row each, in the same order everywhere: in ``FleetView``, in
``Residency`` and in a decision's costs. Whoever builds the view has already left out workers that are unhealthy,
draining, of another model or of another role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from enum import IntEnum
from importlib.metadata import EntryPoint, entry_points
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Protocol, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from policies.pull import Pull, PullLinks

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Tier(IntEnum):
    """Where a chunk lies, fastest first. The value is the bit of the index nibble."""

    HBM = 0
    HOST = 1
    DISK = 2
    REMOTE = 3


N_TIERS: Final = len(Tier)


class Residency:
    """How much of one prompt each candidate holds, as an unbroken run from its beginning.

    Small fleets are cheaper to go through as lists, large ones as arrays. A residency is built from either and gives
    both: ``hits`` and ``tiers`` return lists, the attributes are arrays, made when they are first asked for.

    Attributes:
        hit_tokens: int64 ``[n]``, leading tokens held in any tier.
        by_tier: int64 ``[n, 4]``, the same tokens by the fastest tier that holds them; rows sum to ``hit_tokens``.
    """

    __slots__ = ("_tiers", "by_tier", "hit_tokens")

    hit_tokens: Ints
    by_tier: Ints

    def __init__(self, hit_tokens: Ints, by_tier: Ints) -> None:
        self._tiers: list[list[int]] | None = None
        self.hit_tokens = hit_tokens
        self.by_tier = by_tier

    @classmethod
    def of_lists(cls, tiers: list[list[int]]) -> Residency:
        """Build a residency from one list of tokens by tier per candidate, ``[n][4]``."""
        residency = cls.__new__(cls)
        residency._tiers = tiers
        return residency

    @classmethod
    def none(cls, n: int) -> Residency:
        """Nobody holds anything: the residency of a lost index or of an unknown prompt."""
        return cls(np.zeros(n, np.int64), np.zeros((n, N_TIERS), np.int64))

    def __getattr__(self, name: str) -> Ints:
        if name not in ("hit_tokens", "by_tier"):
            raise AttributeError(f"Residency has no attribute {name!r}")
        self.by_tier = np.array(self._tiers, np.int64).reshape(-1, N_TIERS)
        self.hit_tokens = self.by_tier.sum(1)
        self._tiers = None  # arrays can be written to: from now on they alone count
        return self.hit_tokens if name == "hit_tokens" else self.by_tier

    def hits(self) -> list[int]:
        """Return ``hit_tokens`` as a list."""
        hits: list[int] = self.hit_tokens.tolist() if self._tiers is None else list(map(sum, self._tiers))
        return hits

    def tiers(self) -> list[list[int]]:
        """Return ``by_tier`` as lists, not to be changed."""
        tiers: list[list[int]] = self.by_tier.tolist() if self._tiers is None else self._tiers
        return tiers

    def hit(self, row: int) -> int:
        """Return the leading tokens that one candidate holds."""
        return int(self.hit_tokens[row]) if self._tiers is None else sum(self._tiers[row])

    def take(self, rows: Ints) -> Residency:
        """Return the residency restricted to ``rows``."""
        return Residency(self.hit_tokens[rows], self.by_tier[rows])


class RoutingRequest(msgspec.Struct):
    """What a policy may know of a request.

    Attributes:
        model: canonical model name (base model of an adapter).
        prompt_tokens: length of the prompt in tokens; an estimate where the prompt could not be tokenized.
        chunks: chained chunk hashes of the prompt (``policies.chunks``), whole chunks only.
        chunk_tokens: tokens per chunk.
        output_tokens: expected number of output tokens (``max_tokens``, or a default).
        session: value of the configured session header or field, or None.
        ring_key: key for consistent hashing when the cache cannot decide; empty → ``chunks[0]``, else the model.
        priority: larger is more urgent.
    """

    model: str
    prompt_tokens: int
    chunks: Sequence[bytes] = ()
    chunk_tokens: int = 256
    output_tokens: int = 256
    session: str | None = None
    ring_key: bytes = b""
    priority: int = 0

    def key(self) -> bytes:
        """Return the consistent-hashing key: explicit key, else first chunk, else model name."""
        return self.ring_key or (self.chunks[0] if self.chunks else self.model.encode())


COLUMNS: Final = (
    "pending_prefill_tokens",  # uncached prompt tokens dispatched whose first output byte has not arrived
    "pending_prefill_s",  # the same, in seconds of this worker's prefill as estimated at dispatch
    "prefilling_since",  # time (the `now` of decide) at which the head of that queue began, 0 = idle
    "running",  # requests dispatched and not yet ended, by this gateway's own ledger
    "decode_tokens",  # context tokens of the requests that are past their first byte
    "engine_running",  # as last scraped from the engine (all gateways together)
    "engine_waiting",
    "kv_usage",  # 0..1, as last scraped
    "kv_capacity_tokens",  # tokens of KV cache in HBM, 0 = unknown
    "prefill_a_s",  # T_prefill(n, p) = a + b·n + c·n·(p + n/2): seconds
    "prefill_b_s",  # seconds per new token
    "prefill_c_s",  # seconds per (new token · context token)
    "reload_host_s",  # seconds per token to bring back from a lower tier
    "reload_disk_s",
    "reload_remote_s",
)
_ROW: Final = {name: row for row, name in enumerate(COLUMNS)}


class FleetView:
    """State of the candidate workers as a structure of arrays.

    ``state`` is one float64 matrix ``[len(COLUMNS), n]``; every column name is also an attribute that returns its row
    of the matrix as a view of shape ``[n]``. One matrix makes the choice of a subset a single indexing operation.

    Attributes:
        names: worker names, ``[n]``; what decisions and metrics call the workers.
        state: the matrix.
        version: changes whenever the set of candidates does; policies key what they derive from ``names`` on it.
        pulls: who can fetch KV from whom; None where nobody can.
    """

    __slots__ = ("names", "pulls", "state", "version")

    def __init__(
        self, names: Sequence[str], state: Floats | None = None, version: int = 0, pulls: PullLinks | None = None
    ) -> None:
        self.names: Sequence[str] = names
        self.state: Floats = np.zeros((len(COLUMNS), len(names))) if state is None else state
        self.version = version
        self.pulls = pulls

    def __len__(self) -> int:
        return len(self.names)

    def __getattr__(self, name: str) -> Floats:
        try:
            return cast("Floats", self.state[_ROW[name]])
        except KeyError:
            raise AttributeError(f"FleetView has no column {name!r}; columns: {', '.join(COLUMNS)}") from None

    def column(self, name: str) -> Floats:
        """Return one column, shape ``[n]``, writable: it is the live state, not a copy."""
        return cast("Floats", self.state[_ROW[name]])

    def take(self, rows: Ints, version: int = 0) -> FleetView:
        """Return a copy of the view restricted to ``rows``."""
        pulls = self.pulls.take(rows) if self.pulls is not None else None
        return FleetView([self.names[row] for row in rows], self.state[:, rows], version, pulls)


Breakdown = list[dict[str, Any]]
Costs = Sequence[float] | Floats | Ints


class Decision:
    """Which worker, and why.

    Attributes:
        worker: row of the chosen candidate.
        expected_hit_tokens: prompt tokens that the chosen worker is expected to have cached, once it has fetched what
            ``pull`` says.
        predicted_ttft: seconds until the first token, 0 where the policy does not predict.
        reason: one word for metrics: ``hit``, ``load``, ``ring``, ``turn`` …
        pull: what the worker is to fetch from another one first; None: nothing.
    """

    __slots__ = ("_costs", "_explain", "expected_hit_tokens", "predicted_ttft", "pull", "reason", "worker")

    def __init__(
        self,
        worker: int,
        expected_hit_tokens: int = 0,
        predicted_ttft: float = 0.0,
        reason: str = "load",
        costs: Costs | None = None,
        explain: Callable[[], Breakdown] | None = None,
        pull: Pull | None = None,
    ) -> None:
        self.worker = worker
        self.expected_hit_tokens = expected_hit_tokens
        self.predicted_ttft = predicted_ttft
        self.reason = reason
        self.pull = pull
        self._costs = costs
        self._explain = explain

    @property
    def fallbacks(self) -> list[int]:
        """The other rows, cheapest first; sorted only when asked for, since most requests need none."""
        if self._costs is None:
            return []
        return [int(row) for row in np.argsort(self._costs, kind="stable") if row != self.worker]

    def breakdown(self, fleet: FleetView) -> Breakdown:
        """Return one dict per candidate: ``worker``, ``chosen``, ``cost`` and the terms of the policy's score."""
        terms: Breakdown = self._explain() if self._explain is not None else [{} for _ in fleet.names]
        for row, (name, entry) in enumerate(zip(fleet.names, terms, strict=True)):
            head: dict[str, Any] = {"worker": name, "chosen": row == self.worker}
            if self._costs is not None:
                head["cost"] = float(self._costs[row])
            terms[row] = head | entry
        return terms


Seed = Annotated[int, msgspec.Meta(ge=0)]


class NoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a policy that has none."""


class SeedParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a policy that draws lots and has no other parameters.

    Attributes:
        seed: makes the draws repeat; without it every process draws differently.
    """

    seed: Seed | None = None


class Policy(Protocol):
    """A routing policy. It may keep state of its own (a turn, learned rates); time reaches it as ``now``.

    ``decide`` is called with at least one candidate and must return one of them; it does not raise for "no".

    Attributes:
        name: what users write in ``policy.name``.
        Params: a frozen msgspec struct, one field per YAML parameter, bounds as ``msgspec.Meta``.
    """

    name: ClassVar[str]
    Params: ClassVar[type[msgspec.Struct]]

    def __init__(self, params: Any, /) -> None: ...

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Choose a worker. ``now`` is monotonic seconds, on the same clock as the fleet's times."""
        ...


class PolicyError(ValueError):
    """An unknown policy, or parameters that it does not accept; the message names the valid ones."""


ENTRY_POINTS: Final = "kvway.policies"
"""Where packages publish policies."""

_REGISTRY: dict[str, type[Policy]] = {}

P = TypeVar("P", bound=type[Policy])


def register(policy: P) -> P:
    """Class decorator: make a policy known under its ``name``."""
    _REGISTRY[policy.name] = policy
    return policy


def known_policies() -> dict[str, type[Policy]]:
    """Return every policy by name: kvway's own, and those of installed packages (entry point ``kvway.policies``).

    A package's policy that cannot be loaded is left out: it must not keep others from being used.
    """
    found = dict(_REGISTRY)
    for point in entry_points(group=ENTRY_POINTS):
        if point.name not in found:
            with suppress(PolicyError):
                found[point.name] = _load(point)
    return found


def _load(point: EntryPoint) -> type[Policy]:
    try:
        policy = point.load()
    except Exception as error:
        raise PolicyError(f"policy {point.name!r} cannot be loaded from {point.value}: {error}") from error
    params = getattr(policy, "Params", None)
    is_policy = isinstance(getattr(policy, "name", None), str) and hasattr(policy, "decide")
    if not (is_policy and isinstance(params, type) and issubclass(params, msgspec.Struct)):
        raise PolicyError(f"{point.value} is no policy: {point.name!r} needs name, Params (msgspec.Struct) and decide")
    return cast("type[Policy]", policy)


def create_policy(name: str, params: Mapping[str, Any] | None = None) -> Policy:
    """Build a policy from its name and its YAML parameters.

    Raises:
        PolicyError: no such policy or none that can be loaded, an unknown parameter, or a value out of range.
    """
    known = known_policies()
    policy = known.get(name)
    if policy is None:
        for point in entry_points(group=ENTRY_POINTS, name=name):
            _load(point)  # raises what kept it from being known
        near = get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PolicyError(f"unknown policy {name!r}.{hint} Known policies: {', '.join(sorted(known))}.")
    fields = policy.Params.__struct_fields__
    try:
        checked = msgspec.convert(finite(params or {}), policy.Params)
    except msgspec.ValidationError as error:
        unknown = next((str(key) for key in params or {} if key not in fields), "")
        if near := get_close_matches(unknown, fields, n=1):
            raise PolicyError(f"policy {name!r}: unknown parameter {unknown!r}; did you mean {near[0]!r}?") from None
        accepted = ", ".join(fields) or "none"
        raise PolicyError(f"policy {name!r}: {error}. Parameters it accepts: {accepted}.") from None
    try:
        return policy(checked)
    except Exception as error:  # a package's policy may check more than bounds
        raise PolicyError(f"policy {name!r} refuses its parameters: {error or type(error).__name__}") from error


def finite(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as they are.

    Raises:
        msgspec.ValidationError: one of them is infinite or not a number, which no bound of a field keeps out.
    """
    for key, value in params.items():
        if isinstance(value, float) and not isfinite(value):
            raise msgspec.ValidationError(f"Expected a finite number, got {value} - at `$.{key}`")
    return dict(params)
