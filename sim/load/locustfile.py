"""For ``locust -f``: headless, with the web UI, or on many machines. ``kvway load --locustfile`` prints its path."""

from __future__ import annotations

from typing import Any

from locust import events
from locust.env import Environment

from sim.load.session import LoadSession, add_options
from sim.load.users import LoadUser

__all__ = ["LoadUser"]


def _on_init(environment: Environment, **_: Any) -> None:
    LoadSession(environment).prepare_at_start()


events.init_command_line_parser.add_listener(add_options)
events.init.add_listener(_on_init)
