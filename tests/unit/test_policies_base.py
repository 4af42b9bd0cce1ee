import re
from math import inf

import numpy as np
import pytest

from policies.base import (
    COLUMNS,
    Decision,
    FleetView,
    PolicyError,
    Residency,
    RoutingRequest,
    create_policy,
    known_policies,
)
from tests.fleets import make_fleet, make_request, make_residency
from tests.processes import ROOT

NAMES = {
    "burst-colocation",
    "cache-threshold",
    "conductor",
    "dualmap",
    "expected-cost",
    "lbgr",
    "least-requests",
    "least-tokens",
    "least-work",
    "lmetric",
    "overlap-cost",
    "power-of-two",
    "predicted-latency",
    "prefix-hash",
    "random",
    "round-robin",
    "session",
    "sticky",
    "weighted",
}


def test_importing_any_module_of_the_package_registers_every_policy():
    assert set(known_policies()) >= NAMES


def test_an_unknown_policy_is_answered_with_the_nearest_name():
    with pytest.raises(PolicyError, match=r"unknown policy 'least-token'\. Did you mean 'least-tokens'\?.*round-robin"):
        create_policy("least-token")


def test_a_name_like_no_other_is_answered_with_the_list_alone():
    with pytest.raises(PolicyError) as error:
        create_policy("zzz")
    assert "Did you mean" not in str(error.value)
    assert "Known policies: burst-colocation, cache-threshold" in str(error.value)


def test_an_unknown_parameter_is_answered_with_the_nearest_one():
    with pytest.raises(
        PolicyError, match="policy 'prefix-hash': unknown parameter 'factor'; did you mean 'load_factor'"
    ):
        create_policy("prefix-hash", {"factor": 2})


def test_an_unknown_parameter_like_no_other_is_answered_with_those_accepted():
    with pytest.raises(PolicyError, match=r"policy 'prefix-hash': .*`zzz`.*accepts: prefix_chunks, load_factor"):
        create_policy("prefix-hash", {"zzz": 2})


def test_a_policy_without_parameters_says_so():
    with pytest.raises(PolicyError, match="Parameters it accepts: none"):
        create_policy("round-robin", {"seed": 1})


@pytest.mark.parametrize(
    ("policy", "params"),
    [
        ("prefix-hash", {"load_factor": 0.9}),
        ("prefix-hash", {"prefix_chunks": 0}),
        ("expected-cost", {"reuse": 1.5}),
        ("expected-cost", {"memory_s": 0}),
        ("expected-cost", {"price": "maybe"}),
        ("power-of-two", {"seed": "x"}),
        ("cache-threshold", {"cache_threshold": 1.1}),
        ("conductor", {"pull_ratio": 0.5}),
        ("conductor", {"pull_s_per_token": 0}),
        ("burst-colocation", {"max_per_worker": 0}),
        ("dualmap", {"slo_s": 0}),
        ("lbgr", {"hysteresis_s": -1}),
        ("lmetric", {"queued": "both"}),
        ("overlap-cost", {"temperature": -1}),
        ("overlap-cost", {"block_tokens": 0}),
        ("predicted-latency", {"explore": 2}),
        ("sticky", {"hit_threshold": 0}),
        ("sticky", {"balance": "tokens"}),
        ("weighted", {"prefix": -3}),
        ("random", {"seed": -1}),
        ("expected-cost", {"load_factor": inf}),
        ("sticky", {"max_gap_s": inf}),
        ("weighted", {"prefix": inf}),
    ],
)
def test_a_parameter_out_of_range_names_policy_and_parameter(policy, params):
    with pytest.raises(PolicyError) as error:
        create_policy(policy, params)
    assert f"policy {policy!r}" in str(error.value)
    assert next(iter(params)) in str(error.value)


def test_columns_are_live_views_of_the_state():
    fleet = FleetView(["a", "b"])
    fleet.running[1] += 3
    assert fleet.state[COLUMNS.index("running")].tolist() == [0, 3]
    assert fleet.column("running").tolist() == [0, 3]


def test_an_unknown_column_names_the_known_ones():
    with pytest.raises(AttributeError, match=r"no column 'runing'; columns: pending_prefill_tokens"):
        _ = FleetView(["a"]).runing


