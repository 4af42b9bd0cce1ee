from __future__ import annotations

from typing import Any

import pytest

from gateway.events.assembler import Assembler
from gateway.events.decode import decode_batch
from policies.base import Tier
from policies.chunks import ChunkHasher
from tests.events_rig import CLEARED, MODEL, NaiveIndex, batch, chunks_of, packed, removed, stored, tokens

CHUNK = 4


class Worker:
    """One assembler, fed with events as engines write them, and the index that follows its changes."""

    def __init__(self, chunk_tokens: int = CHUNK, **bounds: int) -> None:
        self.hasher = ChunkHasher(chunk_tokens)
        self.assembler = Assembler(self.hasher, MODEL, **bounds)
        self.index = NaiveIndex()

    def see(self, *events: Any) -> None:
        decoded = decode_batch(batch(*events))
        assert not decoded.bad
        self.assembler.apply(decoded.events)
        self.index.apply(self.assembler.take())

    def run(self, ids: list[int], **identity: str) -> int:
        return self.index.run(chunks_of(self.hasher, ids, **identity))

    def tiers(self, ids: list[int]) -> list[set[Tier]]:
        return [self.index.tiers(chunk) for chunk in chunks_of(self.hasher, ids)]


@pytest.fixture
def worker() -> Worker:
    return Worker()


PROMPT = tokens(8)


def whole_prompt(**fields: Any) -> dict:
    """Two chunks in four blocks of two tokens, called 1 to 4."""
    return stored([1, 2, 3, 4], PROMPT, **fields)


def test_blocks_make_chunks(worker):
    worker.see(whole_prompt())
    assert worker.tiers(PROMPT) == [{Tier.HBM}, {Tier.HBM}]


def test_a_chunk_is_held_once_its_last_block_is(worker):
    worker.see(stored([1], PROMPT[:2]))
    assert worker.run(PROMPT) == 0
    worker.see(stored([2, 3], PROMPT[2:6], parent=1))
    assert worker.run(PROMPT) == 1
    worker.see(stored([4], PROMPT[6:], parent=3))
    assert worker.run(PROMPT) == 2


@pytest.mark.parametrize("gone", [1, 2])
def test_a_removed_inner_block_cuts_the_run_there(worker, gone):
    worker.see(whole_prompt(), removed([gone]))
    assert worker.tiers(PROMPT) == [set(), {Tier.HBM}]


def test_storing_an_inner_block_again_restores_the_run(worker):
    worker.see(whole_prompt(), removed([2]))
    worker.see(stored([2], PROMPT[2:4], parent=1))
    assert worker.run(PROMPT) == 2


def test_a_chain_that_was_removed_whole_can_come_back(worker):
    worker.see(whole_prompt(), removed([4]), removed([3]), removed([2]), removed([1]))
    assert (worker.run(PROMPT), len(worker.assembler)) == (0, 0)
    worker.see(whole_prompt())
    assert worker.run(PROMPT) == 2


def test_a_fork_inside_a_chunk_makes_two_chunks_on_the_same_first_block(worker):
    other = PROMPT[:2] + tokens(2, start=900)
    worker.see(stored([1, 2], PROMPT[:4]), stored([3], other[2:], parent=1))
    assert (worker.run(PROMPT[:4]), worker.run(other)) == (1, 1)
    worker.see(removed([2]))
    assert (worker.run(PROMPT[:4]), worker.run(other)) == (0, 1)
    worker.see(removed([1]))
    assert worker.run(other) == 0


def test_many_forks_after_the_same_block_come_and_go_one_by_one(worker):
    forks = [PROMPT[:2] + tokens(2, start=100 * number) for number in range(2, 7)]
    worker.see(stored([1], PROMPT[:2]), *[stored([number], fork[2:], parent=1) for number, fork in enumerate(forks, 2)])
    worker.see(stored([1], PROMPT[:2], medium="CPU"), removed([1]))
    assert [worker.tiers(fork) for fork in forks] == [[{Tier.HOST}]] * 5
    for number, fork in enumerate(forks, 2):
        worker.see(removed([number]))
        assert worker.run(fork) == 0
        assert len(worker.assembler) == 7 - number
    worker.see(removed([1], medium=None))
    assert len(worker.assembler) == 0


def test_a_child_is_attached_when_its_parent_appears(worker):
    worker.see(stored([3, 4], PROMPT[4:], parent=2))
    worker.see(stored([2], PROMPT[2:4], parent=1))
    assert (worker.run(PROMPT), worker.assembler.orphans) == (0, 3)
    worker.see(stored([1], PROMPT[:2]))
    assert (worker.run(PROMPT), worker.assembler.orphans) == (2, 0)


