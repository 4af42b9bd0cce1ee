"""What the gateway records is what the simulator reads."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import httpx
import pytest

from sim.engine import simulate
from sim.fleet import FleetSettings
from sim.trace import read_trace
from tests.events_rig import until
from tests.integration.test_gateway import MODEL, STORY, fleet
from tests.integration.test_processes import START_S, service
from tests.sharing_rig import completion, config_for, sim_workers


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