def test_a_view_of_some_rows_is_a_copy():
    fleet = make_fleet(3, running=[1, 2, 3])
    some = fleet.take(np.array([2, 0]), version=7)
    some.running[0] = 9
    assert (some.names, some.version) == (["worker-2", "worker-0"], 7)
    assert fleet.running.tolist() == [1, 2, 3]


def test_nobody_holds_anything_in_an_empty_residency():
    residency = Residency.none(3)
    assert residency.hit_tokens.tolist() == [0, 0, 0]
    assert residency.by_tier.shape == (3, 4)


def test_the_ring_key_is_the_explicit_one_then_the_first_chunk_then_the_model():
    assert RoutingRequest("m", 10, [b"c"], ring_key=b"k").key() == b"k"
    assert RoutingRequest("m", 10, [b"c"]).key() == b"c"
    assert RoutingRequest("m", 10).key() == b"m"


def test_fallbacks_are_the_other_rows_cheapest_first():
    assert Decision(1, costs=np.array([3.0, 0.0, 1.0, 2.0])).fallbacks == [2, 3, 0]
    assert Decision(0, costs=(2.0, 1.0)).fallbacks == [1]
    assert Decision(0).fallbacks == []


def test_a_breakdown_names_every_worker_and_marks_the_choice():
    decision = Decision(1, costs=(2.0, 1.0), explain=lambda: [{"hit_tokens": 0}, {"hit_tokens": 256}])
    assert decision.breakdown(make_fleet(2)) == [
        {"worker": "worker-0", "chosen": False, "cost": 2.0, "hit_tokens": 0},
        {"worker": "worker-1", "chosen": True, "cost": 1.0, "hit_tokens": 256},
    ]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_decision_explains_itself_in_plain_values(name):
    fleet = make_fleet(3, capacity=10_000, running=[2, 1, 4])
    decision = create_policy(name).decide(make_request(1000, session="s"), fleet, make_residency([512, 0, 0]), now=1.0)
    breakdown = decision.breakdown(fleet)
    assert [entry["worker"] for entry in breakdown] == fleet.names
    assert [entry["chosen"] for entry in breakdown].index(True) == decision.worker
    assert {type(value) for entry in breakdown for value in entry.values()} <= {str, bool, int, float}
    assert sorted([*decision.fallbacks, decision.worker]) == [0, 1, 2]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_expected_hit_leaves_at_least_one_token_to_compute(name):
    decision = create_policy(name).decide(make_request(512, session="s"), make_fleet(1), make_residency([512]), now=1.0)
    assert (decision.worker, decision.expected_hit_tokens) == (0, 511)


def test_a_residency_of_lists_is_that_of_the_arrays():
    listed, arrays = Residency.of_lists([[512, 0, 0, 0], [0, 256, 0, 256], [0] * 4]), make_residency([512, 0, 0])
    arrays.by_tier[1] = 0, 256, 0, 256
    arrays.hit_tokens[1] = 512
    for residency in (listed, arrays):
        assert residency.hits() == [512, 512, 0]
        assert residency.tiers() == [[512, 0, 0, 0], [0, 256, 0, 256], [0] * 4]
        assert [residency.hit(row) for row in range(3)] == [512, 512, 0]
        assert residency.take(np.array([1])).tiers() == [[0, 256, 0, 256]]
    assert listed.hit_tokens.dtype == listed.by_tier.dtype == np.int64
    assert listed.by_tier.shape == (3, 4)


def test_what_is_written_to_the_arrays_of_a_residency_counts():
    residency = Residency.of_lists([[512, 0, 0, 0]])
    residency.hit_tokens[0] = residency.by_tier[0, 0] = 256
    assert (residency.hits(), residency.tiers()) == ([256], [[256, 0, 0, 0]])
    assert residency.hit(0) == 256


def test_a_residency_has_no_other_attributes():
    with pytest.raises(AttributeError, match="hits_by_tier"):
        _ = Residency.none(1).hits_by_tier


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_policy_and_each_of_its_parameters_is_documented(name):
    page = (ROOT / "docs" / "policies.md").read_text()
    for word in (name, *known_policies()[name].Params.__struct_fields__):
        assert re.search(rf"`{word}(: \w+)?`", page), f"docs/policies.md does not explain {word}"
