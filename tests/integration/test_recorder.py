"""What the gateway records is what the simulator reads."""

from __future__ import annotations

from pathlib import Path

import httpx

from sim.engine import simulate
from sim.fleet import FleetSettings
from sim.trace import read_trace
from tests.integration.test_gateway import MODEL, STORY, fleet


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
