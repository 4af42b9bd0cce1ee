"""Traces are read as what they say, or refused with file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sim.requests import Trace
from sim.trace import TraceError, read_trace
from tests.processes import ROOT

SHARED = ROOT.parent / "shared" / "traces"
MOONCAKE = {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
SESSION = {
    "id": "s",
    "block_size": 64,
    "tool_tokens": 128,
    "system_tokens": 128,
    "requests": [
        {"t": 0.0, "m": "opus", "in": 330, "out": 9, "runs": [[1, 5]], "think": 0.0, "stop": "tool_use"},
        {
            "t": 4.0,
            "type": "subagent",
            "tool": 64,
            "system": 0,
            "requests": [{"t": 1.0, "m": "haiku", "in": 130, "out": 3, "runs": [[50, 2]], "think": None, "stop": ""}],
        },
        {"t": 9.0, "m": "opus", "in": 400, "out": 0, "runs": [[1, 4], [9, 2]], "think": 2.5, "stop": "end_turn"},
    ],
}
HEAD = {"kvway_trace": 1, "recording": "00c0ffee", "started": "2026-01-01T00:00:00Z", "chunk_tokens": 256}
LINE = {"t": 1.0, "input": 600, "ids": [7, 8], "limit": 99, "status": 200, "duration": 2.0, "output": 4, "session": 5}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def chunks(trace: Trace) -> list[list[int]]:
    return [list(request.chunks) for request in trace.requests]


def infinite_cache_hit_rate(trace: Trace) -> float:
    """Return the share of prompt tokens that one cache without end would have held."""
    known: set[int] = set()
    hits = total = 0
    for request in trace.requests:
        run = 0
        for chunk in request.chunks:
            if chunk not in known:
                break
            run += 1
        known.update(request.chunks)
        hits += min(run * trace.block_tokens, request.prompt_tokens)
        total += request.prompt_tokens
    return hits / total


def test_a_mooncake_line_is_a_request(tmp_path: Path) -> None:
    late = MOONCAKE | {"timestamp": 9003, "hash_ids": [0, 1, 3], "output_length": 0}
    trace = read_trace(write(tmp_path / "m.jsonl", MOONCAKE, late))
    trace.check()
    assert (trace.block_tokens, trace.closed_loop, trace.name) == (512, False, "m.jsonl")
    assert chunks(trace) == [[0, 1, 2], [0, 1, 3]]
    assert [(each.prompt_tokens, each.output_tokens) for each in trace.requests] == [(1100, 5), (1100, 1)]
    assert trace.requests[0].arrival_s == 0
    assert 3 < trace.requests[1].arrival_s < 9


def test_exact_times_in_mooncakes_format_are_kept(tmp_path: Path) -> None:
    lines = [MOONCAKE | {"timestamp": 3000 + 250 * number} for number in range(13)]
    trace = read_trace(write(tmp_path / "m.jsonl", *lines))
    assert [request.arrival_s for request in trace.requests] == [number / 4 for number in range(13)]


def test_mooncakes_ticks_are_spread_the_same_way_for_the_same_seed(tmp_path: Path) -> None:
    file = write(tmp_path / "m.jsonl", *[MOONCAKE] * 20)
    one, same, other = ([request.arrival_s for request in read_trace(file, seed=seed).requests] for seed in (1, 1, 2))
    assert one == same != other
    assert 0 < one[-1] <= 3


def test_arrivals_that_are_on_no_ticks_stay_as_they_were_recorded(tmp_path: Path) -> None:
    lines = [MOONCAKE | {"timestamp": at} for at in (3000, 3179, 6500.5)]
    trace = read_trace(write(tmp_path / "m.jsonl", *lines))
    assert [request.arrival_s for request in trace.requests] == pytest.approx([0, 0.179, 3.5005])


def test_one_id_behind_different_blocks_is_not_one_prefix(tmp_path: Path) -> None:
    lines = [MOONCAKE | {"timestamp": 5 * at, "hash_ids": ids} for at, ids in enumerate(([0, 7, 7], [1, 7], [0, 7, 7]))]
    first, other, again = chunks(read_trace(write(tmp_path / "m.jsonl", *lines)))
    assert first == again
    assert len(set(first)) == 3
    assert not set(first) & set(other)


def test_azure_rows_have_lengths_and_no_prefixes(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    rows = ("2023-11-16 18:17:03.9799600,4808,10\n", "2023-11-16 18:17:04.0319600,3180,8\n")
    trace = read_trace(write(tmp_path / "a.csv", header, *rows))
    trace.check()
    assert [each.prompt_tokens for each in trace.requests] == [4808, 3180]
    assert trace.requests[1].arrival_s == pytest.approx(0.052, abs=1e-6)
    assert chunks(trace) == [[], []]


def test_azure_times_may_have_a_zone(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    rows = ("2024-05-10 00:00:00.009930+00:00,2162,5\n", "2024-05-10 01:00:01.009930+01:00,2399,6\n")
    trace = read_trace(write(tmp_path / "a.csv", header, *rows))
    assert [each.arrival_s for each in trace.requests] == pytest.approx([0, 1])


def test_a_claude_code_session_keeps_its_turns_and_thinks(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "c.jsonl", SESSION), block_tokens=64)
    trace.check()
    assert trace.closed_loop
    first, nested, last = trace.requests
    assert first.session == last.session != nested.session
    assert (nested.arrival_s, last.arrival_s) == (5, 9)
    assert (first.think_s, nested.think_s, last.think_s) == (0, 0, 2.5)
    assert (first.tool_call, last.tool_call) == (True, False)
    assert first.chunks[:4] == last.chunks[:4]
    assert not set(first.chunks[4:]) & set(last.chunks[4:])
    assert not set(nested.chunks) & set(first.chunks)


def test_sessions_share_tools_and_system_prompt_of_one_model(tmp_path: Path) -> None:
    def session(model: str, system: int) -> dict[str, Any]:
        only = {"t": 0, "m": model, "in": 640, "out": 1, "runs": [[1, 10]], "think": 0, "stop": ""}
        return SESSION | {"system_tokens": system, "requests": [only]}

    lines = [session("opus", 128), session("opus", 128), session("opus", 192), session("haiku", 128)]
    trace = read_trace(write(tmp_path / "c.jsonl", *lines), block_tokens=64, spread_s=0)
    same, twin, other_system, other_model = chunks(trace)
    shared = [sum(a == b for a, b in zip(same, other, strict=True)) for other in (twin, other_system, other_model)]
    assert shared == [4, 2, 0]  # tools and system prompt; tools; nothing


def test_blocks_are_joined_by_the_last_of_them(tmp_path: Path) -> None:
    fine = read_trace(write(tmp_path / "c.jsonl", SESSION), block_tokens=64)
    coarse = read_trace(tmp_path / "c.jsonl", block_tokens=128)
    assert [len(each) for each in chunks(fine)] == [5, 2, 6]
    assert [len(each) for each in chunks(coarse)] == [2, 1, 3]
    first, _, last = chunks(coarse)
    assert first == last[:2]


def test_sessions_begin_within_the_spread(tmp_path: Path) -> None:
    file = write(tmp_path / "c.jsonl", *[SESSION] * 30)
    starts = [each.arrival_s for each in read_trace(file, spread_s=100).requests if each.think_s == 0]
    assert 50 < max(starts) <= 105
    assert max(each.arrival_s for each in read_trace(file, spread_s=0).requests) == 9


def test_a_recording_knows_sessions_and_pauses(tmp_path: Path) -> None:
    later = LINE | {"t": 5.5, "output": None}
    trace = read_trace(write(tmp_path / "kvway-a.jsonl", HEAD, LINE, later))
    trace.check()
    assert (trace.block_tokens, trace.closed_loop) == (256, True)
    assert [each.think_s for each in trace.requests] == [0, 2.5]
    assert [each.output_tokens for each in trace.requests] == [4, 99]
    assert chunks(trace) == [[7, 8], [7, 8]]


def test_recordings_of_several_gateways_are_merged_by_their_clocks(tmp_path: Path) -> None:
    write(tmp_path / "kvway-a.jsonl", HEAD, LINE, LINE | {"t": 4.0})
    write(tmp_path / "kvway-b.jsonl", HEAD | {"started": "2026-01-01T00:00:02Z"}, LINE | {"session": None})
    trace = read_trace(tmp_path)
    assert [each.arrival_s for each in trace.requests] == [0, 2, 3]
    assert [each.session for each in trace.requests] == ["5", None, "5"]
    assert not trace.closed_loop


def test_ids_that_are_hashes_leave_room_for_copies(tmp_path: Path) -> None:
    first, second = 2**63 - 1, 2**63 - 2
    lines = [LINE | {"ids": [first, second]}, LINE | {"t": 9.0, "ids": [first]}]
    assert chunks(read_trace(write(tmp_path / "r", HEAD, *lines))) == [[0, 1], [0]]
    assert chunks(read_trace(write(tmp_path / "m", MOONCAKE | {"hash_ids": [first, second]}))) == [[0, 1]]


def test_a_compressed_trace_reads_the_same(tmp_path: Path) -> None:
    plain = write(tmp_path / "m.jsonl", MOONCAKE, "\n", MOONCAKE)
    packed = tmp_path / "m.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed).requests == read_trace(plain).requests


@pytest.mark.parametrize(
    "first", [json.dumps(MOONCAKE), "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1100,5"]
)
def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path: Path, first: str) -> None:
    file = tmp_path / "marked"
    file.write_text(first, "utf-8-sig")
    assert [each.prompt_tokens for each in read_trace(file).requests] == [1100]


CUT = gzip.compress(json.dumps(MOONCAKE).encode() * 50)[:-20]


@pytest.mark.parametrize(
    ("lines", "line", "said"),
    [
        ([], None, "empty"),
        (["hello\n"], 1, "no known trace format"),
        (["[1]\n"], 1, "no known trace format"),
        (["\x00\xff\n"], 1, "no known trace format"),
        ([MOONCAKE, "{\n"], 2, "truncated"),
        ([MOONCAKE, "\n", MOONCAKE | {"input_length": 0}], 3, "input_length"),
        ([MOONCAKE, MOONCAKE | {"hash_ids": [-1]}], 2, "hash_ids"),
        ([MOONCAKE, MOONCAKE | {"hash_ids": [0, 1, 2, 3]}], 2, "3 blocks of 512"),
        ([MOONCAKE, MOONCAKE | {"timestamp": "soon"}], 2, "timestamp"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens\n", "2023-11-16 18:17:03,1\n"], 2, "not a row"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens\n", "yesterday,1,1\n"], 2, "not a row"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens\n", "2023-11-16 18:17:03,0,1\n"], 2, "at least one prompt token"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens\n"], None, "no requests"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens\n", "2023-11-16 18:17:03," + "9" * 400 + ",1\n"], 2, "67,108,864"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens\n", "1" * 200_000 + ",1,1\n"], 2, "not a row"),
        ([MOONCAKE | {"input_length": 2**40}], 1, "input_length"),
        ([SESSION, SESSION | {"block_size": 48}], 2, "multiple of 48"),
        ([SESSION, SESSION | {"requests": [{"t": 0, "m": "a", "in": 60, "runs": [[1, 1]]}]}], 2, "names 64 tokens"),
        ([SESSION, SESSION | {"requests": [{"t": 0, "m": "a"}]}], 2, "`in`"),
        ([SESSION, SESSION | {"requests": [{"m": "a", "in": 60}]}], 2, "`t`"),
        ([SESSION | {"requests": []}], None, "no requests"),
        ([HEAD | {"kvway_trace": 2}], 1, "version 2"),
        ([HEAD], None, "no requests"),
        ([HEAD, LINE, '{"t":1.0,"inp'], 3, "truncated"),
        ([HEAD, LINE | {"ids": [1, 2, 3]}], 2, "3 chunks"),
    ],
)  # fmt: skip
def test_a_broken_trace_is_named_with_its_line(tmp_path: Path, lines: list[Any], line: int | None, said: str) -> None:
    file = write(tmp_path / "trace", *lines)
    with pytest.raises(TraceError) as raised:
        read_trace(file)
    where = f"{file}:{line}: " if line else f"{file}: "
    assert str(raised.value).startswith(where)
    assert said in str(raised.value)


def test_a_compressed_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(CUT)
    with pytest.raises(TraceError, match=r"cut\.gz:1: the compressed file is broken or cut short"):
        read_trace(tmp_path / "cut.gz")


def test_a_file_that_is_not_there_and_a_folder_without_recordings_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="no recordings"):
        read_trace(tmp_path)


def test_a_closed_loop_needs_sessions(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="open loop only"):
        read_trace(write(tmp_path / "m.jsonl", MOONCAKE), closed_loop=True)
    with pytest.raises(TraceError, match="open loop only"):
        read_trace(write(tmp_path / "k.jsonl", HEAD, LINE | {"session": None}), closed_loop=True)
    assert not read_trace(write(tmp_path / "c.jsonl", SESSION), closed_loop=False).closed_loop


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason=f"the published traces are not in {SHARED}")
def test_the_published_traces_have_the_published_hit_rates() -> None:
    mooncake = read_trace(SHARED / "mooncake_conversation.jsonl.gz")
    assert len(mooncake.requests) == 12_031
    assert round(infinite_cache_hit_rate(mooncake), 3) == 0.374
    agents = read_trace(SHARED / "claude_code_sessions.jsonl.gz", block_tokens=2048)
    agents.check()
    assert infinite_cache_hit_rate(agents) == pytest.approx(0.96, abs=0.01)
    assert len(read_trace(SHARED / "azure_code_2023.csv.gz").requests) == 8_819
