"""What a running gateway takes over from a configuration that was read again, and what needs a restart."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config import Config, WorkerConfig
from gateway.fleet.registry import Registry, Worker
from gateway.reload import compare, follow_workers

COMPLETIONS = "/v1/completions"
STICKY = {"policy": {"name": "sticky"}}


def config(sections: dict[str, Any]) -> Config:
    return Config.model_validate(sections)


@pytest.mark.parametrize(
    ("old", "new", "taken_over", "needs_restart"),
    [
        ({}, {}, [], []),
        ({}, STICKY, ["policy.name"], []),
        ({"policy": {"params": {"load_factor": 2}}}, {}, ["policy.params.load_factor"], []),
        ({}, {"models": {"a": STICKY}}, ["models.a.policy"], []),
        ({"models": {"a": STICKY}}, {}, ["models.a.policy"], []),
        ({"models": {"a": STICKY}}, {"models": {"a": STICKY, "b": {}}}, [], []),
        ({}, {"routes": {COMPLETIONS: STICKY}}, [f"routes.{COMPLETIONS}"], []),
        ({}, {"workers": [{"url": "http://a:1"}]}, ["workers"], []),
        (
            {"server": {"port": 1}},
            {"server": {"port": 2}, "health": {"path": "/up"}},
            [],
            ["server.port", "health.path"],
        ),
        (
            {"models": {"a": {}}},
            {"models": {"a": {"source": "bytes"} | STICKY}},
            ["models.a.policy"],
            ["models.a.source"],
        ),
        ({}, {"models": {"a": {"timeouts": {}}}}, [], ["models.a.timeouts"]),
        ({"index": {"password": "secret"}}, {"index": {"password": "other"}}, [], ["index.password"]),
    ],
)
def test_policies_and_workers_are_taken_over_and_all_else_needs_a_restart(
    old: dict[str, Any], new: dict[str, Any], taken_over: list[str], needs_restart: list[str]
) -> None:
    reload = compare(config(old), config(new))
    assert reload.taken_over == taken_over
    assert reload.needs_restart == needs_restart


def test_what_is_in_force_is_the_old_configuration_but_for_what_was_taken_over() -> None:
    old = config({"models": {"a": {"source": "bytes"}}, "server": {"port": 1}})
    new = config({"models": {"a": STICKY}, "server": {"port": 2}, "workers": [{"url": "http://w:1"}]} | STICKY)
    in_force = compare(old, new).config
    assert (in_force.policy, in_force.workers) == (new.policy, new.workers)
    assert in_force.models["a"] == old.models["a"].model_copy(update={"policy": new.models["a"].policy})
    assert in_force.server == old.server
    assert compare(in_force, new).taken_over == []


def test_a_model_that_is_listed_now_has_the_settings_of_the_star_until_a_restart() -> None:
    old = config({"models": {"*": {"source": "bytes"} | STICKY}})
    reload = compare(old, config({"models": {"*": {"source": "bytes"} | STICKY, "a": {"policy": {"name": "random"}}}}))
    assert reload.config.models["a"].source == "bytes"
    assert reload.config.models["a"].policy is not None and reload.config.models["a"].policy.name == "random"
    assert (reload.taken_over, reload.needs_restart) == (["models.a.policy"], ["models.a.source"])


def test_workers_leave_join_and_are_replaced_and_the_rest_is_left_alone() -> None:
    old = [WorkerConfig(url=f"http://{name}:1", name=name) for name in "abc"]
    new = [old[0], WorkerConfig(url="http://elsewhere:1", name="b"), WorkerConfig(url="http://d:1", name="d")]
    registry = Registry()
    for entry in old:
        registry.add(Worker.from_config(entry))
    stays, replaced = registry.workers["a"], registry.workers["b"]
    follow_workers(registry, old, new)
    assert set(registry.workers) == {"a", "b", "d"}
    assert registry.workers["a"] is stays
    assert registry.workers["b"] is not replaced and registry.workers["b"].host == "elsewhere"
