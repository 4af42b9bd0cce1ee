import asyncio
import io

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import HealthConfig, LogConfig, MetricsConfig, WorkerConfig
from gateway.fleet.health import Health
from gateway.fleet.ledger import Ledger
from gateway.fleet.metrics import Scraper
from gateway.fleet.registry import Registry, State, Worker
from gateway.observe import observer as observer_module
from gateway.observe.fleet import export_fleet
from gateway.observe.observer import Observer
from gateway.observe.record import Outcome, RequestRecord
from gateway.relay.polls import PollClient


@pytest.fixture
def registry():
    registry = Registry()
    for name in "ab":
        registry.add(Worker.from_config(WorkerConfig(url="http://127.0.0.1:1", name=name, models=("llama",))))
    return registry


@pytest.fixture
def observer(registry):
    return Observer(registry, LogConfig(requests=False))


def make_record(**fields):
    defaults = {
        "request_id": "r-1",
        "path": "/v1/chat/completions",
        "received_at": 100.0,
        "model": "llama",
        "worker": "a",
        "stream": True,
        "status": 200,
        "reason": "hit",
        "attempts": 1,
        "prompt_tokens": 1000,
        "predicted_hit_tokens": 768,
        "routed_at": 100.0015,
        "first_byte_at": 100.3,
        "ended_at": 102.0,
    }
    return RequestRecord(**defaults | fields)


