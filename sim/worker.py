"""One worker's engine: continuous batching over a block cache, with the times of a profile.

The scheduler is vLLM's (0.32, first come first served, without asynchronous scheduling): every step spends a budget of
tokens on the running requests and then on waiting ones, prompts longer than the budget are prefilled in chunks beside
the decodes, and when blocks run out the request that came last is preempted and recomputed later. Blocks are cached in
the step that computes the tokens that fill them.

Time is an argument: a step begins at ``start(now)`` and its results exist ``Step.duration`` seconds later, when the
caller calls ``finish``. Nothing here waits, reads a clock or does I/O.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from math import ceil

from sim.cache import BlockCache, BlockChain, CacheEvent, Hit
from sim.profiles import LINKS, Link, Profile


@dataclass(slots=True, frozen=True)
class WorkerLimits:
    """Size of a worker.

    Attributes:
        num_blocks: KV blocks in HBM, the reserved one included.
        block_size: tokens per block.
        host_blocks: blocks of the host tier, 0 for none.
        max_batched_tokens: tokens computed per step.
        max_running: requests in the batch.
        prefix_caching: whether blocks are kept and found again; without it there are no events either.
    """

    num_blocks: int
    block_size: int = 16
    host_blocks: int = 0
    max_batched_tokens: int = 8192
    max_running: int = 256
    prefix_caching: bool = True


class State(IntEnum):
    """Where a request is."""

    WAITING = 0
    RUNNING = 1
    DONE = 2


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. The first three fields are the caller's, the rest is written by ``Worker``.

    Attributes:
        chain: block hashes of the prompt and of the whole output to come.
        prompt_tokens: length of the prompt, at least 1.
        output_tokens: tokens that it will generate, at least 1.
        state: waiting (also while preempted), running or done.
        generated: output tokens so far.
        computed: tokens whose KV lies in ``blocks``.
        scheduled: tokens that the present step computes.
        committed: leading blocks that the cache knows by their hashes.
        blocks: numbers of the blocks it uses.
        started_at: when it was first admitted.
        ready_at: when its reload from the host tier ends.
        cached_tokens: prompt tokens that were held, in any tier, when it was first scheduled; -1 before.
        host_tokens: those of them that came from the host tier.
        preemptions: how often it lost its blocks.
        reports: its events tell of the blocks it reuses too (``kv_cache_report_mode``), not only of new ones.
        remote_tokens: leading prompt tokens whose KV has come from another worker; gone when it is preempted.
    """

    chain: BlockChain
    prompt_tokens: int
    output_tokens: int
    state: State = State.WAITING
    generated: int = 0
    computed: int = 0
    scheduled: int = 0
    committed: int = 0
    blocks: list[int] = field(default_factory=list)
    started_at: float = 0.0
    ready_at: float = 0.0
    cached_tokens: int = -1
    host_tokens: int = 0
    preemptions: int = 0
    reports: bool = False
    remote_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens known so far: the prompt and what was generated."""
        return self.prompt_tokens + self.generated

    @property
    def decoding(self) -> bool:
        """Whether the present step computes just its newest output token."""
        return self.generated > 0 and self.scheduled == 1


@dataclass(slots=True, frozen=True)
class Step:
    """A step under way: who is in it, and the seconds it takes."""

    requests: list[Request]
    duration: float


@dataclass(slots=True, frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        emitted: requests that have one output token more.
        finished: those of them for which it was the last; their blocks are free.
        events: changes of the cache since the step before.
    """

    emitted: list[Request]
    finished: list[Request]
    events: list[CacheEvent]


@dataclass(slots=True)
class WorkerCounters:
    """Running totals, as vLLM counts them: lookups once per admission, preempted requests left out."""

    prefix_queries: int = 0  # tokens looked up in HBM
    prefix_hits: int = 0
    host_queries: int = 0  # tokens looked up in the host tier, after the HBM hit
    host_hits: int = 0
    preemptions: int = 0


