"""What ``RelayProtocol`` relies on in uvicorn, whose protocol class is not a public interface."""

from __future__ import annotations

import inspect
from collections import deque

import httptools
import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.relay.downstream import RelayProtocol

OVERRIDDEN = {
    "connection_made": ["transport"],
    "connection_lost": ["exc"],
    "eof_received": [],
    "data_received": ["data"],
    "pause_writing": [],
    "resume_writing": [],
    "on_message_begin": [],
    "on_header": ["name", "value"],
    "on_headers_complete": [],
    "on_body": ["body"],
    "on_message_complete": [],
    "on_response_complete": [],
    "shutdown": [],
    "_start_asgi_task": ["cycle", "app"],
}
"""Methods replaced or extended, with the arguments that uvicorn and httptools pass."""

CALLED = ["_unset_keepalive_if_required", "on_url"]
"""Methods used as they are."""


def parameters(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_an_overridden_method_is_still_there_with_the_same_arguments(name: str) -> None:
    assert parameters(getattr(HttpToolsProtocol, name)) == OVERRIDDEN[name]
    assert parameters(getattr(RelayProtocol, name)) == OVERRIDDEN[name]


def test_nothing_else_of_uvicorns_is_overridden_by_accident() -> None:
    ours = {name for name, value in vars(RelayProtocol).items() if inspect.isfunction(value)}
    theirs = {name for name, value in vars(HttpToolsProtocol).items() if inspect.isfunction(value)}
    assert ours & theirs - {"__init__"} == set(OVERRIDDEN)


def test_methods_that_are_called_are_still_there() -> None:
    for name in CALLED:
        assert callable(getattr(HttpToolsProtocol, name))


def test_a_protocol_is_made_and_has_the_state_that_is_used() -> None:
    assert parameters(HttpToolsProtocol.__init__) == ["config", "server_state", "app_state", "_loop"]

    config = uvicorn.Config(FastAPI(), log_config=None)
    config.load()
    loop = object()
    protocol = HttpToolsProtocol(config, ServerState(), {}, loop)  # type: ignore[arg-type]
    assert isinstance(protocol.parser, httptools.HttpRequestParser)
    assert isinstance(protocol.pipeline, deque)
    assert protocol.cycle is None
    assert protocol.loop is loop
    assert protocol.app is config.loaded_app
    assert protocol.tasks is protocol.server_state.tasks
    assert protocol.server_state.total_requests == 0


def test_an_asgi_cycle_says_when_it_is_over() -> None:
    assert "response_complete" in inspect.getsource(RequestResponseCycle.__init__)


def test_the_queue_is_filled_from_the_left_and_emptied_from_the_right() -> None:
    assert "self.pipeline.appendleft((self.cycle, app))" in inspect.getsource(HttpToolsProtocol.on_headers_complete)
    finish = inspect.getsource(HttpToolsProtocol.on_response_complete)
    assert "self.pipeline.pop()" in finish
    assert "self._start_asgi_task(cycle, app)" in finish


def test_flow_control_has_what_back_pressure_needs() -> None:
    assert {"pause_reading", "resume_reading", "pause_writing", "resume_writing"} <= set(dir(FlowControl))
    assert "write_paused" in inspect.getsource(FlowControl.__init__)
