import numpy as np
import pytest

from gateway.config import WorkerConfig
from gateway.errors import NoWorker, UnknownModel
from gateway.fleet.registry import Registry, State, Worker
from policies.pull import NO_GROUP


def make_worker(name, models=("llama",), state=State.READY, **config):
    worker = Worker.from_config(WorkerConfig(url="http://127.0.0.1:1", name=name, models=models, **config))
    worker.state = state
    return worker


@pytest.fixture
def registry():
    return Registry()


def test_candidates_are_the_ready_workers_of_the_model(registry):
    for worker in (
        make_worker("a"),
        make_worker("b", state=State.STARTING),
        make_worker("c", models=("qwen",)),
        make_worker("d", state=State.DRAINING),
        make_worker("e"),
    ):
        registry.add(worker)
    candidates = registry.candidates("llama")
    assert [worker.name for worker in candidates.workers] == candidates.fleet.names == ["a", "e"]
    assert candidates.fleet.state.shape[1] == 2


def test_an_adapter_is_routed_to_workers_that_have_it_under_its_base_model(registry):
    plain, adapted = make_worker("a"), make_worker("b")
    adapted.models = {"llama": "llama", "sql": "llama"}
    registry.add(plain)
    registry.add(adapted)
    candidates = registry.candidates("sql")
    assert (candidates.model, candidates.lora, candidates.workers) == ("llama", "sql", [adapted])
    assert registry.candidates("llama").lora is None


def test_ejected_workers_serve_where_a_model_has_no_others(registry):
    only, other = make_worker("a", state=State.EJECTED), make_worker("b", models=("qwen",))
    registry.add(only)
    registry.add(other)
    assert registry.candidates("llama").workers == [only]
    registry.add(fresh := make_worker("c"))
    assert registry.candidates("llama").workers == [fresh]


def test_a_model_nobody_serves_is_unknown(registry):
    registry.add(make_worker("a"))
    with pytest.raises(UnknownModel, match=r"'gpt' is not served here\. Models served: llama\."):
        registry.candidates("gpt")


def test_the_list_of_models_in_an_error_is_bounded(registry):
    registry.add(make_worker("a", models=tuple(f"m{i:03}" for i in range(500))))
    with pytest.raises(UnknownModel) as caught:
        registry.candidates("gpt")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("state", [State.STARTING, State.DRAINING])
def test_a_model_whose_workers_take_nothing_is_a_matter_of_time(registry, state):
    registry.add(make_worker("a", state=state))
    with pytest.raises(NoWorker, match=f"a is {state}"):
        registry.candidates("llama")


def test_without_any_worker_every_model_is_a_matter_of_time(registry):
    with pytest.raises(NoWorker, match="there are no workers yet"):
        registry.candidates("llama")


def test_while_a_starting_worker_has_not_said_what_it_serves_no_model_is_unknown(registry):
    registry.add(make_worker("a"))
    registry.add(silent := make_worker("b", models=(), state=State.STARTING))
    with pytest.raises(NoWorker, match="b has not yet said what it serves"):
        registry.candidates("gpt")
    silent.state = State.EJECTED
    registry.touch()
    with pytest.raises(UnknownModel):
        registry.candidates("gpt")


def test_a_joining_worker_brings_what_its_configuration_says(registry):
    registry.add(
        make_worker(
            "a",
            kv_capacity_tokens=1000,
            prefill={"a_s": 1, "b_s": 2, "c_s": 3},
            tiers={"kv_bytes_per_token": 1e9, "host_gb_s": 10, "disk_gb_s": 2, "remote_gb_s": 1},
        )
    )
    fleet = registry.fleet
    columns = ("kv_capacity_tokens", "prefill_a_s", "prefill_b_s", "prefill_c_s")
    assert [fleet.column(name)[0] for name in columns] == [1000, 1, 2, 3]
    assert [fleet.column(f"reload_{tier}_s")[0] for tier in ("host", "disk", "remote")] == [0.1, 0.5, 1]
    assert not fleet.pending_prefill_tokens.any()


def test_live_state_stays_with_its_worker_when_others_come_and_go(registry):
    workers = [make_worker(name) for name in "abc"]
    for worker in workers:
        registry.add(worker)
    registry.fleet.running[:] = [1, 2, 3]
    registry.remove("a")
    registry.add(make_worker("d"))
    assert registry.fleet.names == ["b", "c", "d"]
    assert registry.fleet.running.tolist() == [2, 3, 0]
    assert [worker.row for worker in workers] == [-1, 0, 1]


