"""Whatever happens in whatever order, the ledger's columns are never negative, and zero once all is over."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gateway.config import WorkerConfig
from gateway.fleet.ledger import Flight, Ledger
from gateway.fleet.registry import Registry, Worker

COLUMNS = ("pending_prefill_tokens", "pending_prefill_s", "prefilling_since", "running", "decode_tokens")
names = st.sampled_from("abc")


class LedgerMachine(RuleBasedStateMachine):
    flights = Bundle("flights")

    def __init__(self):
        super().__init__()
        self.registry = Registry()
        self.prefills = []
        self.ledger = Ledger(self.registry, lambda *prefill: self.prefills.append(prefill))
        self.now = 1.0
        self.everyone = []  # workers, gone or not
        self.counted = {}  # worker name → flights that began in its present membership

    @rule(name=names)
    def join_or_be_replaced(self, name):
        worker = Worker.from_config(WorkerConfig(url="http://127.0.0.1:1", name=name))
        self.everyone.append(worker)
        self.registry.add(worker)
        self.counted[name] = []

    @rule(data=st.data())
    def come_back(self, data):
        if self.everyone:
            worker = data.draw(st.sampled_from(self.everyone))
            self.registry.add(worker)
            self.counted[worker.name] = []

    @rule(name=names)
    def leave(self, name):
        self.registry.remove(name)
        self.counted.pop(name, None)

    @rule(target=flights, data=st.data(), tokens=st.integers(1, 10**6), streamed=st.booleans(), held=st.booleans())
    def dispatch(self, data, tokens, streamed, held):
        if not self.everyone:
            self.join_or_be_replaced("a")
        worker = data.draw(st.sampled_from(self.everyone))
        uncached = data.draw(st.integers(0, tokens))
        flight = self.ledger.dispatch(worker, tokens, uncached, uncached * 1e-5, self.now, streamed, held)
        if worker.row >= 0:
            self.counted[worker.name].append(flight)
        return flight

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds):
        self.now += seconds
        self.ledger.advance(self.now)

    @rule(flight=flights)
    def start(self, flight):
        flight.start(self.now)

    @rule(flight=flights)
    def first_byte(self, flight):
        flight.first_byte(self.now)

    @rule(flight=consumes(flights), again=st.booleans())
    def end(self, flight, again):
        flight.end(self.now)
        if again:
            flight.end(self.now)

    @invariant()
    def the_view_is_the_sum_of_the_flights(self):
        fleet = self.registry.fleet
        assert (fleet.state >= 0).all()
        for row, name in enumerate(fleet.names):
            live = [flight for flight in self.counted[name] if flight.stage != Flight.ENDED]
            prefilling = [flight for flight in live if flight.stage == Flight.PREFILL]
            decoding = [flight for flight in live if flight.stage == Flight.DECODE]
            pending = [flight for flight in live if flight.stage in (Flight.HELD, Flight.PREFILL)]
            assert fleet.running[row] == len(live)
            assert fleet.pending_prefill_tokens[row] == sum(flight.uncached_tokens for flight in pending)
            assert np.isclose(fleet.pending_prefill_s[row], sum(flight.prefill_s for flight in pending))
            assert fleet.decode_tokens[row] == sum(flight.prompt_tokens for flight in decoding)
            assert (fleet.prefilling_since[row] > 0) == bool(prefilling)

    @invariant()
    def no_prefill_takes_less_than_no_time(self):
        assert all(seconds >= 0 for _, _, _, seconds in self.prefills)

    def teardown(self):
        for flights in self.counted.values():
            for flight in flights:
                flight.end(self.now)
        for name in COLUMNS:
            assert not self.registry.fleet.column(name).any()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(stateful_step_count=40)


def test_nothing_stays_in_flight():
    registry = Registry()
    ledger = Ledger(registry)
    worker = Worker.from_config(WorkerConfig(url="http://127.0.0.1:1"))
    registry.add(worker)
    flights = [ledger.dispatch(worker, 100, 50, 0.1, 1.0, streamed=bool(turn % 2)) for turn in range(100)]
    registry.remove(worker.name)
    for flight in flights:
        flight.first_byte(2.0)
        flight.end(3.0)
    assert ledger.in_flight == 0
