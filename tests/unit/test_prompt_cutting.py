"""Where a text may be cut so that its pieces tokenize as the whole."""

from __future__ import annotations

import pytest

from gateway.prompt.segments import Cutter, choose_tokens, is_certain
from gateway.prompt.tokenizer import AddedToken
from tests.prompt_rig import TEMPLATE_NAMES, chat_of, template


def raw(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, **{"normalized": False, **flags})


def test_a_token_that_nothing_overlaps_is_certain():
    assert is_certain(raw("<|a|>"), [raw("<|a|>"), raw("<|b|>"), raw("[x]")])


@pytest.mark.parametrize("flag", ["lstrip", "single_word", "normalized"])
def test_a_token_that_depends_on_its_surroundings_is_not_certain(flag):
    token = raw("<|a|>", **{flag: True})
    assert not is_certain(token, [token])


def test_a_token_that_takes_the_space_behind_it_is_certain_all_the_same():
    token = raw("<|a|>", rstrip=True)
    assert is_certain(token, [token])


@pytest.mark.parametrize("content", ["", " <a>", "\n<a>", "a>", "_a", "1", "é"])
def test_a_certain_token_begins_with_a_sign(content):
    assert not is_certain(raw(content), [raw(content)])


@pytest.mark.parametrize("other", ["<|a|>b", "x<|a|>", "x<|", "b<", "<|a|><|a|>"])
def test_a_token_that_another_may_swallow_is_not_certain(other):
    assert not is_certain(raw("<|a|>"), [raw("<|a|>"), raw(other)])


def test_tokens_that_are_matched_after_it_cannot_swallow_it():
    assert is_certain(raw("<|a|>"), [raw("<|a|>"), raw("x<|a|>", normalized=True)])


def test_a_token_that_overlaps_itself_is_not_certain():
    assert not is_certain(raw("<><"), [raw("<><")])


def test_segments_begin_with_a_token_and_join_to_the_text():
    assert Cutter(["<a>", "<b>"]).cut("x<a>y<b><a>z") == ["x", "<a>y", "<b>", "<a>z"]
    assert Cutter(["<a>"]).cut("<a>y") == ["<a>y"]
    assert Cutter(["<a>"]).cut("") == []
    assert Cutter([]).cut("<a>y") == ["<a>y"]


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("chatml", ["<|im_start|>"]),
        ("llama3", ["<|start_header_id|>"]),
        ("mistral", ["[INST]", "[/INST]"]),
        ("deepseek", ["<｜User｜>", "<｜Assistant｜>"]),
        ("gemma", ["<start_of_turn>"]),
        ("harmony", ["<|start|>"]),
    ],
)
def test_the_tokens_that_part_messages_are_chosen(name, chosen):
    tokens = (
        "<s> </s> <|begin_of_text|> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> "
        "[INST] [/INST] <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> <start_of_turn> <end_of_turn> "
        "<|start|> <|end|> <|channel|>"
    ).split()
    marks = ["One?", "Two.", "Three!"]
    roles = ["user", "assistant", "user"]
    body = {"messages": [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]}
    example = template(name).render(chat_of(body, template(name)))
    assert choose_tokens([raw(token) for token in tokens], example, marks) == chosen


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_without_certain_tokens_nothing_is_cut(name):
    assert choose_tokens([raw("<|nowhere|>"), raw("user")], "user\nOne?", ["One?"]) == []
