"""When a request goes to its worker, once a policy has said to which: held requests and the order of their release.

An engine prefills in the order in which requests arrive there, so whoever wants another order must hold them back. A
``Turnstile`` stands before each worker: it lets a bounded number of uncached tokens through, about what one engine step
takes in, and releases the rest in an order of its own as prefills are done. It never idles an engine: something is
held only while something else is being prefilled, or decoded where it is room that is waited for.

Least work first lets turns whose context is still cached hit it before it is evicted, and lets cold prompts in between;
ageing bounds how long those can be passed by. Conversations that have lost their context stand apart and may have to
wait for room, too (``policies.room``).
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Annotated, Any, ClassVar, Final, Protocol

import msgspec

from policies.base import finite
from policies.room import Room

_MAX_LEFT: Final = 64  # entries of requests that left while they were held, beyond as many as are held
_LOOKED_AT: Final = 16  # of those that wait for room, the first that came: one of them is small enough, or none


class Held:
    """A request that waits for its release, or has been released.

    Attributes:
        work_s: seconds that its prefill is expected to take its worker.
        tokens: its uncached tokens, at least 1.
        priority: larger goes first, whatever the order says.
        tenant: whose request it is, for ``fair``.
        held_at: when it came, in seconds of any monotonic clock.
        lost_tokens: where it goes on with a conversation whose context its worker has lost, the tokens of HBM that it
            will take; else 0.
        rank: where its order has it stand, least first, and
        waiting: whether it is held now; ``Turnstile`` keeps both.
    """

    __slots__ = ("held_at", "lost_tokens", "priority", "rank", "tenant", "tokens", "waiting", "work_s")

    def __init__(self, work_s: float, tokens: float, held_at: float, priority: int = 0, tenant: str = "") -> None:
        self.work_s = work_s
        self.tokens = tokens
        self.priority = priority
        self.tenant = tenant
        self.held_at = held_at
        self.lost_tokens = 0
        self.rank = 0.0
        self.waiting = False

    def stands_before(self, other: Held) -> bool:
        """Return whether it is to go before another one, by priority and rank."""
        return (-self.priority, self.rank) < (-other.priority, other.rank)


class ReleaseOrder(Protocol):
    """Says who is released first; one instance per worker.

    Attributes:
        name: what users write in ``dispatch.order``.
        Params: a frozen msgspec struct, one field per YAML parameter.
    """

    name: ClassVar[str]
    Params: ClassVar[type[msgspec.Struct]]

    def __init__(self, params: Any, /) -> None: ...

    def rank(self, held: Held) -> float:
        """Return where a request stands, least first. Called once, as it comes: a rank must not change with time."""
        ...

    def released(self, held: Held) -> None:
        """Learn that a request went on."""
        ...

    def left(self, held: Held) -> None:
        """Learn that a request is not wanted any more, before it went on."""
        ...


class _NoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Fifo:
    """First come, first served."""

    name: ClassVar[str] = "fifo"
    Params: ClassVar[type[msgspec.Struct]] = _NoParams

    def __init__(self, params: _NoParams, /) -> None:
        pass

    def rank(self, held: Held) -> float:
        """Return when it came."""
        return held.held_at

    def released(self, held: Held) -> None:
        """Nothing to learn."""

    def left(self, held: Held) -> None:
        """Nothing to learn."""


class LeastWorkParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of ``least-work``.

    Attributes:
        ageing: seconds of work that one second of waiting makes up for: the largest job over the longest wait that
            is acceptable. 0 starves large prompts under load, 1 and more is nearly first come, first served.
    """

    ageing: Annotated[float, msgspec.Meta(ge=0)] = 0.1


class LeastWork:
    """Least ``work − ageing·waited`` first (a shortest-job-first with linear ageing).

    All that wait age alike, so that ``work + ageing·held_at`` gives the same order and stays as it is.
    """

    name: ClassVar[str] = "least-work"
    Params: ClassVar[type[msgspec.Struct]] = LeastWorkParams

    def __init__(self, params: LeastWorkParams, /) -> None:
        self._ageing = params.ageing

    def rank(self, held: Held) -> float:
        """Return its work, later comers being charged for the head start of earlier ones."""
        return held.work_s + self._ageing * held.held_at

    def released(self, held: Held) -> None:
        """Nothing to learn."""

    def left(self, held: Held) -> None:
        """Nothing to learn."""


class FairParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of ``fair``.

    Attributes:
        max_tenants: how many tenants' accounts are kept; beyond, the longest unused one is forgotten.
    """

    max_tenants: Annotated[int, msgspec.Meta(ge=1)] = 4096


class Fair:
    """Every tenant gets the same share of a busy worker's prefill (start-time fair queueing, Goyal et al. 1996).

    A request's rank is its virtual start: where the clock stands, or where its tenant's last request ends if that is
    later. The clock stands at the start of what was released last.
    """

    name: ClassVar[str] = "fair"
    Params: ClassVar[type[msgspec.Struct]] = FairParams

    def __init__(self, params: FairParams, /) -> None:
        self._max_tenants = params.max_tenants
        self._clock = 0.0
        self._finish: dict[str, float] = {}

    def rank(self, held: Held) -> float:
        """Return its virtual start, and book its work."""
        start = max(self._clock, self._finish.pop(held.tenant, 0.0))
        self._finish[held.tenant] = start + held.work_s
        if len(self._finish) > self._max_tenants:
            del self._finish[next(iter(self._finish))]
        return start

    def released(self, held: Held) -> None:
        """Advance the clock."""
        self._clock = max(self._clock, held.rank)

    def left(self, held: Held) -> None:
        """Take its work off its tenant's account: it was not done."""
        if held.tenant in self._finish:
            self._finish[held.tenant] -= held.work_s


