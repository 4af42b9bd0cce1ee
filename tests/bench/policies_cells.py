"""The cells in which policies are held against each other: traffic, how much of it, and the tiers of the fleet.

**Tuning and report.** Conversations of the traces are split by the CRC-32 of their name: a third, ``tune``, is there to
choose parameters by, the rest, ``report``, is what results are reported on. Generated traffic has other seeds in each.

**Agents.** Users play the recorded Claude Code sessions (``sim.users``). How many follows from ws/cap, the tokens of
their live contexts, what they share counted once, over the HBM of all workers. Where a cell says so, host memory counts
as well.

**Open loops.** Load is relative to the fleet's capacity for that traffic: the requests per second that it completes
under ``least-work``, with engines that serve first come, first served, when all are there from the beginning.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from policies.base import Tier
from sim.engine import simulate
from sim.fleet import FleetSettings, GatewaySettings, TierSettings, host_tier
from sim.generators import generator
from sim.profiles import LINKS
from sim.requests import SimRequest, Trace
from sim.scaling import conversations, scale_load
from sim.trace import read_trace
from sim.users import live_tokens, play

Part = Literal["tune", "report"]
TierName = Literal["hbm", "host", "pool"]

TIERS: Final[tuple[TierName, ...]] = ("hbm", "host", "pool")
CLAUDE_CODE: Final = "claude_code_sessions.jsonl.gz"
MOONCAKE: Final = "mooncake_conversation.jsonl.gz"
MAX_PROMPT_TOKENS: Final = 160_000  # a third of a worker's HBM: of longer ones, hardly two fit
_HOST: Final = 2  # times HBM
_POOL: Final = 8  # times the HBM of all workers
_PROBE_USERS: Final = 64  # of whom the size of live contexts is taken
_AT_ONCE: Final = 1e6  # times the trace's rate

# Traffic that is made rather than read, in an open loop; several kinds together arrive side by side.
GENERATED: Final = {
    # single questions behind the long system prompts of some tenants
    "saas": ("tenants:requests=5000,tenants=200,system_tokens=4000,question_tokens=600,output_tokens=200",),
    # one system prompt for all, and every 20 s a cold prompt 32 times at once
    "bursts": (
        "tenants:requests=4000,rate=10,tenants=1,system_tokens=8000,question_tokens=1500,output_tokens=200",
        "bursts:bursts=20,every_s=20,copies=32,prompt_tokens=12000",
    ),
    # tools behind long prompts, agents that use them turn by turn, documents
    "toolagent": (
        "tenants:requests=2500,rate=5,tenants=40,system_tokens=7000,question_tokens=1500,output_tokens=180",
        "agents:sessions=60,spread_s=500,turns=20,think_s=3,system_tokens=6000",
        "rag:requests=1000,rate=2,documents=300,document_tokens=5000",
    ),
    # questions about long documents, half of which fit into the caches
    "documents": ("rag:requests=1200,documents=80,zipf=0.7,document_tokens=32000,question_tokens=120",),
    # short questions, and beside them long prompts that nobody asks twice
    "batch": (
        "tenants:requests=2300,rate=23,tenants=1,system_tokens=800,question_tokens=500,output_tokens=250",
        "tenants:requests=90,rate=0.9,tenants=1,system_tokens=1,question_tokens=40000,output_tokens=400",
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of traffic at one load, and what lies below HBM.

    Attributes:
        traffic: ``claude-code``, ``mooncake``, or a name of ``GENERATED``.
        amount: ws/cap of ``claude-code``, else load relative to capacity.
        tiers: HBM alone, host memory of twice its size below, or a remote pool below that.
        host_counts: host memory counts as capacity in ws/cap.
    """

    traffic: str
    amount: float
    tiers: TierName = "hbm"
    host_counts: bool = False

    @property
    def name(self) -> str:
        """How results call it, for instance ``claude-code_0.9_hbm``."""
        return f"{self.traffic}_{self.amount:g}{'_of_both' * self.host_counts}_{self.tiers}"

    @property
    def source(self) -> str | None:
        """The file with its trace, if it has one."""
        return {"claude-code": CLAUDE_CODE, "mooncake": MOONCAKE}.get(self.traffic)


