"""What the gateway records is what the simulator reads."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from sim.engine import simulate
from sim.fleet import FleetSettings
from sim.trace import read_trace
from tests.events_rig import until
from tests.gateway_rig import MODEL, STORY, fleet, sim_workers
from tests.integration.test_processes import START_S, service
from tests.sharing_rig import completion, config_for


async def test_recorded_traffic_can_be_simulated(tmp_path: Path) -> None:
    recorder = {"directory": str(tmp_path), "flush_s": 0.02}
    async with fleet(1, recorder=recorder) as gateway:
        base_url = f"http://127.0.0.1:{gateway.port}"
        async with httpx.AsyncClient(base_url=base_url, timeout=30) as client:
            prompt = STORY
            for _ in range(3):
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 8}
                answer = await client.post("/v1/completions", json=body)
                usage = answer.raise_for_status().json()["usage"]
                prompt += answer.json()["choices"][0]["text"] + STORY
            await client.post("/v1/completions", json={"model": MODEL, "prompt": "Something else. " * 60})
            metrics = (await client.get(f"http://127.0.0.1:{gateway.admin_port}/metrics")).text
    assert 'kvway_recorded_requests_total{outcome="dropped"} 0' in metrics
    trace = read_trace(tmp_path)
    trace.check()
    assert (len(trace.requests), trace.block_tokens) == (4, 32)
    first, second, third, other = (list(request.chunks) for request in trace.requests)
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert not set(other) & set(third)
    assert trace.requests[2].prompt_tokens == usage["prompt_tokens"]
    assert [request.output_tokens for request in trace.requests[:3]] == [8, 8, 8]
    text = "".join(file.read_text() for file in tmp_path.iterdir())
    assert "lighthouse" not in text
    assert MODEL not in text
    result = simulate(trace, FleetSettings(workers=1), "least-work")
    assert result.answered.all()
    # All of a turn but its new text is found in the cache, to the block.
    assert result.hit_tokens[1].sum() == len(first) * 32
    assert result.hit_tokens[2].sum() == len(second) * 32


async def test_recording_is_seen_and_switched_on_the_admin_port(tmp_path: Path) -> None:
    recorder = {"directory": str(tmp_path), "flush_s": 0.02}
    async with fleet(1, recorder=recorder) as gateway, httpx.AsyncClient(timeout=30) as client:
        inference, admin = (f"http://127.0.0.1:{port}" for port in (gateway.port, gateway.admin_port))

        async def described() -> dict[str, Any]:
            return (await client.get(f"{admin}/admin/recorder")).raise_for_status().json()

        async def written() -> bool:
            return bool((await described())["written"])

        async def switched(recording: Any) -> httpx.Response:
            return await client.put(f"{admin}/admin/recorder", json={"recording": recording})

        body = {"model": MODEL, "prompt": STORY, "max_tokens": 1}
        assert (await switched(False)).json()["recording"] is False
        (await client.post(f"{inference}/v1/completions", json=body)).raise_for_status()
        assert (await switched(True)).json()["recording"] is True
        (await client.post(f"{inference}/v1/completions", json=body)).raise_for_status()
        await until(written)
        [file] = tmp_path.iterdir()
        assert await described() == {
            "recording": True, "file": str(file), "written": 1, "waiting": 0, "dropped": 0
        }  # fmt: skip
        refused = await switched("sometimes")
        assert refused.status_code == 400
        assert "recording" in refused.json()["error"]["message"]


@pytest.mark.slow
async def test_without_a_directory_nothing_is_recorded_and_cannot_be() -> None:
    async with fleet(1) as gateway, httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.admin_port}") as admin:
        assert (await admin.get("/admin/recorder")).json()["recording"] is False
        refused = await admin.put("/admin/recorder", json={"recording": True})
        assert refused.status_code == 400
        assert "recorder.directory" in refused.json()["error"]["message"]


@pytest.mark.slow
async def test_what_processes_record_can_be_read_together(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    recorder = {"directory": str(traces), "flush_s": 0.02}
    async with sim_workers(1) as workers:
        with service(tmp_path, config_for(workers, "", recorder=recorder)) as running_service:

            async def both_recorded() -> bool:
                """Send a request on a connection of its own; say whether each process has recorded one by now."""
                with contextlib.suppress(httpx.HTTPError):
                    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{running_service.port}") as client:
                        await client.post("/v1/completions", json=completion(STORY))
                return len(_recorded(traces)) == 2

            await until(both_recorded, within_s=START_S)
    one, other = _recorded(traces)
    assert one
    assert one == other


def _recorded(traces: Path) -> list[list[int]]:
    """Return the ids of the first request in each file that has one."""
    files = [file.read_text().splitlines() for file in sorted(traces.glob("*.jsonl"))]
    return [json.loads(lines[1])["ids"] for lines in files if len(lines) > 1]