ORDERS: Final[Mapping[str, type[ReleaseOrder]]] = {order.name: order for order in (Fifo, LeastWork, Fair)}


class OrderError(ValueError):
    """An unknown release order, or parameters that it does not accept; the message names the valid ones."""


def create_order(name: str, params: Mapping[str, Any] | None = None) -> ReleaseOrder:
    """Build a release order from its name and its YAML parameters.

    Raises:
        OrderError: no such order, an unknown parameter, or a value out of range.
    """
    order = ORDERS.get(name)
    if order is None:
        near = get_close_matches(name, ORDERS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise OrderError(f"unknown release order {name!r}.{hint} Known orders: {', '.join(sorted(ORDERS))}; or none.")
    try:
        return order(msgspec.convert(finite(params or {}), order.Params))
    except msgspec.ValidationError as error:
        accepted = ", ".join(order.Params.__struct_fields__) or "none"
        raise OrderError(f"release order {name!r}: {error}. Parameters it accepts: {accepted}.") from None


class Turnstile:
    """Holds the requests of one worker back until their turn.

    Args:
        order: who goes first.
        budget_tokens: uncached tokens let through at a time; a single request may be larger.
        room: of the worker, where conversations that have lost their context wait for it. It counts while somebody
            calls ``look`` before everything else.

    Attributes:
        waiting: requests held.
        waiting_s: their work together.
        outstanding_tokens: uncached tokens let through whose prefill is not done.
    """

    __slots__ = (
        "_apart",
        "_heap",
        "_numbers",
        "_order",
        "_outstanding",
        "budget_tokens",
        "outstanding_tokens",
        "room",
        "waiting",
        "waiting_s",
    )

    def __init__(self, order: ReleaseOrder, budget_tokens: float, room: Room[Any] | None = None) -> None:
        self.budget_tokens = budget_tokens
        self.room = room
        self.waiting = 0
        self.waiting_s = 0.0
        self.outstanding_tokens = 0.0
        self._order = order
        self._outstanding = 0
        self._heap: list[tuple[int, float, int, Held]] = []
        self._apart: dict[Held, None] = {}  # lost their context; by priority, then as they came
        self._numbers = count()

    def look(self, capacity_tokens: float, now: float) -> None:
        """Let the room take note of the worker's HBM and of the time; see ``Room.look``."""
        if self.room is not None:
            self.room.look(capacity_tokens, self._outstanding > 0, now)

    def enter(self, held: Held) -> bool:
        """Let a request through at once, or hold it; return whether it may go."""
        held.rank = self._order.rank(held)
        apart = self.room is not None and held.lost_tokens > 0
        if not self.waiting and not apart and self._fits(held):
            self._order.released(held)
            self._let_through(held)
            return True
        held.waiting = True
        self.waiting += 1
        self.waiting_s += held.work_s
        if apart:
            self._set_apart(held)
        else:
            heappush(self._heap, (-held.priority, held.rank, next(self._numbers), held))
        if self._apart and self._next() is held and self._fits(held):
            self._go(held)
            return True
        return False

    def leave(self, held: Held) -> None:
        """Take a request out: its prefill is done, or it is not wanted any more. Then ask ``release``."""
        if held.waiting:
            self._unhold(held)
            self._order.left(held)
            if held in self._apart:
                del self._apart[held]
            elif len(self._heap) > 2 * self.waiting + _MAX_LEFT:
                self._compact()
        else:
            self._outstanding -= 1
            self.outstanding_tokens = self.outstanding_tokens - held.tokens if self._outstanding else 0.0

    def release(self) -> Held | None:
        """Let the next request through if it may go; call it until it returns None."""
        held = self._next()
        if held is None or not self._fits(held):
            return None
        self._go(held)
        return held

    def queue(self) -> list[Held]:
        """Return the held requests in the order of their release; those that stand apart come last."""
        return [held for *_, held in sorted(self._heap) if held.waiting] + list(self._apart)

    def _next(self) -> Held | None:
        """Return who is to go next, of those that do not wait for room."""
        heap = self._heap
        while heap and not heap[0][-1].waiting:  # left while they were held
            heappop(heap)
        first = heap[0][-1] if heap else None
        if self.room is not None:
            for held in islice(self._apart, _LOOKED_AT if self.room.crowded else 1):
                if (first is None or held.stands_before(first)) and self.room.fits(
                    held.lost_tokens, held.held_at, held.work_s
                ):
                    first = held
        return first

    def _set_apart(self, held: Held) -> None:
        last = next(reversed(self._apart), held)
        self._apart[held] = None
        if held.priority > last.priority:
            self._apart = dict.fromkeys(sorted(self._apart, key=lambda each: -each.priority))

    def _go(self, held: Held) -> None:
        if held in self._apart:
            del self._apart[held]
        else:
            heappop(self._heap)
        self._unhold(held)
        self._order.released(held)
        self._let_through(held)

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if entry[-1].waiting]
        heapify(self._heap)

    def _fits(self, held: Held) -> bool:
        return self._outstanding == 0 or self.outstanding_tokens + held.tokens <= self.budget_tokens

    def _let_through(self, held: Held) -> None:
        self._outstanding += 1
        self.outstanding_tokens += held.tokens

    def _unhold(self, held: Held) -> None:
        held.waiting = False
        self.waiting -= 1
        self.waiting_s = self.waiting_s - held.work_s if self.waiting else 0.0
