"""A constant number of users, each of whom plays recorded sessions, one after another, in a closed loop.

Recorded sessions begin and end: how many run at once, and so how large their working set is, changes all the time and
depends on how fast they are answered. Users who begin another session as soon as one is over keep it constant, so that
policies can be compared at a given working set. What is measured lies between a warm-up, in which caches fill, and the
moment at which the first user has had all of its turns (``steady``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Final

import numpy as np

from sim.requests import MOST_REQUESTS, SimRequest, Trace
from sim.results import SimResult

TURNS: Final = 60  # of each user
LONGEST_PAUSE_S: Final = 120.0  # whoever was away for longer is another user
WARM_UP_SHARE: Final = 0.2  # of the time until the first user is through
_START_S: Final = 120.0  # users begin within this time
_BETWEEN_S: Final = 20.0  # mean pause between two sessions of a user
_TOKEN_S: Final = 0.03  # nominal time between tokens, for nominal arrivals
_EVERY_TURN: Final = 5  # live contexts are counted at every fifth turn

_Session = list[SimRequest]


def play(trace: Trace, users: int, seed: int = 0, *, turns: int = TURNS, max_prompt_tokens: int | None = None) -> Trace:
    """Return what a number of users ask who play the trace's sessions.

    A user is one session, named ``user-<number>``, whose first recorded session is entered at a random turn. Pauses are
    those of the sessions, at most ``LONGEST_PAUSE_S``. When all sessions have been played they are played again, with
    blocks of their own except for those that several sessions share.

    Args:
        trace: with sessions.
        users: how many play at the same time.
        seed: of who plays what.
        turns: requests of each user.
        max_prompt_tokens: sessions end before their first longer prompt; None: where they were recorded to end.

    Raises:
        ValueError: the trace has no sessions that can be played, or there are too many users.
    """
    if users < 1 or turns < 1:
        raise ValueError(f"users ({users}) and their turns ({turns}) must be at least 1")
    if users * turns > MOST_REQUESTS:
        raise ValueError(f"{users:,} users of {turns} turns: at most {MOST_REQUESTS:,} requests can be simulated")
    sessions = _sessions(trace, max_prompt_tokens)
    if not sessions:
        raise ValueError(f"trace {trace.name!r}: users play sessions, but it has none")
    rng = random.Random(seed)
    endless = _endless(sessions, rng)
    requests = [
        request
        for number in range(users)
        for request in _user(f"user-{number}", endless, turns, rng.uniform(0, _START_S), rng)
    ]
    requests.sort(key=lambda request: request.arrival_s)
    origin = requests[0].arrival_s
    for request in requests:
        request.arrival_s -= origin
    return replace(trace, requests=requests, closed_loop=True)


def live_tokens(trace: Trace) -> float:
    """Return the tokens of all users' present contexts, what they share counted once: a mean over their turns."""
    users = _sessions(trace, None)
    turns = range(0, min(map(len, users)), _EVERY_TURN)
    distinct = [len({chunk for user in users for chunk in user[turn].chunks}) for turn in turns]
    return sum(distinct) / len(distinct) * trace.block_tokens


def steady(trace: Trace, result: SimResult) -> SimResult:
    """Return the part of a result in which all users play, without the warm-up."""
    last_s: dict[str, float] = {}
    for request, finish_s in zip(trace.requests, result.finish_s.tolist(), strict=True):
        if request.session is not None and np.isfinite(finish_s):
            last_s[request.session] = max(last_s.get(request.session, 0.0), finish_s)
    end_s = min(last_s.values(), default=result.duration_s)
    return result.during(WARM_UP_SHARE * end_s, end_s)


def _sessions(trace: Trace, max_prompt_tokens: int | None) -> list[_Session]:
    sessions: dict[str, _Session] = {}
    ended: set[str] = set()
    for request in trace.requests:
        name = request.session
        if name is None or name in ended:
            continue
        if max_prompt_tokens is not None and request.prompt_tokens > max_prompt_tokens:
            ended.add(name)
        else:
            sessions.setdefault(name, []).append(request)
    return list(sessions.values())


def _endless(sessions: list[_Session], rng: random.Random) -> Iterator[_Session]:
    """Yield the sessions in random order, again and again, from the second time on with new blocks."""
    yield from rng.sample(sessions, len(sessions))
    uses = Counter(chunk for each in sessions for chunk in {chunk for request in each for chunk in request.chunks})
    width = max(uses, default=0) + 1
    for times in count(1):
        for session in rng.sample(sessions, len(sessions)):
            yield [_anew(request, uses, times * width) for request in session]


def _anew(request: SimRequest, uses: Counter[int], offset: int) -> SimRequest:
    return replace(request, chunks=[chunk if uses[chunk] > 1 else chunk + offset for chunk in request.chunks])


def _user(
    name: str, endless: Iterator[_Session], turns: int, start_s: float, rng: random.Random
) -> Iterator[SimRequest]:
    arrival_s, played = start_s, 0
    while played < turns:
        session = next(endless)
        first = rng.randrange(len(session)) if played == 0 else 0
        for turn, request in enumerate(session[first : first + turns - played]):
            pause_s = min(request.think_s, LONGEST_PAUSE_S) if turn else rng.expovariate(1 / _BETWEEN_S)
            arrival_s += pause_s
            yield replace(request, session=name, arrival_s=arrival_s, think_s=pause_s)
            arrival_s += request.output_tokens * _TOKEN_S
            played += 1
