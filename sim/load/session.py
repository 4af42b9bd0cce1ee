"""What a locust process does when a test starts and ends; shared by the locustfile and ``kvway load``."""

from __future__ import annotations

import logging
from typing import Any

import gevent
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.rpc.protocol import Message
from locust.runners import MasterRunner, WorkerRunner

from sim.load.endpoint import base_url, find_model, read_api_key
from sim.load.health import ClientWatch, Window
from sim.load.scenario import API_PATHS, LOOPS, Scenario, ramp_loop, read_scenario
from sim.load.schedule import Schedule
from sim.load.users import LoadUser, Target

_PART = "kvway-part"  # message of the master: which part of the scenario a worker plays
_log = logging.getLogger("kvway.load")


def add_options(parser: LocustArgumentParser) -> None:
    """Add the options of the scenarios to those of locust."""
    group = parser.add_argument_group("kvway load")
    add = group.add_argument
    add("--scenario", env_var="KVWAY_SCENARIO", default="chat", help="traffic by name and settings, or path of a trace")
    add("--model", env_var="KVWAY_MODEL", default="", help="name of the model, the first of /v1/models without")
    add("--loop", env_var="KVWAY_LOOP", choices=["", *LOOPS], default="", help="as the scenario says without")
    add("--api", env_var="KVWAY_API", choices=list(API_PATHS), default="chat", help="endpoint that is asked")
    add("--load", env_var="KVWAY_LOAD", type=float, default=1.0, help="times as many requests per second")
    add("--first", env_var="KVWAY_FIRST", type=int, default=0, help="so many requests, 0 for all")
    add("--seed", env_var="KVWAY_SEED", type=int, default=0, help="of everything drawn by chance")
    add("--ignore-eos", env_var="KVWAY_IGNORE_EOS", action="store_true", help="answers as long as the scenario says")
    add("--api-key-env", default="OPENAI_API_KEY", help="environment variable with the API key")


def _scenario(options: Any, ramp: bool) -> Scenario:
    loop = ramp_loop(options.loop) if ramp else options.loop
    return read_scenario(options.scenario, options.seed, loop, options.api, load=options.load, first=options.first)


class LoadSession:
    """A test in one process: reads the scenario, hands it to the users, watches the client.

    Args:
        environment: of locust, with ``host``, ``parsed_options`` and a runner.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._part = (0, 1)
        self._watch: ClientWatch | None = None
        environment.events.test_stopping.add_listener(self._on_stopping)

    @property
    def windows(self) -> list[Window]:
        """How the client itself did, second by second."""
        return list(self._watch.windows) if self._watch is not None else []

    def prepare(self, scenario: Scenario | None = None) -> None:
        """Read the scenario unless it is given, find the model, and begin to watch the client.

        Raises:
            ValueError: the scenario or the endpoint is not there.
        """
        options: Any = self._environment.parsed_options
        ramp = getattr(self._environment.shape_class, "is_ramp", False)
        # In a thread: a master gives a worker up whose heartbeats stop while it reads a long trace.
        scenario = scenario or gevent.get_hub().threadpool.apply(_scenario, (options, ramp))
        self._environment.host = url = base_url(self._environment.host or "")
        key = read_api_key(options.api_key_env)
        LoadUser.target = Target(options.model or find_model(url, key), key, options.ignore_eos)
        LoadUser.schedule = Schedule(scenario, *self._part)
        LoadUser.given_up = []
        self._watch = ClientWatch(lambda: self._environment.runner.user_count if self._environment.runner else 0)

    def prepare_at_start(self) -> None:
        """Let every start of a test prepare it; a master divides the scenario between its workers instead."""
        runner = self._environment.runner
        if isinstance(runner, WorkerRunner):
            runner.register_message(_PART, self._on_part)
        self._environment.events.test_start.add_listener(self._on_start)

    def _on_start(self, **_: Any) -> None:
        runner = self._environment.runner
        if isinstance(runner, MasterRunner):
            workers = sorted(worker.id for worker in runner.clients.ready)
            for number, worker in enumerate(workers):
                runner.send_message(_PART, {"part": number, "parts": len(workers)}, worker)
            return
        try:
            self.prepare()
        except ValueError as error:
            # Users find no schedule and stop.
            LoadUser.schedule = None
            self._environment.process_exit_code = 2
            _log.error("%s", error)
            options: Any = self._environment.parsed_options
            if runner is not None and options.headless:
                gevent.spawn(runner.quit)

    def _on_part(self, environment: Environment, msg: Message) -> None:
        self._part = (msg.data["part"], msg.data["parts"])

    def _on_stopping(self, **_: Any) -> None:
        if LoadUser.schedule is not None:
            LoadUser.schedule.close()
        if self._watch is not None:
            self._watch.stop()
