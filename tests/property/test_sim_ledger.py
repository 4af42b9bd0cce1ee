"""The simulator's ledger and the gateway's count alike, whatever happens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import WorkerConfig
from gateway.fleet.ledger import Ledger as GatewayLedger
from gateway.fleet.registry import Registry, Worker
from policies.base import FleetView
from sim.ledger import Ledger

COLUMNS = ("pending_prefill_tokens", "pending_prefill_s", "prefilling_since", "running", "decode_tokens")
NAMES = ("a", "b")

# seconds since the last, what happens, and to whom: the row of a dispatch, or the number of a flight
happenings = st.lists(
    st.tuples(
        st.floats(0, 5),
        st.sampled_from(["dispatch", "hold", "shrink", "start", "first_byte", "end"]),
        st.integers(0, 9),
        st.integers(1, 9999),
    ),
    max_size=60,
)


@given(happenings)
def test_both_count_alike(happened):
    registry = Registry()
    for name in NAMES:
        registry.add(Worker.from_config(WorkerConfig(url="http://127.0.0.1:1", name=name)))
    theirs, fleet = GatewayLedger(registry), FleetView(NAMES)
    ours = Ledger(fleet)
    flights, now = [], 1.0
    for seconds, what, whom, tokens in happened:
        now += seconds
        if what in ("dispatch", "hold"):
            name = NAMES[whom % len(NAMES)]
            worker = registry.workers[name]
            cost = (tokens * 2, tokens, tokens * 1e-4, now)
            held = what == "hold"
            flights.append((theirs.dispatch(worker, *cost, held=held), ours.dispatch(NAMES.index(name), *cost, held)))
        elif flights:
            their_flight, our_flight = flights[whom % len(flights)]
            if what == "shrink" and our_flight.held:
                their_flight.shrink(tokens, tokens * 1e-4)
                ours.shrink(our_flight, tokens, tokens * 1e-4)
            elif what == "start":
                their_flight.start(now)
                ours.start(our_flight, now)
            elif what == "first_byte" and not our_flight.decoding and not our_flight.held:
                their_flight.first_byte(now)
                ours.first_byte(our_flight, now)
            elif what == "end":
                their_flight.end(now)
                ours.end(our_flight, now)
                flights.remove((their_flight, our_flight))
        for column in COLUMNS:
            for row, name in enumerate(NAMES):
                counted = registry.fleet.column(column)[registry.workers[name].row]
                assert np.isclose(fleet.column(column)[row], counted)
