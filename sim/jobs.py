"""Requests as the engine of a simulated worker has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.base import N_TIERS, Tier
from sim.cache import BlockChain


@dataclass(slots=True, eq=False)
class Job:
    """One request on one worker. The first five fields are the caller's, the rest is written by ``BatchWorker``.

    Attributes:
        number: what the caller knows it by.
        chain: ids of the blocks of the prompt and, as far as they are known, of the answer.
        prompt_tokens: length of the prompt, at least 1.
        output_tokens: tokens that it will generate, at least 1.
        named_tokens: leading tokens that the ids cover; the last id's block may be less than full.
        generated: output tokens, up to date unless it is decoding.
        computed: tokens whose KV is there, up to date unless it is decoding.
        committed: leading blocks that the cache knows by their ids.
        blocks: numbers of the blocks it uses.
        order: its place among the running requests; -1 while it waits.
        decoding: whether its prompt is computed.
        origin: while it decodes, the worker's ``steps`` less ``generated``.
        started_at: when it was first admitted; -1 before.
        first_at: when its first token came; -1 before.
        hit_tokens: tokens found when it was first admitted, by tier.
        preemptions: how often it lost its blocks.
        ready_at: when its reload from below HBM ends.
        received: its KV but for the last token was computed elsewhere, and comes with it.
        pin_s: seconds for which its blocks had better stay once it is done.
        arrived_at: when it reached the gateway.
    """

    number: int
    chain: BlockChain
    prompt_tokens: int
    output_tokens: int
    named_tokens: int
    generated: int = 0
    computed: int = 0
    committed: int = 0
    blocks: list[int] = field(default_factory=list)
    order: int = -1
    decoding: bool = False
    origin: int = 0
    started_at: float = -1.0
    first_at: float = -1.0
    hit_tokens: list[int] = field(default_factory=lambda: [0] * N_TIERS)
    preemptions: int = 0
    ready_at: float = 0.0
    received: bool = False
    pin_s: float = 0.0
    arrived_at: float = 0.0

    def count_hits(self, in_hbm: int, held: int, runs: Sequence[tuple[Tier, int]], block_tokens: int) -> None:
        """Note where its first ``held`` tokens were found: ``in_hbm`` of them there, then blocks of lower tiers."""
        self.hit_tokens[Tier.HBM] = in_hbm
        left = held - in_hbm
        for tier, blocks in runs:
            found = min(blocks * block_tokens, left)
            self.hit_tokens[tier] += found
            left -= found


@dataclass(slots=True, frozen=True)
class BatchLimits:
    """Size of a worker.

    Attributes:
        num_blocks: blocks in HBM, the reserved one included.
        block_tokens: tokens per block, those that the trace names.
        engine_block_tokens: tokens per block of the engine that is modelled, a divisor of ``block_tokens``: the end of
            a prompt that is cached as a whole is computed again from its last full block on.
        max_batched_tokens: tokens computed per step.
        max_running: requests in the batch, at most ``max_batched_tokens``.
    """

    num_blocks: int
    block_tokens: int
    engine_block_tokens: int
    max_batched_tokens: int = 8192
    max_running: int = 256
