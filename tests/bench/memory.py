"""Does a router's memory stay where it is: over many requests, and over waves of open streams?"""

from __future__ import annotations

from tests.bench.client import LoadGenerator, WrongAnswer
from tests.bench.measure import Figures
from tests.bench.rig import rss_samples
from tests.bench.testbed import Target
from tests.bench.workloads import SHORT, SHORT_NEW, request_source

# Caches are meant to fill up to their bounds: these are reached while the run warms up.
SMALL_CACHES = {"KVWAY_PROMPT__SEGMENT_CACHE_BYTES": "8000000", "KVWAY_INDEX__MAX_CHUNKS": "5000"}
WAVES = 3
MIB = 2**20


def over_requests(target: Target, requests: int) -> Figures:
    """Send requests that all differ; compare memory after the first fifth with the most seen in the rest."""
    source = request_source(SHORT_NEW, number=0)
    with LoadGenerator(target.address) as load:
        at_start = target.process.rss_bytes()
        load.closed_loop(source, concurrency=32, answers=requests // 5)
        warm = target.process.rss_bytes()
        with rss_samples(target.process) as samples:
            load.closed_loop(source, concurrency=32, answers=requests - requests // 5)
    return {
        "requests": requests,
        "start_mib": at_start / MIB,
        "warm_mib": warm / MIB,
        "most_mib": max(samples) / MIB,
        "end_mib": target.process.rss_bytes() / MIB,
    }


def over_streams(target: Target, streams: int) -> Figures:
    """Hold streams open at the same time, in waves; compare the peaks of the first wave and the last."""
    source = request_source(SHORT, 0, {"stream": True, "seed": 200})
    at_start = target.process.rss_bytes()
    peaks = []
    for _ in range(WAVES):
        with LoadGenerator(target.address) as load, rss_samples(target.process) as samples:
            load.open_loop(source, per_second=streams / 2, seconds=2)
            if len(load.connections) < streams:
                raise WrongAnswer(f"only {len(load.connections)} of {streams} streams were open together")
        peaks.append(max(samples))
    return {
        "streams": streams,
        "start_mib": at_start / MIB,
        "first_wave_mib": peaks[0] / MIB,
        "last_wave_mib": peaks[-1] / MIB,
        "kib_per_stream": (peaks[0] - at_start) / streams / 1024,
    }
