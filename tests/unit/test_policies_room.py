import pytest

from policies.order import Held, Turnstile, create_order
from policies.room import AVERAGED_S, KEPT, MAX_ENDS, PATIENCE, Ends, Room, is_lost

CHUNK = 100
CAPACITY = 1000
LATER = 10 * AVERAGED_S  # when the tests begin: long enough for averages to have settled


def chunks_of(name, tokens):
    return [f"{name} {end}".encode() for end in range(CHUNK, tokens + 1, CHUNK)]


@pytest.fixture
def room():
    """Of a worker that is crowded: it has been prefilling for long."""
    room = Room[bytes](CHUNK)
    room.look(CAPACITY, True, LATER)
    assert room.crowded
    return room


@pytest.fixture
def stile(room):
    return Turnstile(create_order("least-work"), 1000, room)


def request(work_s=1.0, lost_tokens=0, held_at=LATER, tokens=10, priority=0):
    held = Held(work_s, tokens, held_at, priority)
    held.lost_tokens = lost_tokens
    return held


def test_a_conversation_that_has_lost_its_context_waits_until_it_fits_beside_those_that_run(room, stile):
    room.begin("a", chunks_of("a", 500))
    room.begin("b", chunks_of("b", 300))
    assert not stile.enter(lost := request(lost_tokens=400))
    assert stile.release() is None
    room.end("b", prefill_s=0.0)
    room.look(CAPACITY, True, LATER + 1)
    assert stile.release() is lost


def test_contexts_that_have_just_paused_are_kept_room_for_in_proportion_to_their_prefill(room):
    room.begin("runs", chunks_of("runs", 300))
    room.begin("pauses", chunks_of("pauses", 500))
    room.end("pauses", prefill_s=2.0)
    for after_s, fits in ((0.9 * KEPT * 2.0, False), (1.1 * KEPT * 2.0, True)):
        room.look(CAPACITY, True, LATER + after_s)
        assert room.fits(400, LATER, work_s=9.0) is fits


def test_a_conversation_that_comes_back_is_counted_once_and_so_is_what_prompts_share(room):
    shared = chunks_of("system", 300)
    room.begin("turn 1", shared + chunks_of("a", 200))
    room.end("turn 1", prefill_s=100.0)
    room.begin("turn 2", shared + chunks_of("a", 300))
    room.begin("turn 2", shared + chunks_of("a", 300))  # its next piece
    room.begin("other", shared + chunks_of("b", 100))
    assert room.fits(300, LATER, work_s=9.0)  # 700 are in use
    assert not room.fits(301, LATER, work_s=9.0)
    room.end("turn 2", prefill_s=0.0)
    room.look(CAPACITY, True, LATER + 1)
    assert room.fits(600, LATER, work_s=9.0)
    assert not room.fits(601, LATER, work_s=9.0)


def test_what_paused_first_has_been_evicted_where_more_is_in_use_than_fits(room):
    room.begin("old", chunks_of("old", 900))
    room.end("old", prefill_s=1e6)
    room.begin("new", chunks_of("new", 500))
    assert room.fits(500, LATER, work_s=9.0)


def test_others_pass_those_that_wait_for_room_and_a_small_one_passes_a_large_one(room, stile):
    room.begin("a", chunks_of("a", 700))
    assert not stile.enter(request(lost_tokens=400))
    assert stile.enter(request(work_s=50.0))
    assert stile.enter(request(lost_tokens=300))


def test_nobody_waits_for_room_for_longer_than_a_multiple_of_its_prefill(room, stile):
    room.begin("a", chunks_of("a", 1000))
    stile.enter(lost := request(work_s=2.0, lost_tokens=400))
    for waited_s, expected in ((0.9 * PATIENCE * 2.0, None), (1.1 * PATIENCE * 2.0, lost)):
        stile.room.look(CAPACITY, True, LATER + waited_s)
        assert stile.release() is expected


def test_where_prefill_has_time_to_spare_they_go_on_as_they_came(room, stile):
    room.begin("a", chunks_of("a", 1000))
    stile.enter(running := request(tokens=1000))
    large, small = request(5.0, 400), request(1.0, 100)
    assert not stile.enter(large)
    assert not stile.enter(small)
    stile.leave(running)
    assert stile.release() is None
    stile.look(CAPACITY, LATER + AVERAGED_S)
    assert not room.crowded
    assert list(iter(stile.release, None)) == [large, small]


@pytest.mark.parametrize("crowded", [True, False])
def test_the_more_urgent_goes_first_of_those_that_wait_for_room_too(room, stile, crowded):
    stile.enter(running := request(tokens=1000))
    room.begin(running, chunks_of("other", 600))
    waiting = [request(lost_tokens=200, priority=priority) for priority in (-1, 0, 5, 0)]
    for held in waiting:
        stile.enter(held)
    low, first, urgent, second = waiting
    assert stile.queue() == [urgent, first, second, low]
    stile.enter(other := request(work_s=0.1))
    room.look(CAPACITY, crowded, 2 * LATER)
    assert room.crowded == crowded
    stile.leave(running)
    assert [stile.release() for _ in range(6)] == [urgent, other, first, second, low, None]


def test_a_worker_that_does_nothing_takes_a_context_of_any_size(stile):
    assert stile.enter(request(lost_tokens=2 * CAPACITY))


def test_a_worker_whose_capacity_is_not_known_is_never_crowded():
    room = Room[bytes](CHUNK)
    room.look(0, True, LATER)
    assert not room.crowded


def test_a_burst_is_no_crowd(room):
    room = Room[bytes](CHUNK)
    room.look(CAPACITY, False, LATER)
    room.look(CAPACITY, True, LATER + AVERAGED_S / 2)
    assert not room.crowded


def test_those_that_leave_while_they_wait_for_room_are_gone(room, stile):
    room.begin("a", chunks_of("a", 1000))
    stile.enter(lost := request(lost_tokens=400))
    assert stile.queue() == [lost]
    stile.leave(lost)
    room.end("a", prefill_s=0.0)
    assert (stile.waiting, stile.queue(), stile.release()) == (0, [], None)


def test_a_conversation_is_lost_if_half_of_it_was_computed_before_and_is_not_cached():
    ends = Ends[str]()
    assert not is_lost(1000, 900, ["a", "b", "c"], ends)  # new
    ends.add(["a", "b", "c"])
    turn = ["a", "b", "c", "d", "e"]
    assert is_lost(1250, 900, turn, ends)
    assert not is_lost(1250, 250, turn, ends)  # cached
    assert not is_lost(2000, 1900, [*turn, "f", "g", "h"], ends)  # mostly new


def test_a_bounded_number_of_prompts_is_remembered_and_the_latest_longest():
    ends = Ends[int]()
    ends.add([])
    for number in range(MAX_ENDS):
        ends.add([number])
    ends.add([0])
    ends.add([MAX_ENDS])
    assert [ends.half_known([number]) for number in (0, 1, 2, MAX_ENDS)] == [True, False, True, True]