def test_a_worker_of_the_same_name_replaces_the_old_one(registry):
    changes = []
    registry.on_change(lambda worker, joined: changes.append((worker, joined)))
    old, new = make_worker("a"), make_worker("a")
    registry.add(old)
    registry.fleet.running[0] = 5
    registry.add(new)
    assert changes == [(old, True), (old, False), (new, True)]
    assert registry.workers == {"a": new}
    assert registry.fleet.running.tolist() == [0]


def test_removing_a_stranger_does_nothing(registry):
    registry.remove("a")
    assert registry.workers == {}


def test_the_view_changes_version_exactly_when_the_candidates_may_have_changed(registry):
    registry.add(worker := make_worker("a"))
    before = registry.version
    registry.candidates("llama")
    registry.set_state(worker, State.READY)
    assert registry.version == before
    registry.set_state(worker, State.DRAINING)
    assert registry.version > before


def test_a_subset_is_a_copy_and_the_whole_is_live(registry):
    registry.add(make_worker("a"))
    registry.add(second := make_worker("b"))
    assert np.shares_memory(registry.candidates("llama").fleet.state, registry.fleet.state)
    registry.set_state(second, State.DRAINING)
    assert not np.shares_memory(registry.candidates("llama").fleet.state, registry.fleet.state)


def test_it_is_ready_once_one_worker_is(registry):
    assert not registry.any_ready()
    registry.add(worker := make_worker("a", state=State.STARTING))
    assert not registry.any_ready()
    registry.set_state(worker, State.READY)
    assert registry.any_ready()


def test_prefill_workers_are_a_pool_of_their_own(registry):
    assert not registry.apart
    for name, role in (("a", "prefill"), ("b", "decode"), ("c", "mixed"), ("d", "prefill")):
        registry.add(make_worker(name, role=role))
    assert registry.apart
    assert registry.candidates("llama").fleet.names == ["b", "c"]
    assert registry.prefilling("llama").fleet.names == ["a", "d"]
    registry.set_state(registry.workers["a"], State.EJECTED)
    assert registry.prefilling("llama").fleet.names == ["d"]
    registry.remove("d")
    with pytest.raises(NoWorker, match="No worker with role prefill is ready for model 'llama'"):
        registry.prefilling("llama")


def test_prefill_workers_answer_only_where_no_other_is_ready(registry):
    registry.add(make_worker("a", role="prefill"))
    registry.add(decoder := make_worker("b", role="decode"))
    assert registry.candidates("llama").fleet.names == ["b"]
    registry.set_state(decoder, State.EJECTED)
    assert registry.candidates("llama").fleet.names == ["a"]
    registry.set_state(registry.workers["a"], State.EJECTED)
    assert registry.candidates("llama").fleet.names == ["b"]


def test_load_elsewhere_counts_among_prefill_workers_too(registry):
    for name, role in (("a", "prefill"), ("b", "decode")):
        registry.add(make_worker(name, role=role))
    registry.elsewhere = np.ones_like(registry.fleet.state)
    assert registry.prefilling("llama").fleet.running.tolist() == [1]


def test_the_links_to_fetch_over_are_those_of_the_candidates(registry):
    rack, tiers = {"group": "rack", "gb_s": 20.0, "latency_s": 0.01}, {"kv_bytes_per_token": 200_000}
    registry.add(make_worker("other", models=("qwen",), pull={"group": "qwens"}))
    registry.add(make_worker("a", pull=rack, tiers=tiers))
    registry.add(make_worker("alone"))
    registry.add(make_worker("b", pull=rack, tiers=tiers))
    for _ in range(2):
        links = registry.candidates("llama").fleet.pulls
        assert links.group.tolist() == [0, NO_GROUP, 0]
        assert links.s_per_token[0] == pytest.approx(1e-5)
        assert links.latency_s[0] == 0.01
        registry.elsewhere = np.ones_like(registry.fleet.state)  # what others have in flight changes no links


def test_models_whose_workers_name_no_group_have_no_links(registry):
    registry.add(make_worker("a"))
    registry.add(make_worker("other", models=("qwen",), pull={"group": "qwens"}))
    assert registry.candidates("llama").fleet.pulls is None
    assert registry.candidates("qwen").fleet.pulls is not None
    registry.remove("other")
    registry.elsewhere = np.ones_like(registry.fleet.state)
    assert registry.candidates("llama").fleet.pulls is None