def test_an_orphan_that_was_removed_is_not_attached(worker):
    worker.see(stored([2], PROMPT[2:4], parent=1), removed([2]))
    assert (len(worker.assembler), worker.assembler.orphans) == (0, 0)
    worker.see(stored([1], PROMPT[:2]))
    assert worker.run(PROMPT) == 0


def test_an_orphan_keeps_the_tiers_it_was_given_while_it_waited(worker):
    worker.see(stored([2], PROMPT[2:4], parent=1), stored([2], PROMPT[2:4], parent=1, medium="CPU"), removed([2]))
    worker.see(stored([1], PROMPT[:2]))
    assert worker.tiers(PROMPT[:4]) == [{Tier.HOST}]


def test_a_block_that_is_its_own_parent_stays_an_orphan(worker):
    worker.see(stored([1], PROMPT[:2], parent=1), stored([2], PROMPT[2:4], parent=3), stored([3], PROMPT[:2], parent=2))
    assert worker.assembler.orphans == 3
    worker.see(removed([1, 2, 3]))
    assert len(worker.assembler) == 0


def test_two_copies_of_a_block_need_two_removals(worker):
    worker.see(whole_prompt(), stored([4], PROMPT[6:], parent=3))
    worker.see(removed([4]))
    assert worker.run(PROMPT) == 2
    worker.see(removed([4]))
    assert worker.run(PROMPT) == 1


def test_copies_are_counted_per_tier(worker):
    worker.see(whole_prompt(), whole_prompt(medium="CPU"), whole_prompt(medium="CPU"))
    worker.see(removed([1, 2, 3, 4]), removed([1, 2, 3, 4], medium="CPU"))
    assert worker.tiers(PROMPT) == [{Tier.HOST}, {Tier.HOST}]


def test_the_same_tokens_under_two_hashes_are_held_until_both_are_gone(worker):
    worker.see(whole_prompt(), stored([11, 12, 13, 14], PROMPT))
    worker.see(removed([1, 2, 3, 4]))
    assert worker.run(PROMPT) == 2
    worker.see(removed([12]))
    assert worker.tiers(PROMPT) == [set(), {Tier.HBM}]


def test_blocks_of_two_sizes_describe_the_same_chunks(worker):
    worker.see(whole_prompt(), stored(["a", "b"], PROMPT, medium="cpu"))
    worker.see(removed([1, 2, 3, 4]))
    assert worker.tiers(PROMPT) == [{Tier.HOST}, {Tier.HOST}]


def test_a_gpu_removal_leaves_the_host_copy(worker):
    worker.see(whole_prompt(), whole_prompt(medium="CPU"))
    assert worker.tiers(PROMPT)[0] == {Tier.HBM, Tier.HOST}
    worker.see(removed([1, 2]))
    assert worker.tiers(PROMPT) == [{Tier.HOST}, {Tier.HBM, Tier.HOST}]


def test_a_removal_without_tier_removes_all(worker):
    worker.see(whole_prompt(), whole_prompt(medium="CPU"), whole_prompt(medium="DISK"))
    worker.see(removed([2], medium=None))
    assert worker.tiers(PROMPT) == [set(), {Tier.HBM, Tier.HOST, Tier.DISK}]


def test_a_chunk_spread_over_tiers_is_held_in_the_slowest_that_is_needed(worker):
    worker.see(stored([1], PROMPT[:2]), stored([2], PROMPT[2:4], parent=1, medium="DISK"))
    assert worker.tiers(PROMPT[:4]) == [{Tier.DISK}]
    worker.see(stored([2], PROMPT[2:4], parent=1, medium="CPU"))
    assert worker.tiers(PROMPT[:4]) == [{Tier.HOST}]
    worker.see(stored([2], PROMPT[2:4], parent=1))
    assert worker.tiers(PROMPT[:4]) == [{Tier.HBM}]


def test_a_named_block_takes_on_the_content_it_is_known_by(worker):
    worker.see(whole_prompt())
    for number in (1, 2, 3, 4):
        worker.see(stored([number], [], medium="CPU", block_size=0))
    worker.see(removed([1, 2, 3, 4]))
    assert worker.tiers(PROMPT) == [{Tier.HOST}, {Tier.HOST}]


def test_a_named_block_that_was_never_described_is_ignored(worker):
    worker.see(stored([1], [], medium="CPU", block_size=0), removed([1], medium="CPU"))
    assert len(worker.assembler) == 0


