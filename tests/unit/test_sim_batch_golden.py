"""The simulator's worker against a real vLLM 0.32: the same blocks stored and evicted, the same tokens hit."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from policies.base import Tier
from sim.batch import BatchWorker
from sim.cache import BlockRemoved, BlocksStored, hash_blocks
from sim.jobs import BatchLimits, Job
from sim.profiles import find_profile
from tests import golden

SIZE = golden.BLOCK_SIZE


@dataclass
class Changes:
    """Blocks by the hashes of whoever published them, in order."""

    stored: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)


def run(worker: BatchWorker, number: int, recorded: golden.Recorded) -> tuple[Job, Changes]:
    prompt = recorded.body["prompt"]
    output = recorded.output_ids(prompt)
    chain = hash_blocks(array("I", prompt + output), SIZE, "tiny")
    job = Job(number, chain, len(prompt), len(output), len(chain.hashes) * SIZE)
    now = float(number)
    worker.add(job, now)
    changes = Changes()
    while worker.start(now):
        now = worker.ends_at
        worker.finish(now)
        for event in worker.cache.take_events():
            if isinstance(event, BlocksStored):
                changes.stored += event.hashes
            elif isinstance(event, BlockRemoved):
                changes.removed.append(event.hash)
    return job, changes


def captured(recorded: golden.Recorded) -> Changes:
    changes = Changes()
    for event in (event for message in recorded.messages for event in message.events):
        if event["type"] == "BlockStored":
            changes.stored += event["block_hashes"]
        elif event["type"] == "BlockRemoved":
            changes.removed += event["block_hashes"]
    return changes


def test_a_cache_under_pressure_hits_and_evicts_as_the_engine_did():
    *recordings, _ = golden.evictions()
    worker = BatchWorker(BatchLimits(64, SIZE, SIZE), find_profile("llama-3.1-8b/h100/1"))
    names: dict[int, int] = {}  # the captured engine's hash → ours
    evicted = hit = 0
    for number, recorded in enumerate(recordings):
        job, ours = run(worker, number, recorded)
        theirs = captured(recorded)
        assert len(ours.stored) == len(theirs.stored)
        names.update(zip(theirs.stored, ours.stored, strict=True))
        assert ours.removed == [names[block] for block in theirs.removed]
        # what the engine stored first comes right after what it had found
        assert job.hit_tokens[Tier.HBM] == job.chain.hashes.index(names[theirs.stored[0]]) * SIZE
        hit += job.hit_tokens[Tier.HBM]
        evicted += len(theirs.removed)
    assert evicted > 50
    assert hit > 0
