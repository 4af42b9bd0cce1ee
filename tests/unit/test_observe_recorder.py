"""The recorder writes what the simulator needs, and nothing that tells what was asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Config, RecorderConfig
from gateway.errors import ConfigError
from gateway.observe.record import RequestRecord
from gateway.observe.recorder import Recorder
from policies.base import RoutingRequest
from policies.chunks import ChunkHasher

HASHER = ChunkHasher(4)


def make_record(tokens: bytes, session: str | None = None, output: int | None = 7) -> RequestRecord:
    chunks = HASHER.chain(HASHER.root("m"), tokens)
    request = RoutingRequest("m", len(tokens) // 4, chunks, 4, output_tokens=99, session=session)
    return RequestRecord(
        request_id="secret-id",
        path="/v1/completions?key=secret",
        received_at=1_000.0,
        model="m",
        worker="secret-worker",
        stream=True,
        status=200,
        prompt_tokens=request.prompt_tokens,
        request=request,
        predicted_hit_tokens=4,
        cached_tokens=3,
        output_tokens=output,
        first_byte_at=1_000.25,
        ended_at=1_001.5,
    )


async def record(directory: Path, records: list[RequestRecord], **config: Any) -> Recorder:
    recorder = Recorder(RecorderConfig(directory=directory, **config), chunk_tokens=4)
    await recorder.start()
    for each in records:
        recorder.record(each)
    await recorder.close()
    return recorder


def read(directory: Path) -> list[list[dict[str, Any]]]:
    """Return the parsed lines of every file, in the order of their names."""
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(directory.iterdir())]


FORTY_TOKENS = bytes(range(160))


async def test_a_line_has_times_lengths_and_ids(tmp_path: Path) -> None:
    await record(tmp_path, [make_record(FORTY_TOKENS, session="alice")])
    [[head, line]] = read(tmp_path)
    assert head["kvway_trace"] == 1
    assert head["chunk_tokens"] == 4
    assert len(line["ids"]) == 10
    assert len(set(line["ids"])) == 10
    figures = {key: line[key] for key in ("input", "output", "limit", "status", "ttft", "duration", "cached")}
    assert figures == {
        "input": 40, "output": 7, "limit": 99, "status": 200, "ttft": 0.25, "duration": 1.5, "cached": 3,
    }  # fmt: skip


async def test_equal_prefixes_have_equal_ids_within_a_recording_and_not_beyond(tmp_path: Path) -> None:
    pair = [make_record(FORTY_TOKENS), make_record(FORTY_TOKENS[:80] + b"x" * 80)]
    await record(tmp_path / "a", pair)
    await record(tmp_path / "b", pair)
    [[_, one, two]], [[_, other, _]] = read(tmp_path / "a"), read(tmp_path / "b")
    assert one["ids"][:5] == two["ids"][:5]
    assert not set(one["ids"][5:]) & set(two["ids"][5:])
    assert not set(one["ids"]) & set(other["ids"])


async def test_recordings_with_one_salt_agree(tmp_path: Path) -> None:
    for name in "ab":
        await record(tmp_path / name, [make_record(FORTY_TOKENS, "alice")], salt="pepper")
    [[_, one]], [[_, two]] = read(tmp_path / "a"), read(tmp_path / "b")
    assert (one["ids"], one["session"]) == (two["ids"], two["session"])


async def test_nothing_in_a_file_can_be_looked_up(tmp_path: Path) -> None:
    seen = make_record(FORTY_TOKENS, session="alice")
    await record(tmp_path, [seen], salt="pepper")
    text = next(tmp_path.iterdir()).read_text()
    for secret in ("secret", "alice", "pepper", "completions"):
        assert secret not in text
    ids = set(json.loads(text.splitlines()[1])["ids"])
    assert seen.request is not None
    for chunk in seen.request.chunks:
        for start in range(9):
            assert int.from_bytes(chunk[start : start + 8], "little") & (2**53 - 1) not in ids


async def test_files_rotate_and_the_oldest_go(tmp_path: Path) -> None:
    recorder = Recorder(RecorderConfig(directory=tmp_path, max_file_bytes=4096, max_files=3), chunk_tokens=4)
    await recorder.start()
    for _ in range(8):
        for _ in range(30):
            recorder.record(make_record(FORTY_TOKENS))
        await recorder._flush()
    await recorder.close()
    files = read(tmp_path)
    assert len(files) == 3
    assert len({lines[0]["recording"] for lines in files}) == 1
    assert all(len(lines) == 31 for lines in files)
    assert recorder.written == 240


async def test_several_recorders_in_one_directory_lose_only_what_was_in_the_files_removed(tmp_path: Path) -> None:
    config = RecorderConfig(directory=tmp_path, max_file_bytes=4096, max_files=2)
    quiet, busy = Recorder(config, chunk_tokens=4), Recorder(config, chunk_tokens=4)
    await quiet.start()
    await busy.start()
    for _ in range(3):
        for _ in range(30):
            busy.record(make_record(FORTY_TOKENS))
        await busy._flush()
    quiet.record(make_record(FORTY_TOKENS, session="quiet"))
    await quiet.close()
    await busy.close()
    assert sum("session" in line for lines in read(tmp_path) for line in lines) == 1


async def test_a_file_that_another_process_is_just_removing_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "kvway-20260101T000000Z-00000000-000000.jsonl").symlink_to("removed")
    assert (await record(tmp_path, [make_record(FORTY_TOKENS)])).written == 1


async def test_other_files_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kvway.yaml").write_text("mine")
    await record(tmp_path, [make_record(FORTY_TOKENS)], max_files=1)
    assert (tmp_path / "kvway.yaml").read_text() == "mine"


async def test_what_does_not_fit_the_queue_is_dropped_and_counted(tmp_path: Path) -> None:
    recorder = await record(tmp_path, [make_record(FORTY_TOKENS)] * 5, queue=3)
    assert (recorder.written, recorder.dropped) == (3, 2)
    [[_, *lines]] = read(tmp_path)
    assert len(lines) == 3


async def test_a_disk_that_refuses_is_counted_and_survived(tmp_path: Path) -> None:
    recorder = Recorder(RecorderConfig(directory=tmp_path / "full"), chunk_tokens=4)
    await recorder.start()
    assert recorder._file is not None
    recorder._file.close()
    recorder._file = Path("/dev/full").open("wb")  # noqa: SIM115 - the recorder closes it
    recorder.record(make_record(FORTY_TOKENS))
    await recorder._flush()
    assert (recorder.written, recorder.dropped) == (0, 1)
    recorder.record(make_record(FORTY_TOKENS))
    await recorder.close()
    assert (recorder.written, recorder.dropped) == (1, 1)


async def test_requests_without_a_prompt_are_left_out(tmp_path: Path) -> None:
    nameless = make_record(FORTY_TOKENS)
    nameless.request = None
    recorder = await record(tmp_path, [nameless])
    assert (recorder.written, recorder.dropped) == (0, 0)


async def test_a_directory_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = Recorder(RecorderConfig(directory=tmp_path / "file"), chunk_tokens=4)
    with pytest.raises(ConfigError, match=r"recorder\.directory"):
        await recorder.start()


def test_the_salt_is_not_shown() -> None:
    config = Config.model_validate({"recorder": {"salt": "pepper"}})
    assert config.masked()["recorder"]["salt"] == "***"
