import asyncio
import io
import json
import logging
import re
import sys

import pytest

from gateway.config import LogConfig
from gateway.observe.logs import JsonFormatter, RequestLog, TextFormatter, setup_logs
from gateway.observe.record import Outcome, RequestRecord


@pytest.fixture
def stream():
    return io.BytesIO()


@pytest.fixture
def restored_logging():
    """Leave logging as it was."""
    names = ("", "uvicorn", "uvicorn.error", "uvicorn.access", "httpx", "httpcore")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers


def make_record(**fields):
    defaults = {"request_id": "r-1", "path": "/v1/completions", "received_at": 100.0, "status": 200, "ended_at": 100.25}
    return RequestRecord(**defaults | fields)


async def written(stream, record, form="json"):
    RequestLog(form, stream).write(record)
    await asyncio.sleep(0)
    return stream.getvalue().decode()


def log_line(formatter, message, *args, exc_info=None, **extra):
    record = logging.LogRecord("kvway.fleet", logging.WARNING, __file__, 1, message, args, exc_info)
    record.__dict__.update(extra)
    return formatter.format(record)


async def test_a_request_is_one_json_object_with_what_is_known_of_it(stream):
    record = make_record(
        model="llama",
        worker="a",
        stream=True,
        reason="hit",
        attempts=2,
        prompt_tokens=1000,
        predicted_hit_tokens=768,
        cached_tokens=0,
        output_tokens=64,
        routed_at=100.0015,
        first_byte_at=100.2,
    )
    line = json.loads(await written(stream, record))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", line.pop("ts"))
    assert line == {
        "level": "info",
        "event": "request",
        "request_id": "r-1",
        "path": "/v1/completions",
        "status": 200,
        "outcome": "ok",
        "duration_ms": 250.0,
        "model": "llama",
        "worker": "a",
        "reason": "hit",
        "stream": True,
        "attempts": 2,
        "decision_ms": 1.5,
        "ttft_ms": 200.0,
        "prompt_tokens": 1000,
        "predicted_hit_tokens": 768,
        "cached_tokens": 0,
        "output_tokens": 64,
    }


async def test_what_is_not_known_is_left_out(stream):
    line = json.loads(
        await written(stream, make_record(outcome=Outcome.REJECTED, status=404, reason="model_not_found"))
    )
    assert line.keys() == {"ts", "level", "event", "request_id", "path", "status", "outcome", "duration_ms", "reason"}


async def test_requests_of_one_turn_of_the_loop_share_a_write():
    class Stream(io.BytesIO):
        writes = 0

        def write(self, data):
            self.writes += 1
            return super().write(data)

    stream = Stream()
    log = RequestLog("json", stream)
    for number in range(5):
        log.write(make_record(request_id=str(number)))
    await asyncio.sleep(0)
    log.write(make_record(request_id="later"))
    await asyncio.sleep(0)
    assert [json.loads(line)["request_id"] for line in stream.getvalue().splitlines()] == [*"01234", "later"]
    assert stream.writes == 2


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize("nasty", ["a\nb", 'quo"te', "\x00\x1b[31m", "back\\slash", "\ud800", "é 漢", "x=1 status=500"])
async def test_what_a_client_sends_stays_within_its_line(stream, form, nasty):
    text = await written(stream, make_record(request_id=nasty, path=f"/v1/{nasty}"), form)
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert "\x1b" not in text
    if form == "json":
        line = json.loads(text)
        assert line["status"] == 200
        assert line["request_id"] == (nasty if nasty != "\ud800" else "\\ud800")
    else:
        assert text.count(" status=200 ") == 1


@pytest.mark.parametrize("form", ["json", "text"])
async def test_a_query_is_not_logged_and_a_long_path_is_cut(stream, form):
    text = await written(stream, make_record(path="/v1/x?api_key=secret"), form)
    text += await written(stream, make_record(path="/v1/" + "x" * 100_000), form)
    assert "secret" not in text
    assert len(text) < 2000


async def test_the_text_form_is_key_value_pairs(stream):
    text = await written(stream, make_record(worker="a", cached_tokens=0), "text")
    assert re.fullmatch(
        r"\S+\+00:00 INFO request: request_id=r-1 path=/v1/completions status=200 outcome=ok duration_ms=250\.0 "
        r"worker=a stream=False attempts=0 prompt_tokens=0 predicted_hit_tokens=0 cached_tokens=0\n",
        text,
    )


def test_a_log_record_is_one_json_object_with_its_extras():
    line = json.loads(log_line(JsonFormatter(), "worker %s is out", "a", worker="a", hold_s=2.0, odd={1, 2}))
    line.pop("ts")
    assert line == {
        "level": "warning",
        "logger": "kvway.fleet",
        "message": "worker a is out",
        "worker": "a",
        "hold_s": 2.0,
        "odd": [1, 2],
    }


def test_an_exception_stays_within_its_json_line():
    try:
        raise ValueError("broken")
    except ValueError:
        line = log_line(JsonFormatter(), "failed", exc_info=sys.exc_info())
    assert "\n" not in line
    assert "ValueError: broken" in json.loads(line)["exception"]


def test_the_text_form_of_a_log_record():
    line = log_line(TextFormatter(), "worker is\nejected", worker="a b", hold_s=2.0)
    assert re.fullmatch(r'\S+\+00:00 WARNING kvway\.fleet: worker is\\nejected worker="a b" hold_s=2\.0', line)


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("cannot reach redis://user:hunter2@host:6379/0", "hunter2"),
        ("redis://:hunter2@host", "hunter2"),
        ("redis://:a@hunter2@host", "hunter2"),
        ("header was Authorization: Bearer abc.def.ghi", "abc.def.ghi"),
        ("key sk-abcdefghijkl was used", "sk-abcdefghijkl"),
    ],
)
def test_credentials_are_masked(formatter, text, secret):
    try:
        raise ValueError(text)
    except ValueError:
        line = log_line(formatter, "%s", text, exc_info=sys.exc_info(), url=text)
    assert secret not in line
    assert "***" in line


@pytest.mark.usefixtures("restored_logging")
def test_all_logging_goes_to_standard_error_in_one_form(capsys):
    logging.getLogger("uvicorn").addHandler(logging.StreamHandler())
    setup_logs(LogConfig(level="info"))
    logging.getLogger("kvway").info("ours")
    logging.getLogger("kvway").debug("too much")
    logging.getLogger("uvicorn.error").info("a line per server")
    logging.getLogger("uvicorn.error").warning("uvicorn's")
    logging.getLogger("uvicorn.access").info("a line per request")
    logging.getLogger("httpx").info("a line per probe")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [json.loads(line)["message"] for line in captured.err.splitlines()] == ["ours", "uvicorn's"]


@pytest.mark.usefixtures("restored_logging")
async def test_request_lines_and_other_lines_do_not_mix(capfdbinary):
    setup_logs(LogConfig(format="text"))
    log = RequestLog("text")
    for _ in range(3):
        log.write(make_record())
        logging.getLogger("kvway").warning("between")
        await asyncio.sleep(0)
    lines = capfdbinary.readouterr().err.decode().splitlines()
    assert sum("INFO request: " in line for line in lines) == 3
    assert sum(line.endswith("WARNING kvway: between") for line in lines) == 3
