"""Long prompts in pieces, simulated: short ones go in between, and what pieces leave in the cache is no hit."""

from __future__ import annotations

import numpy as np
import pytest

from sim.engine import Simulation, simulate
from sim.fleet import Failure, FleetSettings, GatewaySettings
from sim.index import FleetIndex
from sim.requests import SimRequest, Trace
from sim.results import SimResult
from sim.router import Router, make_policy

BLOCK = 64
LONG = 65_536
IN_PIECES = GatewaySettings(piece_tokens=8192)


def prompt(at_s: float, name: int, tokens: int, output_tokens: int = 4) -> SimRequest:
    blocks = range(10_000 * name, 10_000 * name + tokens // BLOCK)
    return SimRequest(at_s, blocks, tokens, output_tokens, session=f"s{name}")


def run(*requests: SimRequest, gateway: GatewaySettings = IN_PIECES, **settings: object) -> SimResult:
    fleet = FleetSettings(gateway=gateway, **{"workers": 1, **settings})  # type: ignore[arg-type]
    return simulate(Trace(requests, BLOCK), fleet)


def test_a_short_prompt_overtakes_a_long_one_that_came_before_and_costs_it_little():
    requests = prompt(0.0, 1, LONG), prompt(0.1, 2, 512)
    whole, pieces = run(*requests, gateway=GatewaySettings(piece_tokens=0)), run(*requests)
    assert whole.ttft_s[1] > whole.ttft_s[0] - 0.1
    assert pieces.ttft_s[1] < 0.25 * whole.ttft_s[1]
    assert pieces.ttft_s[0] == pytest.approx(whole.ttft_s[0], rel=0.1)


def test_of_two_long_prompts_the_one_that_has_less_left_is_not_interrupted():
    result = run(prompt(0.0, 1, LONG), prompt(0.1, 2, LONG))
    alone = run(prompt(0.0, 1, LONG))
    assert result.ttft_s[0] == pytest.approx(alone.ttft_s[0], rel=0.01)
    assert result.ttft_s[1] == pytest.approx(2 * alone.ttft_s[0], rel=0.05)


def test_what_pieces_have_computed_is_no_hit_and_what_was_there_before_is_one():
    cold = run(prompt(0.0, 1, LONG))
    assert cold.hit_tokens[0].sum() == 0
    assert cold.wait_s[0] == 0.0
    followed = run(prompt(0.0, 1, 16_384), prompt(60.0, 1, LONG))
    assert followed.hit_tokens[1].tolist() == [16_384, 0, 0, 0]


def test_a_piece_and_what_is_left_count_together_as_the_whole_prompt():
    router = Router(make_policy("least-work", None, 0), FleetSettings(workers=1), FleetIndex(1), BLOCK)
    whole = router.route(prompt(0.0, 1, LONG), [0], 0.0)
    piece = router.piece(whole, 8192, 1.0)
    pending = router.fleet.pending_prefill_tokens
    assert (pending[0], piece.uncached_tokens, whole.flight.uncached_tokens) == (LONG, 8192, LONG - 8192)
    router.ledger.first_byte(piece, 2.0)
    assert pending[0] == LONG - 8192


def test_prompts_go_whole_where_running_contexts_leave_pieces_no_room():
    running, long, short = prompt(0.0, 1, 40_000, 2000), prompt(20.0, 2, LONG), prompt(20.1, 3, 512)
    roomy = run(running, long, short, capacity_tokens=200_000)
    tight = run(running, long, short, capacity_tokens=120_000)
    assert roomy.ttft_s[2] < 0.5 * roomy.ttft_s[1]
    assert tight.ttft_s[2] > tight.ttft_s[1] - 0.2


@pytest.mark.parametrize("at_s", [0.5, 2.0, 4.0])
def test_a_worker_that_dies_between_pieces_gives_the_prompt_to_another_and_nothing_stays_counted(at_s):
    requests = [prompt(0.0, 1, LONG), prompt(0.1, 2, LONG), prompt(0.2, 3, 512), prompt(0.3, 4, LONG)]
    failures = tuple(Failure(at_s=at_s, worker=worker, down_s=1.0) for worker in (0, 1))
    fleet = FleetSettings(workers=2, gateway=IN_PIECES, failures=failures)
    simulation = Simulation(Trace(requests, BLOCK), fleet, "expected-cost", None, 0, None)
    result = simulation.run()
    assert result.answered.all()
    assert result.counters["retries"] > 0
    view = simulation.routers[0].fleet
    for column in ("pending_prefill_tokens", "pending_prefill_s", "prefilling_since", "running", "decode_tokens"):
        assert not np.any(view.column(column)), column


def test_pieces_shorter_than_a_block_are_refused():
    with pytest.raises(ValueError, match="piece_tokens, 63"):
        run(prompt(0.0, 1, LONG), gateway=GatewaySettings(piece_tokens=63))
    with pytest.raises(ValueError, match="piece_tokens must not be negative"):
        GatewaySettings(piece_tokens=-1)
