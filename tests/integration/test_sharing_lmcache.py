"""Several gateways before workers that hand KV over by LMCache, whose notices reach one of them only."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.app import Gateway
from gateway.config import Config
from gateway.errors import ConfigError
from tests.events_rig import until
from tests.gateway_rig import sim_workers
from tests.pd_rig import handovers_of, port_of
from tests.processes import free_ports
from tests.sharing_rig import ask, config_for, is_settled
from tests.valkey import Valkey

LEASE_S = 3600.0


@contextlib.asynccontextmanager
async def lmcache_fleet(url: str, **sections: Any) -> AsyncIterator[dict[str, Any]]:
    """Run a prefill and a decode worker; yields the configuration of gateways before them."""
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    shared: dict[str, Any] = {"pd": "lmcache", "lease_s": LEASE_S, "lmcache_proxy": endpoint}
    async with sim_workers(1, role="prefill", **shared) as first, sim_workers(1, role="decode", **shared) as second:
        disaggregation = {"policy": "always", "lmcache_bind": endpoint, "lease_s": LEASE_S}
        config = config_for([*first, *second], url, disaggregation=disaggregation, **sections)
        for entry, worker in zip(config["workers"], (*first, *second), strict=True):
            ports = [port_of(worker)]
            entry |= {"role": worker.settings.role, "pd": "lmcache"}
            entry |= {"lmcache_init_ports": ports, "lmcache_alloc_ports": ports}
        yield config


async def test_each_of_several_gateways_hears_of_its_own_requests(valkey: Valkey) -> None:
    async with lmcache_fleet(valkey.url) as config, httpx.AsyncClient(timeout=30) as client:
        made = Config.model_validate(config)
        first = Gateway(made)
        async with Gateway(made) as second:
            async with first:
                gateways = (first, second)
                await until(lambda: all(is_settled(gateway, 2) for gateway in gateways), within_s=30)
                for number, gateway in enumerate(gateways):
                    assert (await ask(client, gateway, f"A story of two gateways. {number}" * 20)).status_code == 200
                assert [completed(gateway) for gateway in gateways] == [1, 1]
            third = Gateway(made)
            async with third:
                await until(lambda: is_settled(third, 2), within_s=30)
                assert (await ask(client, third, "A story of its successor. " * 20)).status_code == 200
                assert completed(third) == 1


async def test_when_the_one_that_listens_is_gone_another_does(valkey: Valkey) -> None:
    async with lmcache_fleet(valkey.url) as config, httpx.AsyncClient(timeout=30) as client:
        made = Config.model_validate(config)
        first, second = Gateway(made), Gateway(made)
        async with first:
            await second.start()
            await until(lambda: all(is_settled(gateway, 2) for gateway in (first, second)), within_s=30)
        try:
            assert (await ask(client, second, "A story of one who is left. " * 20)).status_code == 200
            assert completed(second) == 1
        finally:
            await second.stop()


async def test_without_a_way_to_tell_each_other_a_second_gateway_does_not_start() -> None:
    async with lmcache_fleet("", index={"backend": "memory"}) as config:
        made = Config.model_validate(config)
        async with Gateway(made):
            with pytest.raises(ConfigError, match=r"lmcache_bind: .* cannot be bound.*index.backend"):
                await Gateway(made).start()


def completed(gateway: Gateway) -> float:
    counts = handovers_of(gateway.observer)
    return sum(count for labels, count in counts.items() if 'outcome="completed"' in labels)
