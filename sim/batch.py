"""One worker's engine, from batch change to batch change.

It schedules as ``sim.worker`` does, step for step, and comes to the same times, hits and evictions; a test holds the
two together. But a run of steps in which the batch stays the same and only decodes is one event: with ``n`` requests
and ``ΣC`` tokens of context it takes ``k·(d0 + n·d1 + ΣC·d2) + d2·n·k(k − 1)/2`` seconds, for every step adds ``n``
tokens of context. Such a run ends where the first of its requests is done, needs another block, or has filled one.

Requests that decode are not touched between such changes: each remembers the number of the step before its first token,
and ``generated`` is the difference to the worker's count of decode steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil, inf, sqrt

from policies.base import Tier
from sim.cache import PLAIN_USE, BlockCache, BlockChain, BlockRemoved, BlocksStored, Hit, LastUse
from sim.eviction import make_queue
from sim.fleet import EvictionSettings
from sim.jobs import BatchLimits, Job
from sim.profiles import Profile
from sim.tiers import NO_RELOAD, TierChange, TierStack


class BatchWorker:
    """The model of one worker. Time is an argument; nothing here waits.

    Args:
        limits: its size.
        profile: its speed.
        tiers: what lies below HBM; nothing by default.
        eviction: what goes first when HBM is full.

    Attributes:
        number: which worker it is.
        waiting: requests in line.
        running: requests admitted, in the order of their admission.
        steps: decode steps so far.
        ends_at: when the present run of steps ends; infinite while nothing runs.
        preemptions: requests preempted so far.
        evictions: blocks evicted from HBM so far.
    """

    def __init__(
        self,
        limits: BatchLimits,
        profile: Profile,
        tiers: TierStack | None = None,
        eviction: EvictionSettings | None = None,
    ) -> None:
        self.limits = limits
        self.profile = profile
        self.tiers = tiers if tiers is not None and tiers.stores else None
        self.number = tiers.worker if tiers is not None else 0
        self._eviction = eviction or EvictionSettings()
        self.cache = self._empty_cache()
        self.waiting: deque[Job] = deque()
        self.running: dict[Job, None] = {}
        self.steps = 0
        self.ends_at = inf
        self.preemptions = 0
        self.evictions = 0
        self._now = 0.0
        self._admissions = 0
        self._prefills: list[Job] = []  # admitted, not all computed; in the order of admission
        self._changes: list[tuple[int, int, Job]] = []  # step up to which a decoding request needs nothing, its order
        self._due: list[Job] = []  # decoding requests for which the last run ended
        self._decodes = 0
        self._context = 0  # tokens of the decoding requests together
        self._began_at = 0.0
        self._run_steps = 0  # of the present run, 0 while nothing runs
        self._first_s = 0.0  # its first step
        self._growth_s = 0.0  # by how much each further one takes longer
        self._chunks: list[tuple[Job, int]] = []  # tokens that it prefills

    def fits(self, tokens: int) -> bool:
        """Return whether a request of so many tokens, answer included, can ever be served."""
        return ceil(tokens / self.limits.block_tokens) < self.limits.num_blocks

    def add(self, job: Job, now: float) -> None:
        """Queue a request; while it waits, what it needs from slow tiers is brought closer."""
        if self.tiers is not None and (self.waiting or self._prefills):
            hit, _ = self.lookup(job.chain, job.prompt_tokens)
            self.tiers.prefetch(job.chain.hashes, len(hit), now)
        self.waiting.append(job)

    def held_blocks(self, hashes: Sequence[int]) -> int:
        """Return how many leading blocks of a run are in HBM."""
        return len(self.cache.lookup(BlockChain(hashes), len(hashes)))

    def insert(self, hashes: Sequence[int]) -> None:
        """Hold a run of blocks that came from elsewhere, as far as there is room that no request uses."""
        chain = BlockChain(hashes)
        hit = self.cache.lookup(chain, len(hashes))
        new = len(hashes) - len(hit)
        if new and self.cache.fits(hit, new):
            blocks = self.cache.allocate(new, hit)
            self.cache.commit(chain, blocks, len(hit), len(hashes))
            self.cache.release(blocks)

    def wake_at(self) -> float:
        """Return when the next reload ends, for a worker that had nothing to start; infinite: there is none."""
        return min((job.ready_at for job in self._prefills), default=inf)

    def take_changes(self) -> list[TierChange]:
        """Return how the contents of all tiers have changed since the last call.

        Of equal blocks in HBM it is the last that counts.
        """
        changes: list[TierChange] = []
        removed: list[int] = []
        for event in self.cache.take_events():
            if isinstance(event, BlockRemoved):
                self.evictions += 1
                if event.hash not in self.cache:
                    removed.append(event.hash)
            elif isinstance(event, BlocksStored):
                if removed:
                    changes.append(TierChange(self.number, Tier.HBM, removed, stored=False))
                    removed = []
                changes.append(TierChange(self.number, Tier.HBM, event.hashes, stored=True))
        if removed:
            changes.append(TierChange(self.number, Tier.HBM, removed, stored=False))
        if self.tiers is not None:
            for change in changes:
                if not change.stored:
                    self.tiers.evicted(change.hashes, self._now)
            changes += self.tiers.take_changes()
        return changes

    def start(self, now: float) -> bool:
        """Begin the next run of steps at ``now``; False when there is nothing to compute."""
        self._now = self.cache.free.now = now
        preemptions = self.preemptions
        self._grow_decodes()
        budget = self._continue_prefills(self.limits.max_batched_tokens - self._decodes)
        settled = self.preemptions == preemptions
        if settled:
            self._admit_waiting(now, budget)
        if not self._chunks and not self._decodes:
            return False
        self._began_at = now
        self._set_pace()
        # a step that preempts admits nobody: the next one does
        self._run_steps = max(1, self._changes[0][0] - self.steps) if settled and not self._chunks else 1
        self.ends_at = now + self._seconds(self._run_steps)
        for job in self._prefills:
            if now < job.ready_at < self.ends_at:
                self.cut(job.ready_at)
        return True

    def cut(self, now: float) -> None:
        """End the present run with the step that is under way at ``now``: something has come that may change it."""
        if self._run_steps <= 1:
            return
        elapsed, first_s, growth_s = now - self._began_at, self._first_s, self._growth_s
        if growth_s > 0:
            # the smallest k with k·first + growth·k(k − 1)/2 ≥ elapsed
            half = first_s - growth_s / 2
            steps = (sqrt(half * half + 2 * growth_s * elapsed) - half) / growth_s
        else:
            steps = elapsed / first_s
        self._run_steps = min(self._run_steps, max(1, ceil(steps - 1e-9)))
        self.ends_at = self._began_at + self._seconds(self._run_steps)

    def finish(self, now: float) -> tuple[list[Job], list[Job]]:
        """End the run.

        Returns:
            Requests whose first token came with it, and requests that are done; their blocks are free.
        """
        self.ends_at = inf
        self._now = self.cache.free.now = now
        first: list[Job] = []
        done: list[Job] = []
        if self._decodes:
            self.steps += self._run_steps
            self._context += self._run_steps * self._decodes
            changes, steps = self._changes, self.steps
            while changes and changes[0][0] <= steps:
                _, order, job = heappop(changes)
                if order != job.order:
                    continue
                if steps - job.origin == job.output_tokens:
                    self._end(job, done)
                else:
                    self._due.append(job)
        self._run_steps = 0
        for job, new in self._chunks:
            job.computed += new
            if job.computed == job.prompt_tokens + job.generated:
                self._prefills.remove(job)
                job.generated += 1
                if job.generated == 1:
                    job.first_at = now
                    first.append(job)
                if job.generated == job.output_tokens:
                    self._end(job, done)
                else:
                    self._begin_decoding(job)
        self._chunks.clear()
        return first, done

    def abandon(self) -> list[Job]:
        """The process is gone: return the requests it had, and forget everything."""
        lost = [*self.running, *self.waiting]
        self.cache = self._empty_cache()
        self.waiting.clear()
        self.running.clear()
        for rest in (self._prefills, self._changes, self._due, self._chunks):
            rest.clear()
        self._decodes = self._context = self._run_steps = 0
        self.ends_at = inf
        return lost

    def _empty_cache(self) -> BlockCache:
        limits = self.limits
        queue = make_queue(self._eviction, self.profile, limits.num_blocks, limits.block_tokens)
        return BlockCache(limits.num_blocks, limits.block_tokens, free=queue)

    def _seconds(self, steps: int) -> float:
        return steps * self._first_s + self._growth_s * (steps * (steps - 1) / 2)

    def _set_pace(self) -> None:
        """Work out how long the next step takes, and how much longer each one after it."""
        profile, decodes, context = self.profile, self._decodes, self._context
        prefills = []
        for job, new in self._chunks:
            if new == 1 and job.generated:  # all but its newest token was found in the cache
                decodes, context = decodes + 1, context + job.prompt_tokens + job.generated
            else:
                prefills.append((new, job.computed))
        self._first_s = profile.step_s(prefills, decodes, context)
        self._growth_s = profile.decode_d2_s * decodes

    def _begin_decoding(self, job: Job) -> None:
        job.decoding = True
        job.origin = self.steps - job.generated
        self._decodes += 1
        self._context += job.prompt_tokens + job.generated
        self._plan(job)

    def _plan(self, job: Job) -> None:
        """Note until which step a decoding request needs nothing: no block, no commit, not its end."""
        size = self.limits.block_tokens
        generated = self.steps - job.origin
        tokens = job.prompt_tokens + generated
        left = min(job.output_tokens - generated, len(job.blocks) * size + 1 - tokens)
        if job.committed < len(job.chain.hashes):
            left = min(left, max(0, min((job.committed + 1) * size, job.named_tokens) - tokens))
        if left:
            heappush(self._changes, (self.steps + left, job.order, job))
        else:
            self._due.append(job)

    def _grow_decodes(self) -> None:
        """Give the requests for which the last run ended what they need."""
        due, self._due = sorted(self._due, key=lambda job: job.order), []
        for job in due:
            # not those that one before them has preempted
            if job.order >= 0 and self._grow(job, job.prompt_tokens + self.steps - job.origin):
                self._plan(job)

    def _continue_prefills(self, budget: int) -> int:
        """Compute more of the prompts that were begun; return what is left of the step's budget."""
        for job in list(self._prefills):
            if job.ready_at > self._now:
                continue
            new = min(job.prompt_tokens + job.generated - job.computed, budget)
            if new <= 0 or job.order < 0 or not self._grow(job, job.computed + new):
                break
            self._chunks.append((job, new))
            budget -= new
        return budget

    def _grow(self, job: Job, tokens: int) -> bool:
        """Make room for the first ``tokens`` tokens of a running request; False if it was itself preempted for it.

        Whoever was admitted last goes first, to be computed again later from what is still cached.
        """
        missing = ceil(tokens / self.limits.block_tokens) - len(job.blocks)
        while missing > self.cache.free_blocks:
            last = next(reversed(self.running))
            self._preempt(last)
            if last is job:
                return False
        if missing > 0:
            job.blocks += self.cache.allocate(missing)
        self._commit(job, tokens)
        return True

    def _commit(self, job: Job, tokens: int) -> None:
        full = len(job.chain.hashes) if tokens >= job.named_tokens else tokens // self.limits.block_tokens
        if full > job.committed:
            self.cache.commit(job.chain, job.blocks, job.committed, full)
            if self.tiers is not None:
                self.tiers.computed(job.chain.hashes[job.committed : full], self._now)
            job.committed = full

    def _preempt(self, job: Job) -> None:
        self._leave(job)
        job.computed = job.committed = 0
        job.ready_at = 0.0
        job.received = False
        job.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(job)

    def _end(self, job: Job, done: list[Job]) -> None:
        late_s = max(0.0, job.first_at - job.arrived_at - self._eviction.ttft_goal_s)
        self._leave(job, LastUse(self._now + job.pin_s, late_s / self._eviction.ttft_goal_s))
        done.append(job)

    def _leave(self, job: Job, last_use: LastUse = PLAIN_USE) -> None:
        """Take a request out of the batch; its blocks are free."""
        del self.running[job]
        if job.decoding:
            job.generated = self.steps - job.origin
            job.decoding = False
            self._decodes -= 1
            self._context -= job.prompt_tokens + job.generated
        elif job in self._prefills:
            self._prefills.remove(job)
        job.order = -1
        if self.tiers is not None:
            self.tiers.touch(job.chain.hashes[: job.committed], self._now)
        self.cache.release(job.blocks, last_use)
        job.blocks = []

    def _admit_waiting(self, now: float, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_running:
            job = self.waiting[0]
            new = self._admit(job, now, budget)
            if new is None:
                break
            self.waiting.popleft()
            self._admissions += 1
            job.order = self._admissions
            self.running[job] = None
            self._prefills.append(job)
            if new:
                self._chunks.append((job, new))
                budget -= new

    def _admit(self, job: Job, now: float, budget: int) -> int | None:
        """Give a waiting request its cached prefix and, unless that has to be reloaded first, a first chunk.

        Returns:
            Tokens of the chunk; None if all the request's tokens so far do not fit.
        """
        size = self.limits.block_tokens
        tokens = job.prompt_tokens + job.generated
        hit, held = self.lookup(job.chain, tokens)
        if not self.cache.fits(hit, ceil(tokens / size) - len(hit)):
            return None
        reload = NO_RELOAD
        in_hbm = held
        if job.received:
            held = tokens - 1
        elif self.tiers is not None:
            reload = self.tiers.plan(job.chain.hashes, len(hit), self._usable(tokens), tokens, now)
            held = min(held + reload.blocks * size, self._usable(tokens)) if reload.runs else held
        reloading = reload.ready_at > now
        new = 0 if reloading else min(tokens - held, budget)
        job.blocks = self.cache.allocate(ceil((held + new) / size) - len(hit), hit)
        job.computed = held
        job.committed = len(hit)
        job.ready_at = reload.ready_at
        if not reloading:
            self._commit(job, held + new)
        if job.started_at < 0:
            job.started_at = now
            if not job.received:
                job.count_hits(in_hbm, held, reload.runs, size)
        return new

    def lookup(self, chain: BlockChain, tokens: int) -> tuple[Hit, int]:
        """Return what HBM holds of a request's first ``tokens`` tokens, as blocks and as tokens not to be computed."""
        hit = self.cache.lookup(chain, self._usable_blocks(tokens))
        return hit, min(len(hit) * self.limits.block_tokens, self._usable(tokens))

    def _usable(self, tokens: int) -> int:
        """Return how many tokens a cache can spare a request: the last one is computed, and with it its block."""
        return (tokens - 1) // self.limits.engine_block_tokens * self.limits.engine_block_tokens

    def _usable_blocks(self, tokens: int) -> int:
        return ceil(self._usable(tokens) / self.limits.block_tokens)
