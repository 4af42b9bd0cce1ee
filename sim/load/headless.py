"""Runs a load test in this process: locust as a library, with a recorder and a progress line.

Importing this module imports locust, which replaces the standard library's sockets with gevent's.
"""

from __future__ import annotations

import logging
import signal
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Final

import gevent
from gevent.event import Event
from locust.env import Environment
from locust.runners import STATE_STOPPED, LocalRunner

from sim.load.endpoint import base_url, shown_url
from sim.load.health import Window
from sim.load.ramp import RampToSaturation
from sim.load.recorder import Recorder, client_summary
from sim.load.scenario import Scenario
from sim.load.session import LoadSession
from sim.load.stream import ANSWER
from sim.load.users import LoadUser

_POLL_S: Final = 0.25
_HOPELESS: Final = 20  # so many failures and no answer end the test
_MOST_SPAWN_RATE: Final = 100.0  # so that a closed loop does not begin with all its users in one instant


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to run.

    Attributes:
        url: of the endpoint.
        scenario: what reports call it.
        model, ignore_eos, api_key_env: as the options of the locustfile.
        users: at the same time.
        duration_s: nothing is sent after so many seconds, 0 for the whole scenario.
        drain_s: so long, answers on their way are waited for.
        ramp: whether users are doubled until the target is saturated.
        ramp_step: seconds of a step.
        ramp_most: users at most.
    """

    url: str
    scenario: str
    users: int
    model: str = ""
    ignore_eos: bool = False
    api_key_env: str = "OPENAI_API_KEY"
    duration_s: float = 0.0
    drain_s: float = 60.0
    ramp: bool = False
    ramp_step: float = 20.0
    ramp_most: int = 1024


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a test found: figures, requests and the seconds of the client, whose clock began at ``began``."""

    summary: dict[str, Any]
    recorder: Recorder
    windows: list[Window]
    began: float


Progress = Callable[[float, Recorder, list[Window]], None]


def run_load(options: LoadOptions, scenario: Scenario, progress: Progress) -> LoadResult:
    """Run a test to its end; SIGINT or SIGTERM ends it early, with what there is.

    Raises:
        ValueError: the endpoint is not there.
    """
    environment = _environment(options)
    runner = environment.create_local_runner()
    session = LoadSession(environment)
    session.prepare(scenario)
    began = perf_counter()
    recorder = Recorder(began)
    environment.events.request.add_listener(recorder.on_request)
    interrupted = Event()
    handlers = [gevent.signal_handler(each, interrupted.set) for each in (signal.SIGINT, signal.SIGTERM)]
    try:
        if options.ramp:
            runner.start_shape()
        else:
            runner.start(options.users, spawn_rate(options.users, scenario.paced))
        deadline = began + options.duration_s if options.duration_s else float("inf")
        while not interrupted.wait(_POLL_S) and perf_counter() < deadline and not _over(runner):
            if not recorder.answered and sum(recorder.errors.values()) >= _HOPELESS:
                break
            progress(perf_counter() - began, recorder, session.windows)
    finally:
        runner.quit()
        for handler in handlers:
            handler.cancel()
    windows = session.windows
    too_late = TimeoutError(f"not answered within {options.drain_s:g} s after the end of the test")
    for answer in LoadUser.given_up:
        recorder.on_request({ANSWER: answer}, too_late)
    for crash in runner.exceptions.values():
        recorder.errors[f"the load generator failed: {crash['msg']}"] += crash["count"]
    found: dict[str, Any] = {"url": shown_url(base_url(options.url)), "scenario": options.scenario}
    found |= {"model": LoadUser.target.model} | recorder.summary() | {"client": client_summary(windows)}
    if isinstance(environment.shape_class, RampToSaturation):
        found["ramp"] = environment.shape_class.summary()
        found["saturated"] = environment.shape_class.is_saturated
    return LoadResult(found, recorder, windows, began)


def spawn_rate(users: int, paced: bool) -> float:
    """Return how many users start per second: at once where the scenario says when each begins, for they only wait."""
    return float(users) if paced else min(float(users), _MOST_SPAWN_RATE)


def _environment(options: LoadOptions) -> Environment:
    # Warnings of locust would tear the progress line; what matters of them is in the result.
    logging.getLogger("locust").setLevel(logging.CRITICAL)
    logging.getLogger("kvway.load").setLevel(logging.ERROR)
    return Environment(
        user_classes=[LoadUser],
        shape_class=RampToSaturation() if options.ramp else None,
        host=options.url,
        stop_timeout=options.drain_s,
        parsed_options=Namespace(**asdict(options), headless=False),
    )


def _over(runner: LocalRunner) -> bool:
    """Whether the ramp has ended, or every user has found nothing more to send."""
    spawning = runner.spawning_greenlet
    return runner.state == STATE_STOPPED or (spawning is not None and spawning.ready() and not runner.user_count)
