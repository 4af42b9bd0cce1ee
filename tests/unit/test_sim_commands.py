"""``kvway sim`` runs, compares, reports; what is wrong is one message and exit code 2, and no half-written file."""

from __future__ import annotations

import json
import os
import re
import signal
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.cli import app
from sim.experiment import Case, cells, compare, parse_sweep, run_case
from sim.fleet import FleetSettings
from sim.output import check_writable, write_whole
from sim.report import frontier
from sim.scaling import working_set_tokens
from sim.scenario import Traffic, read_fleet, read_policy
from sim.shapes import kv_capacity_tokens

SMALL = "agents:sessions=6,turns=3,system_tokens=1000,task_tokens=1000"


def kvway(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def answer(*words: object) -> dict[str, Any]:
    result = kvway(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_run_answers_every_request_and_says_what_it_costs() -> None:
    found = answer("sim", "run", SMALL, "--workers", 2)
    assert (found["requests"], found["answered"], found["workers"]) == (18, 18, 2)
    assert found["policy"] == "expected-cost"
    assert 0.3 < found["hit_rate"] < 1
    # two workers of four GPUs, priced by the hour
    cost = 2 * 4 * found["duration_s"] / 3600 * 2.5 / 18 * 1000
    assert found["cost_per_1k_requests"] == pytest.approx(cost)


def test_a_trace_is_called_as_its_file_is(tmp_path: Path) -> None:
    trace = tmp_path / "[red].jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 4, "hash_ids": [1]}\n')
    result = kvway("sim", "run", trace, "--workers", 1)
    assert result.exit_code == 0, result.output
    assert "[red]" in result.output


def test_the_same_seed_gives_the_same_figures() -> None:
    one, same, other = (
        answer("sim", "run", SMALL, "--workers", 2, "--policy", "random", "--seed", seed) for seed in (1, 1, 2)
    )
    assert one == same
    assert one["ttft_mean_s"] != other["ttft_mean_s"]


def test_a_comparison_has_a_row_per_cell_and_policy() -> None:
    words = ("sim", "compare", SMALL, "--policies", "round-robin,least-work", "--processes", 1)
    found = answer(*words, "--sweep", "load=1,4", "--sweep", "workers=1,2", "--seeds", 2)
    rows = found["rows"]
    assert [(row["load"], row["workers"], row["policy"]) for row in rows] == [
        (load, workers, policy) for load in (1, 4) for workers in (1, 2) for policy in ("round-robin", "least-work")
    ]
    assert all(row["seeds"] == 2 and row["errors"]["ttft_mean_s"] > 0 for row in rows)
    slow, fast = (next(row for row in rows if row["load"] == load and row["workers"] == 1) for load in (4, 1))
    assert slow["ttft_mean_s"] > fast["ttft_mean_s"]


@pytest.mark.slow
def test_processes_side_by_side_find_what_one_finds() -> None:
    words = ("sim", "compare", SMALL, "--policies", "round-robin,random", "--workers", 2, "--seeds", 2)
    assert answer(*words, "--processes", 1) == answer(*words, "--processes", 2)


def test_ws_cap_sets_the_cache_by_the_working_set() -> None:
    traffic = Traffic(SMALL)
    case = Case(read_policy("round-robin"), traffic, FleetSettings(workers=2), {"ws_cap": 0.25}, 0, 1.0)
    summary = run_case(case).summary
    assert summary["capacity_tokens"] == round(working_set_tokens(traffic.trace(0)) / 0.25 / 2)
    assert summary["ws_cap"] == 0.25


def test_means_and_standard_errors_are_over_seeds() -> None:
    policy, traffic, fleet = read_policy("random"), Traffic(SMALL), FleetSettings(workers=2)
    outcomes = [run_case(Case(policy, traffic, fleet, {}, seed, 1.0)) for seed in range(3)]
    [row] = compare(outcomes)
    values = [float(outcome.summary["ttft_mean_s"]) for outcome in outcomes]
    mean = sum(values) / 3
    assert row["ttft_mean_s"] == pytest.approx(mean)
    deviation = (sum((value - mean) ** 2 for value in values) / 2) ** 0.5
    assert row["errors"]["ttft_mean_s"] == pytest.approx(deviation / 3**0.5)


@pytest.mark.slow
def test_a_report_is_one_page_that_refers_to_nothing_outside(tmp_path: Path) -> None:
    page, figures, trace = tmp_path / "report.html", tmp_path / "figures.json", tmp_path / "<b>&.jsonl"
    line = '{"timestamp":%d,"input_length":600,"output_length":2,"hash_ids":[1,2]}\n'
    trace.write_text("".join(line % (1000 * number) for number in range(20)))
    words = ("sim", "compare", trace, "--policies", "round-robin,least-work", "--processes", 1)
    result = kvway(*words, "--sweep", "workers=1,2", "--report", page, "--save", figures)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [
        "Time to first token",
        "Hit rate by tier",
        "Load per worker",
        "Cost against time to first token",
        "Time to first token over workers",
    ]
    assert len(plots) == 5
    for plot in plots:
        ET.fromstring(plot)
        assert "round-robin" in plot
    outside = [link for link in re.findall(r'(?:href|src)="([^"]*)"', text) if not link.startswith(("#", "data:"))]
    assert outside == []
    assert "<script" not in text
    assert "<b>&" not in text
    assert "@import" not in text
    assert len(json.loads(figures.read_text())["rows"]) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "nowhere.jsonl"), "nowhere.jsonl: No such file"),
        (("run", "agent"), "Did you mean 'agents'"),
        (("run", SMALL, "--policy", "expected-costs"), "Did you mean 'expected-cost'"),
        (("run", SMALL, "--policy", "random:sed=1"), "sed"),
        (("run", SMALL, "--policy", "random:seed"), "not key=value"),
        (("run", SMALL, "--policy", "random:seed=-1"), "seed"),
        (("run", SMALL, "--seed", -1), "--seed"),
        (("run", SMALL, "--policy", "random:seed=["), "no value for seed"),
        (("run", SMALL, "--profile", "llama-3.1-70b/h100/3"), "unknown profile"),
        (("run", SMALL, "--capacity", 2048), "raise capacity_tokens"),
        (("run", SMALL, "--load", 0), "load must be above 0"),
        (("run", SMALL, "--load", 1e-9), "raise sample_s or load"),
        (("run", SMALL, "--ws", -1), "ws must be above 0"),
        (("run", SMALL, "--ws", 1e9), "at most 5,000,000 can be simulated"),
        (("run", SMALL, "--capacity", 10**12), "at most 20,000,000 can be simulated"),
        (("run", SMALL, "--users", 10**12), "at most 5,000,000 requests can be simulated"),
        (("run", "agents:turns=10000000"), "at most 5,000,000 can be simulated"),
        (("run", SMALL, "--share", 2), "share must be"),
        (("run", SMALL, "--gpu-hour", "inf"), "--gpu-hour"),
        (("run", "x" * 300), "unknown traffic"),
        (("run", "./" + "x" * 300), "name too long"),
        (("run", SMALL, "--save", "x" * 250), "name too long"),
        (("run", "rag:requests=3", "--closed-loop"), "open loop only"),
        (("run", SMALL, "--report", "nowhere/report.html"), "folder nowhere does not exist"),
        (("compare", SMALL, "--policies", ","), "names none"),
        (("compare", SMALL, "--policies", "round-robin,rounds"), "unknown policy"),
        (("compare", SMALL, "--sweep", "speed=1"), "can sweep load, ws_cap, workers"),
        (("compare", SMALL, "--sweep", "load=1,x"), "numbers above 0"),
        (("compare", SMALL, "--sweep", "workers=1.5"), "whole numbers"),
        (("compare", SMALL, "--sweep", "load=1", "--sweep", "load=2"), "each key once"),
        (("compare", SMALL, "--sweep", "ws_cap=100", "--workers", 1, "--processes", 1), "at ws_cap 100: "),
    ],
)
def test_what_cannot_be_simulated_is_said_in_one_message(words: tuple[object, ...], said: str) -> None:
    result = kvway("sim", *words)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_bad_trace_is_named_with_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp":0,"input_length":600,"output_length":2,"hash_ids":[1,2]}\n{"timestamp":0}\n')
    page = tmp_path / "report.html"
    result = kvway("sim", "run", trace, "--report", page)
    assert result.exit_code == 2
    assert f"{trace}:2: " in result.output
    assert not page.exists()


