import pytest

from gateway.config import WorkerConfig
from gateway.fleet.models import base_models, merged_models
from gateway.fleet.registry import Registry, Worker


def card(name, **fields):
    return {"id": name, "object": "model", "owned_by": "vllm", **fields}


@pytest.mark.parametrize(
    ("cards", "models"),
    [
        ([card("llama")], {"llama": "llama"}),
        (
            [card("llama", root="/m", parent=None), card("sql", root="/l", parent="llama")],
            {"llama": "llama", "sql": "llama"},
        ),
        ([card("sql", parent="llama"), card("llama")], {"llama": "llama", "sql": "llama"}),
        ([card("sql", parent="gone")], {"sql": "gone"}),
        ([card("a", root="/m"), card("b", root="/m"), card("c", root="/n")], {"a": "a", "b": "a", "c": "c"}),
        ([card("a", root="/m"), card("b", root="/m"), card("sql", parent="b")], {"a": "a", "b": "a", "sql": "a"}),
        ([card("a", parent=7, root=7), card("b", root=7)], {"a": "a", "b": "b"}),
    ],
)
def test_every_name_leads_to_its_base_model(cards, models):
    assert base_models(cards) == models


@pytest.fixture
def registry():
    return Registry()


def add(registry, name, cards, models=()):
    worker = Worker.from_config(WorkerConfig(url="http://127.0.0.1:1", name=name, models=models))
    worker.model_cards = cards
    worker.models = worker.models or base_models(cards)
    registry.add(worker)


def test_merging_lists_every_model_once_and_keeps_the_first_card_whole(registry):
    first = card("llama", max_model_len=131072, root="/m", permission=[{"id": "x"}], anything={"new": True})
    add(registry, "a", [first])
    add(registry, "b", [card("llama", max_model_len=4096), card("sql", parent="llama", root="/l")])
    assert merged_models(registry) == [first, card("sql", parent="llama", root="/l")]


def test_a_model_without_a_card_is_listed_all_the_same(registry):
    add(registry, "a", [], models=("llama",))
    assert merged_models(registry) == [{"id": "llama", "object": "model", "created": 0, "owned_by": "kvway"}]


def test_a_card_that_configuration_does_not_name_is_not_offered(registry):
    add(registry, "a", [card("llama"), card("internal")], models=("llama",))
    assert merged_models(registry) == [card("llama")]


def test_no_workers_have_no_models(registry):
    assert merged_models(registry) == []
