"""Conversations that have lost their context wait for room in simulations as at a gateway."""

import pytest

from sim.engine import simulate
from sim.fleet import FleetSettings, GatewaySettings
from sim.generators import generator


@pytest.fixture(scope="module")
def trace():
    """Agents whose contexts are larger than the cache of their worker."""
    return generator("agents:sessions=24,turns=16,system_tokens=1000,task_tokens=12000,think_s=10").trace(1)


@pytest.fixture(scope="module")
def results(trace):
    """Of a fleet without and with room made."""
    gateways = [GatewaySettings(make_room=make_room) for make_room in (False, True)]
    fleets = [FleetSettings(workers=1, capacity_tokens=500_000, gateway=gateway) for gateway in gateways]
    return [simulate(trace, fleet) for fleet in fleets]


def test_everybody_is_answered(results):
    assert all(result.answered.all() for result in results)


def test_everybody_is_answered_where_another_gateway_makes_the_room(trace):
    gateway = GatewaySettings(replicas=2, sync_lag_s=0.05)
    assert simulate(trace, FleetSettings(workers=1, capacity_tokens=500_000, gateway=gateway)).answered.all()


def test_those_that_run_find_their_contexts(results):
    without, with_room = results
    assert with_room.hit_rate() > without.hit_rate() + 0.05
    assert with_room.summary()["itl_mean_s"] < without.summary()["itl_mean_s"]