OWN_PROFILE = """\
profile: {{prefill_a_s: {prefill_a_s}, prefill_b_s: 1.0e-5, prefill_c_s: 1.0e-9, decode_d0_s: 0.01,
  decode_d1_s: 1.0e-5, decode_d2_s: 1.0e-8, kv_bytes_per_token: 1000, gpus: {gpus}}}
"""
FLEET = """
workers: 3
profile: llama-3.1-8b/h100/1
tiers:
  - {name: host, tier: host, capacity_tokens: 1000000, read_bytes_per_s: 45.0e9, write_bytes_per_s: 45.0e9}
eviction: {rule: lru}
gateway: {event_lag_s: 0.05}
"""


def test_a_fleet_is_read_from_yaml_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    fleet = read_fleet(file, workers=5, profile=None, host_tokens=None)
    assert (fleet.workers, fleet.profile, fleet.gateway.event_lag_s) == (5, "llama-3.1-8b/h100/1", 0.05)
    assert [(tier.name, tier.tier.name, tier.capacity_tokens) for tier in fleet.tiers] == [("host", "HOST", 1_000_000)]
    assert [tier.capacity_tokens for tier in read_fleet(file, host_tokens=5_000).tiers] == [5_000]


def test_a_profile_brings_the_cache_that_fits_beside_its_weights() -> None:
    fleet = read_fleet(None, profile="qwen3-32b/h100/2")
    assert (fleet.capacity_tokens, fleet.layers) == (kv_capacity_tokens("qwen3-32b/h100/2"), 64)
    assert read_fleet(None, profile="qwen3-32b/h100/2", capacity_tokens=5_000).capacity_tokens == 5_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workers: [", "fleet.yaml:1: "),
        ("workers: 2\n  x: 3", "fleet.yaml:2: "),
        ("- workers", "a fleet is a mapping"),
        ("worker: 3", "did you mean 'workers'"),
        ("gateway:\n  event_lag: 1", r"fleet.yaml:2: unknown key 'event_lag'.* at `\$\.gateway\.event_lag`"),
        ("tiers: [{name: a, tiers: host}]", r"unknown key 'tiers'.* at `\$\.tiers\[0\]"),
        ("disaggregation: {workers: 2}", r"unknown key 'workers'.* at `\$\.disaggregation"),
        ("failures:\n- at_s: 3\n  worker: 0\n- at: 3", r"fleet.yaml:4: unknown key 'at'.* at `\$\.failures\[1\]"),
        ("layers: 2\nworkers: many", "fleet.yaml:2: Expected `int`"),
        ("workers: 0", "workers must be at least 1"),
        ("workers: 1000000000", "workers must be at most 10000"),
        ("gateway: {replicas: 1000000}", "replicas must be 1 to 1000"),
        ("layers: 2\neviction:\n  rule: mru", "fleet.yaml:3: "),
        (FLEET.replace("tier: host", "tier: attic"), "tier"),
        ("[" * 1000, "not YAML"),
        ("layers: 2\n? [workers]\n: 3", "fleet.yaml:2: a key must be a plain word"),
        ("workers: 4\nlayers: 2\nworkers: 8", "fleet.yaml:3: key 'workers' is given twice"),
        ("gateway:\n  order: none\n  order: fcfs", "fleet.yaml:3: key 'order' is given twice"),
        (OWN_PROFILE.format(prefill_a_s=".nan", gpus=1), "fleet.yaml:1: profile: prefill_a_s must be between"),
        (OWN_PROFILE.format(prefill_a_s=-1, gpus=1), "prefill_a_s must be between"),
        (OWN_PROFILE.format(prefill_a_s=1e300, gpus=1), "prefill_a_s must be between"),
        (OWN_PROFILE.format(prefill_a_s=0, gpus=0), "gpus must be at least 1"),
        (OWN_PROFILE.format(prefill_a_s=0, gpus=1).replace("decode_d0_s: 0.01", "decode_d0_s: 0"), "takes time"),
    ],
)
def test_a_fleet_that_is_wrong_is_named_with_its_file(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said) as raised:
        read_fleet(file)
    assert str(file) in str(raised.value)