def test_a_reset_empties_every_tier(worker):
    worker.see(whole_prompt(), whole_prompt(medium="CPU"))
    worker.see(CLEARED)
    assert (worker.run(PROMPT), len(worker.assembler)) == (0, 0)
    worker.see(whole_prompt())
    assert worker.tiers(PROMPT) == [{Tier.HBM}, {Tier.HBM}]


def test_what_follows_a_reset_in_the_same_batch_counts(worker):
    worker.see(whole_prompt())
    worker.see(removed([4]), CLEARED, stored([1, 2], PROMPT[:4]))
    assert worker.run(PROMPT) == 1


def test_salt_and_adapter_separate_prefixes(worker):
    worker.see(stored([1, 2], PROMPT[:4], extra_keys=[["tenant"], None]))
    worker.see(stored([3, 4], PROMPT[:4], lora_name="adapter", extra_keys=[["adapter"], ["adapter"]]))
    prompt = PROMPT[:4]
    assert worker.run(prompt) == 0
    assert worker.run(prompt, salt="tenant") == worker.run(prompt, lora="adapter") == 1
    assert worker.run(prompt, salt="tenant", lora="adapter") == worker.run(prompt, salt="other") == 0


def test_a_child_inherits_the_salt_of_its_chain(worker):
    worker.see(stored([1], PROMPT[:2], extra_keys=[["tenant"]]), stored([2], PROMPT[2:4], parent=1))
    assert (worker.run(PROMPT[:4], salt="tenant"), worker.run(PROMPT[:4])) == (1, 0)


def test_a_host_copy_announced_without_the_salt_is_still_salted(worker):
    worker.see(stored([1, 2], PROMPT[:4], extra_keys=[["tenant"], None]))
    worker.see(stored([1, 2], PROMPT[:4], medium="CPU"), removed([1, 2]))
    assert (worker.run(PROMPT[:4], salt="tenant"), worker.run(PROMPT[:4])) == (1, 0)


COPY = stored([1, 2], PROMPT[:4], medium="CPU")


def test_an_unknown_block_in_a_lower_tier_has_no_salt_if_it_is_not_told(worker):
    worker.see(COPY)
    assert worker.tiers(PROMPT[:4]) == [{Tier.HOST}]


def test_after_a_loss_it_may_be_a_tenants_whose_salt_was_told_unheard(worker):
    worker.assembler.heard_all = False
    worker.see(COPY, stored([3, 4], PROMPT[4:], parent=2, medium="CPU"))
    assert (worker.run(PROMPT), len(worker.assembler)) == (0, 0)
    worker.see(stored([3, 4], PROMPT[4:], parent=2))  # computed after a prefix that was loaded from there
    assert (worker.run(PROMPT), worker.run(PROMPT, salt="tenant")) == (0, 0)
    worker.see(stored([1, 2], PROMPT[:4], extra_keys=[["tenant"], None]))
    assert (worker.run(PROMPT), worker.run(PROMPT, salt="tenant")) == (0, 2)


def test_after_a_loss_an_adapters_name_does_not_tell_that_there_is_no_salt(worker):
    worker.assembler.heard_all = False
    worker.see(stored([1, 2], PROMPT[:4], medium="CPU", lora_name="adapter"))
    assert worker.run(PROMPT[:4], lora="adapter") == 0


def test_after_a_loss_a_copy_after_a_known_block_may_lack_an_image(worker):
    worker.assembler.heard_all = False
    worker.see(stored([1, 2], PROMPT[:4]), stored([3, 4], PROMPT[4:], parent=2, medium="CPU"))
    assert worker.run(PROMPT) == 1
    worker.see(stored([3, 4], PROMPT[4:], parent=2, medium="CPU", extra_keys=[[["image", 0]], None]))
    first, _ = chunks_of(worker.hasher, PROMPT)
    assert worker.index.tiers(worker.hasher.next(first, packed(PROMPT[4:]), b"image@0")) == {Tier.HOST}


def test_after_a_loss_copies_of_what_is_known_and_copies_with_their_salt_count(worker):
    worker.assembler.heard_all = False
    worker.see(stored([1, 2], PROMPT[:4]), COPY, removed([1, 2]))
    worker.see(stored([11, 12], PROMPT[:4], medium="CPU", extra_keys=[["tenant"], None]))
    assert worker.tiers(PROMPT[:4]) == [{Tier.HOST}]
    assert worker.run(PROMPT[:4], salt="tenant") == 1


def test_after_a_loss_a_store_with_blocks_of_its_own_counts(worker):
    worker.assembler.heard_all = False
    worker.see(stored([1, 2], PROMPT[:4]), stored(["own"], tokens(4, start=900), medium="CPU"))
    assert worker.tiers(tokens(4, start=900)) == [{Tier.HOST}]