class Worker:
    """The model of one worker.

    Args:
        limits: its size.
        profile: its speed.
        host_link: way from host memory to HBM; by default as many GPUs wide as the profile.
    """

    def __init__(self, limits: WorkerLimits, profile: Profile, host_link: Link | None = None) -> None:
        self.limits = limits
        self.profile = profile
        self.cache = BlockCache(limits.num_blocks, limits.block_size, limits.host_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counters = WorkerCounters()
        per_gpu = LINKS["host"]
        self._host_link = host_link or Link(per_gpu.bytes_per_s * profile.gpus, per_gpu.latency_s)
        self._host_link_free_at = 0.0

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it could never fit into the cache.
        """
        needed = ceil((request.prompt_tokens + request.output_tokens) / self.limits.block_size)
        if needed > self.limits.num_blocks - 1:
            raise ValueError(f"a request of {needed} blocks does not fit a cache of {self.limits.num_blocks - 1}")
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Drop a request, whatever it is doing; its blocks are free at once. Done requests are left alone."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.RUNNING:
            self.running.remove(request)
            self.cache.release(request.blocks)
        request.scheduled = 0
        request.state = State.DONE

    def reset_cache(self) -> bool:
        """Forget all cached blocks; refused (False) while any block is in use."""
        return self.cache.reset()

    def wake_at(self) -> float | None:
        """Return when the next reload ends, for a worker that had nothing to start; None: not before an ``add``."""
        return min((request.ready_at for request in self.running), default=None)

    def start(self, now: float) -> Step | None:
        """Begin a step at ``now``; None when there is nothing to compute."""
        batch: list[Request] = []
        budget, preempted = self._schedule_running(now, batch)
        if not preempted:
            self._schedule_waiting(now, batch, budget)
        if not batch:
            return None
        prefills = [(request.scheduled, request.computed) for request in batch if not request.decoding]
        context = [request.tokens for request in batch if request.decoding]
        return Step(batch, self.profile.step_s(prefills, len(context), sum(context)))

    def finish(self, step: Step) -> StepResult:
        """End a step: its tokens exist now."""
        emitted: list[Request] = []
        finished: list[Request] = []
        for request in step.requests:
            if not request.scheduled:  # aborted meanwhile
                continue
            request.computed += request.scheduled
            request.scheduled = 0
            if request.computed < request.tokens:
                continue
            request.generated += 1
            emitted.append(request)
            if request.generated == request.output_tokens:
                request.state = State.DONE
                finished.append(request)
                self.cache.release(request.blocks)
        if finished:
            self.running = [request for request in self.running if request.state is State.RUNNING]
        return StepResult(emitted, finished, self.cache.take_events())

    def _schedule_running(self, now: float, batch: list[Request]) -> tuple[int, bool]:
        """Put running requests into the batch; return the budget left, and whether any request was preempted."""
        budget, preempted = self.limits.max_batched_tokens, False
        at = 0
        while at < len(self.running) and budget > 0:
            request = self.running[at]
            at += 1
            if request.ready_at > now:
                continue
            new = min(request.tokens - request.computed, budget)
            while request.state is State.RUNNING and not self._grow(request, request.computed + new):
                self._preempt(self.running.pop())
                preempted = True
            if request.state is not State.RUNNING:
                break
            request.scheduled = new
            batch.append(request)
            budget -= new
        return budget, preempted

    def _schedule_waiting(self, now: float, batch: list[Request], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_running:
            request = self.waiting[0]
            if not self._admit(request, now, budget):
                break
            self.waiting.popleft()
            request.state = State.RUNNING
            self.running.append(request)
            if request.scheduled:
                batch.append(request)
                budget -= request.scheduled

    def _admit(self, request: Request, now: float, budget: int) -> bool:
        """Give a waiting request its cached prefix and, unless that has to be reloaded first, a first chunk.

        The last token is always computed, so at most ``tokens - 1`` are taken from the cache. A request is admitted
        only if all its tokens so far fit.
        """
        size = self.limits.block_size
        hit = Hit()
        if self.limits.prefix_caching:
            hit = self.cache.lookup(request.chain, (request.tokens - 1) // size)
        if not self.cache.fits(hit, ceil(request.tokens / size) - len(hit.blocks)):
            return False
        held = len(hit) * size
        there = max(held, min(request.remote_tokens, request.tokens - 1))
        new = 0 if hit.host_blocks else min(request.tokens - there, budget)
        request.blocks = self.cache.allocate(ceil((there + new) / size) - len(hit.blocks), hit)
        request.computed = there
        request.committed = len(hit.blocks)
        if request.reports and hit.blocks:
            self.cache.report(request.chain, len(hit.blocks))
        request.scheduled = new
        if hit.host_blocks:
            request.ready_at = self._reload(hit.host_blocks * size, now)
        else:
            self._commit(request, there + new)
        if not request.preemptions:
            request.started_at = now
            self._count_lookup(request, held, hit.host_blocks * size)
        return True

    def _grow(self, request: Request, tokens: int) -> bool:
        """Make room for the first ``tokens`` tokens of a running request; False when blocks have run out."""
        missing = ceil(tokens / self.limits.block_size) - len(request.blocks)
        if missing > 0:
            if missing > self.cache.free_blocks:
                return False
            request.blocks += self.cache.allocate(missing)
        self._commit(request, tokens)
        return True

    def _commit(self, request: Request, tokens: int) -> None:
        full = tokens // self.limits.block_size
        if full > request.committed and self.limits.prefix_caching:
            self.cache.commit(request.chain, request.blocks, request.committed, full)
            request.committed = full

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks; it goes to the head of the queue, to be computed again from what is still cached."""
        self.cache.release(request.blocks)
        request.blocks = []
        request.state = State.WAITING
        request.computed = request.committed = request.remote_tokens = 0
        request.ready_at = 0.0
        request.preemptions += 1
        self.waiting.appendleft(request)
        self.counters.preemptions += 1

    def _reload(self, tokens: int, now: float) -> float:
        """Return when ``tokens`` will have come from the host tier; reloads share its link one after the other."""
        begin = max(now, self._host_link_free_at)
        end = begin + self._host_link.seconds(tokens * self.profile.kv_bytes_per_token)
        self._host_link_free_at = end
        return end

    def _count_lookup(self, request: Request, held: int, host_tokens: int) -> None:
        request.cached_tokens = held
        request.host_tokens = host_tokens
        counters = self.counters
        counters.prefix_queries += request.tokens
        counters.prefix_hits += held - host_tokens
        if self.limits.host_blocks:
            counters.host_queries += request.tokens - held + host_tokens
            counters.host_hits += host_tokens