def test_a_time_without_end_is_refused_before_samples_of_it_fill_memory(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("gateway: {overhead_s: 1.0e300}")
    result = kvway("sim", "run", SMALL, "--fleet", file)
    assert result.exit_code == 2
    assert "the simulation comes to 1e+300 s" in result.output


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.html"
    write_whole(file, b"before")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(ValueError, match="No space left"):
        write_whole(file, b"after")
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    assert file.read_bytes() == b"before"


def test_a_pipe_and_what_a_link_leads_to_are_written_and_stay_what_they_are(tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    link.symlink_to(file)
    for path in (pipe, link):
        check_writable(path)
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_bytes)
        write_whole(pipe, b"piped")
        assert read.result() == b"piped" and pipe.is_fifo()
    write_whole(link, b"linked")
    assert file.read_bytes() == b"linked" and link.is_symlink()


def test_the_frontier_keeps_what_nothing_betters() -> None:
    assert frontier([(3, 1), (1, 5), (2, 5), (2, 3), (4, 1)]) == [(1, 5), (2, 3), (3, 1)]


def test_sweeps_are_combined() -> None:
    swept = cells([parse_sweep("load=1,2"), parse_sweep("workers=4")])
    assert swept == [{"load": 1, "workers": 4}, {"load": 2, "workers": 4}]
    assert cells([]) == [{}]


def test_the_comparison_fits_eighty_columns() -> None:
    words = ("sim", "compare", SMALL, "--policies", "expected-cost,least-requests", "--processes", 1)
    result = kvway(*words, "--sweep", "ws_cap=0.25", "--sweep", "workers=2", "--sweep", "load=1")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "expected-cost" in result.stdout


def test_a_process_that_is_killed_is_told_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.experiment.run_case", _die)
    words = ("sim", "compare", SMALL, "--policies", "round-robin,random", "--processes", 2)
    result = kvway(*words)
    assert result.exit_code == 2
    assert "a simulating process was killed" in result.output


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