def test_what_was_given_up_for_want_of_room_is_as_good_as_unheard():
    worker = Worker(max_blocks=64)
    worker.see(stored([1, 2], PROMPT[:4], extra_keys=[["tenant"], None]))
    worker.see(stored(range(100, 164), tokens(128, start=500)))
    assert worker.run(PROMPT[:4], salt="tenant") == 0
    worker.see(COPY)
    assert worker.run(PROMPT[:4]) == 0


def test_multimodal_items_separate_chunks_from_the_first_they_reach_into(worker):
    worker.see(stored([1, 2, 3, 4], PROMPT, extra_keys=[None, None, [["image", 1]], [["image", -1]]]))
    assert worker.run(PROMPT) == 1
    first, second = chunks_of(worker.hasher, PROMPT)
    with_image = worker.hasher.next(first, packed(PROMPT[4:]), b"image@1")
    assert worker.index.tiers(with_image) == {Tier.HBM}
    assert worker.index.tiers(second) == set()


def test_other_groups_of_a_hybrid_model_do_not_touch_the_prefix(worker):
    worker.see(whole_prompt(group_idx=1))
    worker.see(whole_prompt(group_idx=2), stored([1], [], group_idx=0, medium="CPU", block_size=0))
    worker.see(removed([1, 2], group_idx=0), removed([1, 2], group_idx=2))
    assert worker.tiers(PROMPT) == [{Tier.HBM}, {Tier.HBM}]
    worker.see(removed([1], group_idx=1))
    assert worker.run(PROMPT) == 0


def test_a_block_may_hold_several_chunks():
    worker = Worker(chunk_tokens=2)
    worker.see(stored([1, 2], tokens(12)))
    assert worker.run(tokens(12)) == 6
    worker.see(removed([2]))
    assert worker.run(tokens(12)) == 3


def test_a_block_that_reaches_over_a_chunks_end_counts_for_both():
    worker = Worker(chunk_tokens=4)
    worker.see(stored([1, 2, 3, 4], tokens(12)))
    assert worker.run(tokens(12)) == 3
    worker.see(removed([2]))
    assert worker.tiers(tokens(12)) == [set(), set(), {Tier.HBM}]


def test_changes_that_cancel_out_do_not_reach_the_index(worker):
    worker.assembler.apply(decode_batch(batch(whole_prompt(), removed([3, 4]))).events)
    changes = worker.assembler.take()
    assert [len(run.chunks) for run in changes.stored] == [1]
    assert changes.removed == []
    assert worker.assembler.take() == (False, [], [])
    worker.assembler.apply(decode_batch(batch(removed([1, 2]), stored([1, 2], PROMPT[:4]))).events)
    assert worker.assembler.take() == (False, [], [])


def test_changes_come_by_chain_and_name_its_first_chunk(worker):
    salted = stored([11, 12, 13, 14], PROMPT, extra_keys=[["tenant"], None, None, None])
    worker.assembler.apply(decode_batch(batch(whole_prompt(), salted)).events)
    runs = worker.assembler.take().stored
    plain, tenant = chunks_of(worker.hasher, PROMPT), chunks_of(worker.hasher, PROMPT, salt="tenant")
    assert [(run.tier, run.root, run.chunks) for run in runs] == [
        (Tier.HBM, plain[0], plain),
        (Tier.HBM, tenant[0], tenant),
    ]
    worker.assembler.apply(decode_batch(batch(removed([4]), removed([14]))).events)
    assert [(run.root, run.chunks) for run in worker.assembler.take().removed] == [
        (plain[0], plain[1:]),
        (tenant[0], tenant[1:]),
    ]


def test_orphans_are_bounded_and_the_oldest_go_first():
    worker = Worker(max_orphans=8)
    for number in range(100):
        worker.see(stored([1000 + number], PROMPT[2:4], parent=number))
        assert worker.assembler.orphans <= 8
    worker.see(stored([99], PROMPT[:2]))
    assert worker.run(PROMPT) == 1
    assert len(worker.assembler) == worker.assembler.orphans + 2


def test_blocks_are_bounded_and_what_is_given_up_is_removed():
    worker = Worker(max_blocks=100)
    for number in range(400):
        worker.see(stored([3 * number, 3 * number + 1, 3 * number + 2], tokens(6, start=number)))
        assert len(worker.assembler) <= 100
    assert worker.run(tokens(6, start=399)) == 1
    assert worker.run(tokens(6, start=0)) == 0
    assert sum(map(len, worker.index.held.values())) <= 100