CELLS: Final = (
    *(Cell("claude-code", ratio, tiers) for tiers in TIERS for ratio in (0.6, 0.9, 1.2, 1.6, 2.2)),
    *(Cell("claude-code", ratio, "host", host_counts=True) for ratio in (1.0, 1.3)),
    *(Cell("mooncake", load, tiers) for tiers in TIERS for load in (0.6, 0.8, 0.95)),
    *(Cell(name, 0.8, tiers) for tiers in TIERS for name in ("saas", "bursts", "toolagent")),
    *(Cell(name, 0.9) for name in ("documents", "batch")),
)
DECISIVE: Final = (
    *(Cell("claude-code", ratio) for ratio in (0.9, 1.2, 1.6)),
    Cell("mooncake", 0.95),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Of what size everything is.

    Attributes:
        traces: folder with the recorded traces.
        part: of the traces.
        workers: of the fleet, Llama 70B on four H100 each.
        turns: of every user.
        requests: of an open-loop trace at most; 0: all.
    """

    traces: Path
    part: Part = "report"
    workers: int = 8
    turns: int = 60
    requests: int = 0


def fleet_of(cell: Cell, setting: Setting) -> FleetSettings:
    """Return the fleet of a cell."""
    fleet = FleetSettings(workers=setting.workers)
    capacity = fleet.capacity_tokens
    tiers: list[TierSettings] = []
    if cell.tiers != "hbm":
        tiers.append(host_tier(fleet.speed, _HOST * capacity))
    if cell.tiers == "pool":
        link = LINKS["infiniband-400g"]
        pool = TierSettings(
            name="pool",
            tier=Tier.REMOTE,
            capacity_tokens=_POOL * capacity * fleet.workers,
            read_bytes_per_s=link.bytes_per_s,
            write_bytes_per_s=link.bytes_per_s,
            latency_s=link.latency_s,
            shared=True,
        )
        tiers.append(pool)
    return replace(fleet, tiers=tuple(tiers))


@lru_cache(maxsize=1)
def trace_of(cell: Cell, setting: Setting, seed: int) -> Trace:
    """Return the requests of a cell.

    Raises:
        OSError, ValueError: the trace cannot be read.
    """
    if cell.traffic == "claude-code":
        return _agents(cell, setting, seed)
    if cell.traffic == "mooncake":
        trace = _part(read_trace(setting.traces / MOONCAKE, seed=seed), setting.part)
    else:
        offset = 1000 if setting.part == "tune" else 0
        trace = _side_by_side([generator(words).trace(seed + offset) for words in GENERATED[cell.traffic]])
    if setting.requests:
        trace = replace(trace, requests=trace.requests[: setting.requests])
    span_s = trace.requests[-1].arrival_s - trace.requests[0].arrival_s
    return scale_load(trace, cell.amount * _capacity(trace, fleet_of(cell, setting)) * span_s / len(trace.requests))


def _agents(cell: Cell, setting: Setting, seed: int) -> Trace:
    sessions = _part(_sessions(setting.traces / CLAUDE_CODE), setting.part)
    fleet = fleet_of(cell, setting)
    capacity = fleet.capacity_tokens * fleet.workers * (1 + _HOST * cell.host_counts)

    def played(users: int) -> Trace:
        return play(sessions, users, seed, turns=setting.turns, max_prompt_tokens=MAX_PROMPT_TOKENS)

    per_user = live_tokens(played(_PROBE_USERS)) / _PROBE_USERS
    return played(max(1, round(cell.amount * capacity / per_user)))


@lru_cache(maxsize=1)
def _sessions(path: Path) -> Trace:
    return read_trace(path)


def _part(trace: Trace, part: Part) -> Trace:
    """Return the conversations of one part; a sub-agent goes with its session."""
    names = (str(name).partition("/")[0] for name in conversations(trace))
    tuned = [zlib.crc32(name.encode()) % 3 == 0 for name in names]
    kept = [request for request, tune in zip(trace.requests, tuned, strict=True) if tune == (part == "tune")]
    return replace(trace, requests=kept)


def _side_by_side(traces: Sequence[Trace]) -> Trace:
    """Return one open-loop trace of several, which have no block in common."""
    requests: list[SimRequest] = []
    offset = 0
    for trace in traces:
        requests += [
            replace(request, chunks=[chunk + offset for chunk in request.chunks]) for request in trace.requests
        ]
        offset = 1 + max((max(request.chunks) for request in requests if request.chunks), default=0)
    requests.sort(key=lambda request: request.arrival_s)
    return replace(traces[0], requests=requests, closed_loop=False)


def _capacity(trace: Trace, fleet: FleetSettings) -> float:
    """Return the requests per second that a fleet completes when it is never short of them."""
    at_once = replace(fleet, gateway=GatewaySettings(order="none"))
    result = simulate(scale_load(trace, _AT_ONCE), at_once, "least-work")
    return len(trace.requests) / result.duration_s