def samples(observer):
    """Return what a Prometheus server would read: sample name → label values → value."""
    found = {}
    for family in text_string_to_metric_families(observer.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_requests_are_counted_by_model_worker_outcome_and_status(observer):
    observer.finish(make_record())
    observer.finish(make_record())
    observer.finish(make_record(worker="b", outcome=Outcome.CLIENT_GONE, status=0))
    observer.finish(make_record(model="", worker="", outcome=Outcome.REJECTED, status=404, reason="model_not_found"))
    assert samples(observer)["kvway_requests_total"] == {
        ("llama", "a", "ok", "200"): 2,
        ("llama", "b", "client_gone", "0"): 1,
        ("", "", "rejected", "404"): 1,
    }


def test_times_fall_into_their_buckets(observer):
    observer.finish(make_record())
    found = samples(observer)
    ttft = {labels[-1]: value for labels, value in found["kvway_ttft_seconds_bucket"].items()}
    assert (ttft["0.25"], ttft["0.5"], ttft["+Inf"]) == (0, 1, 1)
    assert found["kvway_ttft_seconds_sum"]["llama", "a"] == pytest.approx(0.3)
    assert found["kvway_request_duration_seconds_sum"]["llama", "a"] == pytest.approx(2.0)
    decision = {labels[-1]: value for labels, value in found["kvway_decision_seconds_bucket"].items()}
    assert (decision["0.001"], decision["0.002"]) == (0, 1)


def test_a_value_on_a_bound_is_within_it(observer):
    observer.finish(make_record(received_at=0.0, first_byte_at=0.25, routed_at=0.0))
    bucket = samples(observer)["kvway_ttft_seconds_bucket"]
    assert bucket["llama", "a", "0.25"] == 1
    assert bucket["llama", "a", "0.1"] == 0


def test_an_answer_that_is_not_streamed_has_no_time_to_first_token(observer):
    observer.finish(make_record(stream=False))
    found = samples(observer)
    assert found["kvway_ttft_seconds_count"]["llama", "a"] == 0
    assert found["kvway_request_duration_seconds_count"]["llama", "a"] == 1


def test_a_rejected_request_counts_as_no_decision(observer):
    observer.finish(make_record(worker="", outcome=Outcome.REJECTED, status=400, routed_at=0.0, first_byte_at=0.0))
    found = samples(observer)
    assert found["kvway_decision_seconds_count"][()] == 0
    assert "kvway_decisions_total" not in found


def test_predictions_are_held_against_what_the_engine_reports(observer):
    observer.finish(make_record(cached_tokens=None))
    observer.finish(make_record(cached_tokens=700))
    observer.finish(make_record(cached_tokens=800))
    observer.finish(make_record(cached_tokens=768, output_tokens=5))
    found = samples(observer)
    assert {name: found[f"kvway_{name}_total"]["llama", "a"] for name in (
        "prompt_tokens", "output_tokens", "predicted_hit_tokens", "cached_tokens",
        "checked_requests", "overpredicted_tokens", "underpredicted_tokens",
    )} == {
        "prompt_tokens": 4000,
        "output_tokens": 5,
        "predicted_hit_tokens": 4 * 768,
        "cached_tokens": 700 + 800 + 768,
        "checked_requests": 3,
        "overpredicted_tokens": 68,
        "underpredicted_tokens": 32,
    }  # fmt: skip


def test_decisions_are_counted_by_reason_and_retries_by_worker_and_kind(observer):
    for reason in ("hit", "load", "hit"):
        observer.finish(make_record(reason=reason))
    observer.retried("a", "connect")
    observer.retried("a", "connect")
    observer.retried("b", "reset")
    found = samples(observer)
    assert found["kvway_decisions_total"] == {("hit",): 2, ("load",): 1}
    assert found["kvway_retries_total"] == {("a", "connect"): 2, ("b", "reset"): 1}


def test_the_series_of_a_worker_that_left_go_also_when_its_last_request_ends_later(observer, registry):
    observer.finish(make_record())
    observer.finish(make_record(worker="", outcome=Outcome.REJECTED, status=503))
    observer.retried("a", "reset")
    registry.remove("a")
    assert list(samples(observer)["kvway_requests_total"]) == [("llama", "", "rejected", "503")]
    observer.finish(make_record())
    registry.remove("b")
    found = samples(observer)
    assert list(found["kvway_requests_total"]) == [("llama", "", "rejected", "503")]
    assert "kvway_retries_total" not in found


def test_the_number_of_series_is_bounded(observer, monkeypatch):
    monkeypatch.setattr(observer_module, "_MAX_SERIES", 3)
    for number in range(10):
        observer.finish(make_record(model=f"adapter-{number}"))
    found = samples(observer)["kvway_requests_total"]
    assert len(found) == 4
    assert found["other", "other", "ok", "200"] == 7


def test_the_number_of_reasons_is_bounded(observer, monkeypatch):
    monkeypatch.setattr(observer_module, "_MAX_REASONS", 3)
    for number in range(10):
        observer.finish(make_record(reason=f"hit of {number}"))
    observer.finish(make_record(reason="hit of 0"))
    found = samples(observer)["kvway_decisions_total"]
    assert len(found) == 4
    assert (found["hit of 0",], found["other",]) == (2, 7)


def test_label_values_may_hold_any_character(observer):
    observer.finish(make_record(model='a"b\\c\nd{}=,é'))
    assert ('a"b\\c\nd{}=,é', "a", "ok", "200") in samples(observer)["kvway_requests_total"]


def test_other_parts_register_what_they_keep(observer):
    observer.gauge("kvway_index_chunks", "Chunks.", lambda: 7)
    observer.counter("kvway_events_total", "Events.", lambda: {"stored": 3, "removed": 1}, ("type",))
    observer.gauge("kvway_pairs", "Pairs.", lambda: {("a", "x"): 1.5}, ("worker", "kind"))
    found = samples(observer)
    assert found["kvway_index_chunks"] == {(): 7}
    assert found["kvway_events_total"] == {("stored",): 3, ("removed",): 1}
    assert found["kvway_pairs"] == {("a", "x"): 1.5}
    with pytest.raises(ValueError, match="exists already"):
        observer.gauge("kvway_index_chunks", "Chunks.", lambda: 8)


def test_build_and_process_are_exposed(observer):
    found = samples(observer)
    assert list(found["kvway_build_info"].values()) == [1]
    assert found["process_start_time_seconds"][()] > 0


def test_every_family_has_help_and_type(observer):
    observer.finish(make_record())
    families = {family.name: family for family in text_string_to_metric_families(observer.render().decode())}
    assert {family.type for family in families.values()} == {"counter", "gauge", "histogram"}
    assert all(family.documentation for family in families.values())


async def test_the_fleet_is_exposed(registry, observer):
    ledger = Ledger(registry)
    fetch = PollClient(registry).fetch
    health, scraper = Health(registry, fetch, HealthConfig(failures=1)), Scraper(registry, fetch, MetricsConfig())
    export_fleet(observer, registry, ledger, health, scraper)
    first, second = registry.workers.values()
    for worker in (first, second):
        registry.set_state(worker, State.READY)
    ledger.dispatch(first, 1000, 600, 0.5, 10.0)
    health.failed(second, "reset")
    scraper.failures["a"] += 2
    found = samples(observer)
    assert found["kvway_in_flight_requests"] == {(): 1}
    assert found["kvway_worker_pending_prefill_tokens"] == {("a",): 600, ("b",): 0}
    assert found["kvway_worker_state"]["a", "ready"] == 1
    assert found["kvway_worker_state"]["b", "ready"] == 0
    assert found["kvway_worker_state"]["b", "ejected"] == 1
    assert found["kvway_ejections_total"] == {("b", "reset"): 1}
    assert found["kvway_scrape_failures_total"] == {("a",): 2}
    await health.close()
    await scraper.close()


async def test_a_request_is_logged_unless_that_is_off(registry):
    stream, silent = io.BytesIO(), io.BytesIO()
    Observer(registry, LogConfig(), stream).finish(make_record())
    Observer(registry, LogConfig(requests=False), silent).finish(make_record())
    await asyncio.sleep(0)
    assert stream.getvalue().count(b"\n") == 1
    assert silent.getvalue() == b""