def test_of_a_tier_that_never_removes_no_more_is_remembered_than_is_known():
    worker = Worker(max_blocks=100)
    for number in range(400):
        worker.see(stored([2 * number, 2 * number + 1], tokens(4, start=number), medium="CPU"))
        worker.see({"type": "BlockStored", "block_hashes": [-number - 1], "medium": "CPU"})  # of nobody knows what
    assert 0 < len(worker.assembler._young[Tier.HOST]) <= len(worker.assembler)
    worker.see(CLEARED)
    assert not worker.assembler._young[Tier.HOST]
    age(worker, times=2)
    assert worker.run(tokens(4, start=399)) == 0


def test_one_branch_that_is_longer_than_the_bound_is_cut_back_from_its_end():
    worker = Worker(max_blocks=100)
    ids = tokens(2000)
    worker.see(stored(range(1000), ids))
    assert 90 <= len(worker.assembler) <= 100
    assert 44 <= worker.run(ids) <= 50


def age(worker: Worker, times: int = 1) -> None:
    for _ in range(times):
        worker.assembler.age()
    worker.index.apply(worker.assembler.take())


def test_a_tier_that_never_removes_forgets_by_age(worker):
    worker.see(whole_prompt(), whole_prompt(medium="EXTERNAL"))
    age(worker)
    assert worker.tiers(PROMPT)[0] == {Tier.HBM, Tier.REMOTE}
    worker.see(stored([1, 2], PROMPT[:4], medium="EXTERNAL"))
    age(worker)
    assert worker.tiers(PROMPT) == [{Tier.HBM, Tier.REMOTE}, {Tier.HBM}]
    age(worker)
    assert worker.tiers(PROMPT) == [{Tier.HBM}, {Tier.HBM}]


def test_a_tier_that_removes_does_not_age(worker):
    worker.see(whole_prompt(), whole_prompt(medium="CPU"), removed([4], medium="CPU"))
    age(worker, times=3)
    assert worker.tiers(PROMPT) == [{Tier.HBM, Tier.HOST}, {Tier.HBM}]


def test_what_was_aged_out_leaves_nothing_behind(worker):
    worker.see(whole_prompt(medium="disk"), whole_prompt(medium="disk"))
    age(worker, times=2)
    assert (worker.run(PROMPT), len(worker.assembler)) == (0, 0)
    worker.see(whole_prompt(medium="disk"))
    worker.see(removed([1, 2, 3, 4], medium="disk"))
    assert len(worker.assembler) == 0


def test_a_long_chain_can_be_forgotten(worker):
    n = 50_000
    worker.see(stored(range(n), tokens(n)))
    worker.see(removed(range(n - 1)))
    assert len(worker.assembler) == n
    worker.see(removed([n - 1]))
    assert len(worker.assembler) == 0


def test_what_is_reported_again_is_no_second_copy_while_reports_are_asked_for(worker):
    worker.assembler.counts_copies = False
    worker.see(whole_prompt())
    worker.see(whole_prompt())
    worker.see(removed([4]))
    assert worker.run(PROMPT) == 1


def test_copies_that_were_counted_before_reports_were_asked_for_still_count(worker):
    worker.see(whole_prompt())
    worker.see(whole_prompt())
    worker.assembler.counts_copies = False
    worker.see(whole_prompt())
    worker.see(removed([4]))
    assert worker.run(PROMPT) == 2
    worker.see(removed([4]))
    assert worker.run(PROMPT) == 1


def test_offloaded_chunks_are_counted_all_the_same(worker):
    worker.assembler.counts_copies = False
    worker.see(whole_prompt(medium="CPU"))
    worker.see(whole_prompt(medium="CPU"))
    worker.see(removed([4], medium="CPU"))
    assert worker.run(PROMPT) == 2


def test_a_shared_remote_tier_holds_only_chunks_that_are_there_as_a_whole():
    worker = Worker(shared_remote=True)
    worker.see(stored([1, 2], PROMPT[:4], medium="EXTERNAL"), stored([3], PROMPT[4:6], parent=2, medium="EXTERNAL"))
    worker.see(stored([4], PROMPT[6:], parent=3))
    assert worker.tiers(PROMPT) == [{Tier.REMOTE}, set()]
    worker.see(stored([4], PROMPT[6:], parent=3, medium="EXTERNAL"))
    assert worker.tiers(PROMPT) == [{Tier.REMOTE}, {Tier.REMOTE}]
    worker.see(removed([1], medium="EXTERNAL"), removed([3], medium="CPU"))
    assert worker.tiers(PROMPT) == [set(), {Tier.REMOTE}]
