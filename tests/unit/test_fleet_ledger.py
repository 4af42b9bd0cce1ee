import pytest

from gateway.config import WorkerConfig
from gateway.fleet.ledger import Ledger
from gateway.fleet.registry import Registry, Worker


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
def worker(registry):
    worker = Worker.from_config(WorkerConfig(url="http://127.0.0.1:1", name="a"))
    registry.add(worker)
    return worker


@pytest.fixture
def prefills():
    return []


@pytest.fixture
def ledger(registry, worker, prefills):
    return Ledger(registry, lambda *prefill: prefills.append(prefill))


@pytest.fixture
def load(registry, worker):
    def load():
        names = ("pending_prefill_tokens", "pending_prefill_s", "prefilling_since", "running", "decode_tokens")
        return tuple(float(registry.fleet.column(name)[worker.row]) for name in names)

    return load


NOTHING = (0, 0, 0, 0, 0)


def test_prefill_counts_until_the_first_byte_and_context_until_the_end(ledger, worker, load):
    flight = ledger.dispatch(worker, 1000, 600, 0.5, 10.0)
    assert load() == (600, 0.5, 10.0, 1, 0)
    flight.first_byte(10.4)
    assert load() == (0, 0, 0, 1, 1000)
    flight.end(12.0)
    assert load() == NOTHING
    assert ledger.in_flight == 0


def test_a_request_that_ends_without_a_byte_leaves_nothing(ledger, worker, load):
    ledger.dispatch(worker, 1000, 600, 0.5, 10.0).end(11.0)
    assert load() == NOTHING


def test_ending_twice_and_late_bytes_are_harmless(ledger, worker, load):
    flight = ledger.dispatch(worker, 1000, 600, 0.5, 10.0)
    flight.first_byte(10.1)
    flight.first_byte(10.2)
    flight.end(11.0)
    flight.end(12.0)
    flight.first_byte(13.0)
    assert load() == NOTHING
    assert ledger.in_flight == 0


def test_the_queue_moves_on_at_each_first_byte(ledger, worker, load, prefills):
    first = ledger.dispatch(worker, 1000, 600, 0.5, 10.0)
    second = ledger.dispatch(worker, 2000, 500, 0.4, 10.1)
    assert load() == (1100, 0.9, 10.0, 2, 0)
    first.first_byte(10.6)
    assert load() == (500, pytest.approx(0.4), 10.6, 2, 1000)
    second.first_byte(10.9)
    assert prefills == [(worker, 600, 400, pytest.approx(0.6)), (worker, 500, 1500, pytest.approx(0.3))]


def test_a_held_request_counts_as_queued_but_is_not_prefilled(ledger, worker, load, prefills):
    held = ledger.dispatch(worker, 1000, 600, 0.5, 10.0, held=True)
    assert load() == (600, 0.5, 0, 1, 0)
    held.start(20.0)
    assert load() == (600, 0.5, 20.0, 1, 0)
    held.first_byte(20.4)
    assert prefills == [(worker, 600, 400, pytest.approx(0.4))]


def test_an_answer_that_is_not_streamed_is_presumed_prefilled_from_when_it_went_on(ledger, worker, load):
    held = ledger.dispatch(worker, 1000, 600, 0.5, 10.0, streamed=False, held=True)
    ledger.dispatch(worker, 9000, 9000, 9.0, 10.0, held=True)
    ledger.advance(19.0)
    held.start(20.0)
    ledger.advance(20.4)
    assert load()[0] == 9600
    ledger.advance(20.6)
    assert load() == (9000, pytest.approx(9.0), 0, 2, 1000)


def test_whoever_wants_to_know_is_told_of_every_prefill_that_ends(ledger, worker):
    left = []
    ledger.on_left = left.append
    answered, unanswered, held = (ledger.dispatch(worker, 10, 5, 0.1, 1.0, held=number == 2) for number in range(3))
    answered.first_byte(2.0)
    unanswered.end(3.0)
    held.end(3.0)
    answered.end(4.0)
    assert left == [answered, unanswered, held]


def test_a_queued_request_that_leaves_does_not_restart_the_one_being_prefilled(ledger, worker, load, prefills):
    first = ledger.dispatch(worker, 1000, 600, 0.5, 10.0)
    ledger.dispatch(worker, 2000, 500, 0.4, 10.1).end(10.2)
    assert load() == (600, 0.5, 10.0, 1, 0)
    first.first_byte(10.6)
    assert prefills == [(worker, 600, 400, pytest.approx(0.6))]


def test_after_an_aborted_prefill_the_start_of_the_next_one_is_not_known(ledger, worker, load, prefills):
    first = ledger.dispatch(worker, 1000, 600, 0.5, 10.0)
    second = ledger.dispatch(worker, 2000, 500, 0.4, 10.1)
    first.end(10.3)
    assert load() == (500, pytest.approx(0.4), 10.3, 1, 0)
    second.first_byte(10.6)
    assert prefills == []


def test_the_prefill_of_an_unstreamed_request_is_over_when_its_time_is_up(ledger, worker, load, prefills):
    streamed = ledger.dispatch(worker, 1000, 600, 0.5, 10.0)
    whole = ledger.dispatch(worker, 2000, 500, 0.4, 10.1, streamed=False)
    streamed.first_byte(10.6)
    ledger.advance(10.8)
    assert load() == (500, pytest.approx(0.4), 10.6, 2, 1000)
    ledger.advance(10.95)  # 10.0 + 0.5 + 0.4
    assert load() == (0, 0, 0, 2, 3000)
    whole.first_byte(20.0)
    whole.end(20.0)
    streamed.end(20.0)
    assert load() == NOTHING
    assert [new_tokens for _, new_tokens, _, _ in prefills] == [600]


def test_an_unstreamed_answer_before_its_time_releases_its_prefill(ledger, worker, load):
    whole = ledger.dispatch(worker, 2000, 500, 0.4, 10.0, streamed=False)
    whole.first_byte(10.1)
    whole.end(10.1)
    assert load() == NOTHING
    ledger.advance(11.0)
    assert load() == NOTHING


def test_flights_of_a_worker_that_left_count_nowhere(registry, ledger, worker, load):
    flight = ledger.dispatch(worker, 1000, 600, 0.5, 10.0)
    registry.remove("a")
    registry.add(worker)
    newer = ledger.dispatch(worker, 10, 5, 0.1, 11.0)
    flight.first_byte(11.5)
    flight.end(12.0)
    assert load() == (5, 0.1, 11.0, 1, 0)
    newer.end(13.0)
    assert load() == NOTHING
    assert ledger.in_flight == 0


def test_a_dispatch_to_a_worker_that_left_is_in_flight_but_on_no_worker(registry, ledger, worker):
    other = Worker.from_config(WorkerConfig(url="http://127.0.0.1:2", name="b"))
    registry.add(other)
    registry.remove("a")
    flight = ledger.dispatch(worker, 1000, 600, 0.5, 10.0)
    assert ledger.in_flight == 1
    assert registry.fleet.running.tolist() == [0]
    flight.first_byte(11.0)
    flight.end(12.0)
    assert ledger.in_flight == 0
    assert registry.fleet.decode_tokens.tolist() == [0]
