"""Which policy decides about which requests, and what is said of mistakes in the configuration."""

from typing import get_args

import pytest

from gateway.config import Config, RoutePath, load_config
from gateway.errors import ConfigError
from gateway.relay.plan import PROMPT_PATHS
from gateway.relay.policies import Policies

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def make(**sections):
    return Policies(Config.model_validate(sections))


def test_without_anything_special_the_top_level_policy_decides():
    policies = make(policy={"name": "least-work"})
    assert policies.of("llama", "llama", CHAT) is policies.default
    assert policies.default.name == "least-work"


def test_a_path_has_its_own_policy():
    policies = make(routes={COMPLETIONS: {"policy": {"name": "random"}}, CHAT: {}})
    assert policies.of("llama", "llama", COMPLETIONS).name == "random"
    assert policies.of("llama", "llama", CHAT).name == "expected-cost"


def test_a_models_policy_goes_before_its_paths():
    policies = make(
        models={"llama": {"policy": {"name": "sticky"}}, "other": {}},
        routes={CHAT: {"policy": {"name": "random"}}},
    )
    assert policies.of("llama", "llama", CHAT).name == "sticky"
    assert policies.of("other", "other", CHAT).name == "random"


def test_an_adapter_has_its_base_models_policy_unless_it_has_its_own():
    policies = make(models={"llama": {"policy": {"name": "sticky"}}, "poet": {"policy": {"name": "session"}}})
    assert policies.of("poet", "llama", CHAT).name == "session"
    assert policies.of("clerk", "llama", CHAT).name == "sticky"


def test_the_star_stands_for_all_models_without_a_policy_of_their_own():
    policies = make(models={"*": {"policy": {"name": "lmetric"}}, "llama": {"policy": {"name": "sticky"}}, "bare": {}})
    assert policies.of("llama", "llama", CHAT).name == "sticky"
    assert policies.of("bare", "bare", CHAT).name == policies.of("unknown", "unknown", CHAT).name == "lmetric"


def test_a_policy_that_is_put_replaces_one_and_leaves_the_others():
    config = Config.model_validate({"models": {"llama": {"policy": {"name": "sticky"}}}})
    policies = Policies(config)
    default, change = policies.default, Config.model_validate({"policy": {"name": "random"}}).policy
    policies.put(change, model="llama")
    assert policies.of("llama", "llama", CHAT).name == "random"
    policies.put(change, path=COMPLETIONS)
    assert policies.of("other", "other", COMPLETIONS).name == "random"
    assert policies.of("other", "other", CHAT) is default
    policies.put(change)
    assert policies.of("other", "other", CHAT).name == "random"


def test_another_configuration_replaces_and_removes_what_it_says_otherwise_and_leaves_the_rest():
    sticky, random = {"policy": {"name": "sticky"}}, {"policy": {"name": "random"}}
    old = Config.model_validate({"models": {"a": sticky, "b": sticky}, "routes": {CHAT: sticky, COMPLETIONS: sticky}})
    new = Config.model_validate({"models": {"a": random, "c": random}, "routes": {CHAT: sticky, COMPLETIONS: {}}})
    policies = Policies(old)
    kept, default = policies.of("x", "x", CHAT), policies.default
    policies.put(Config.model_validate({"policy": {"name": "session"}}).policy)
    by_call = policies.default
    policies.follow(old, new)
    assert policies.of("a", "a", CHAT).name == policies.of("c", "c", CHAT).name == "random"
    assert policies.of("b", "b", CHAT) is policies.of("x", "x", CHAT) is kept
    assert policies.of("x", "x", COMPLETIONS) is by_call is not default
    described = policies.describe()
    assert (set(described["models"]), set(described["routes"])) == ({"a", "c"}, {CHAT})


def test_the_description_names_every_parameter():
    policies = make(
        policy={"name": "prefix-hash", "params": {"prefix_chunks": 2}},
        models={"llama": {"policy": {"name": "round-robin"}}},
        routes={CHAT: {"policy": {"name": "lmetric"}}},
    )
    assert policies.describe() == {
        "default": {"name": "prefix-hash", "params": {"prefix_chunks": 2, "load_factor": 1.25}},
        "models": {"llama": {"name": "round-robin", "params": {}}},
        "routes": {CHAT: {"name": "lmetric", "params": {"queued": True}}},
    }


def test_every_path_that_is_routed_by_a_policy_can_have_its_own():
    assert set(get_args(RoutePath)) == PROMPT_PATHS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "models: {llama: {policy: {name: stiky}}}",
            "models.llama.policy: unknown policy 'stiky'. Did you mean 'sticky'?",
        ),
        ("models: {'*': {policy: {name: sticky, params: {max_gap: 1}}}}", "did you mean 'max_gap_s'?"),
        ("routes: {/v1/completions: {policy: {name: lmetric, params: {queued: 2}}}}", "policy 'lmetric'"),
        ("routes: {/v1/embeddings: {policy: {name: random}}}", "'/v1/messages' or '/v1/responses'"),
        ("routes: {/v1/completions: {polisy: {}}}", "did you mean 'policy'?"),
    ],
)
def test_a_mistake_is_answered_at_start_with_what_would_be_right(tmp_path, text, message):
    path = tmp_path / "kvway.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path, {})
    assert message in str(error.value)
