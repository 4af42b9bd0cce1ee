from __future__ import annotations

import json
from pathlib import Path

import pytest

import sim
from sim.tokens import ByteTokenizer, Chat, PromptError, Tokenizer, WorkerTokenizer, load_tokenizer

TINY = Path(sim.__file__).parent / "data" / "tiny-model"
USER = {"role": "user", "content": "def f(x):\n    return x  # ünïcode 漢字"}


@pytest.fixture(params=[None, TINY], ids=["bytes", "files"], scope="module")
def tokenizer(request) -> Tokenizer:
    return load_tokenizer(request.param)


def test_text_comes_back_from_its_tokens(tokenizer):
    text = "def f(x):\n    return x"
    assert "".join(tokenizer.pieces(tokenizer.encode_text(text))) == text


def test_a_conversation_begins_with_the_tokens_of_its_earlier_turn(tokenizer):
    first = tokenizer.encode_chat(Chat([USER]))
    answer = tokenizer.answer(first, 40)
    text = "".join(tokenizer.pieces(answer))
    second = tokenizer.encode_chat(Chat([USER, {"role": "assistant", "content": text}, USER]))
    assert second[: len(first) + 40] == first + answer


def test_an_answer_depends_on_the_prompt_and_nothing_else(tokenizer):
    prompt, other = tokenizer.encode_text("a prompt"), tokenizer.encode_text("another")
    assert tokenizer.answer(prompt, 20) == tokenizer.answer(prompt, 20)
    assert tokenizer.answer(prompt, 20) != tokenizer.answer(other, 20)


def test_a_prompt_that_ends_with_the_beginning_of_an_answer_is_answered_with_its_rest(tokenizer):
    prompt = tokenizer.encode_text("a prompt")
    answer = tokenizer.answer(prompt, 20)
    assert len(set(answer)) > 10
    for sent in (1, 7, 19):
        assert tokenizer.answer(prompt + answer[:sent], 20 - sent) == answer[sent:]


def test_an_interrupted_chat_is_continued_with_the_tokens_it_would_have_had(tokenizer):
    prompt = tokenizer.encode_chat(Chat([USER]))
    answer = tokenizer.answer(prompt, 20)
    partial = {"role": "assistant", "content": "".join(tokenizer.pieces(answer[:8]))}
    opened = Chat([USER, partial], add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.encode_chat(opened) == prompt + answer[:8]


def test_a_body_is_a_chat_a_text_or_ids(tokenizer):
    assert tokenizer.encode_body({"messages": [USER]}) == tokenizer.encode_chat(Chat([USER]))
    assert tokenizer.encode_body({"prompt": "some text"}) == tokenizer.encode_text("some text")
    assert tokenizer.encode_body({"prompt": [1, 2, 3]}).tolist() == [1, 2, 3]


def test_a_message_left_open_ends_with_its_own_text(tokenizer):
    chat = Chat([USER, {"role": "assistant", "content": "it goes"}], add_generation_prompt=False)
    closed = tokenizer.encode_chat(chat)
    opened = tokenizer.encode_chat(Chat(chat.messages, add_generation_prompt=False, continue_final_message=True))
    assert closed[: len(opened)] == opened
    assert "".join(tokenizer.pieces(opened)).endswith("it goes")


def test_parts_of_a_message_are_joined_by_newlines(tokenizer):
    parts = [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": {"url": "data:"}}, "two"]
    together = tokenizer.encode_chat(Chat([{"role": "user", "content": "one\ntwo"}]))
    assert tokenizer.encode_chat(Chat([{"role": "user", "content": parts}])) == together


def test_content_of_another_kind_is_refused(tokenizer):
    with pytest.raises(PromptError, match="content must be"):
        tokenizer.encode_chat(Chat([{"role": "user", "content": 5}]))


def test_tools_and_tool_calls_are_part_of_a_conversation_of_bytes():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    ids = {
        bytes(ByteTokenizer().encode_chat(chat))
        for chat in (Chat([USER]), Chat([USER, call]), Chat([USER], tools=[{"name": "f"}]))
    }
    assert len(ids) == 3


def test_a_token_of_bytes_is_four_bytes():
    assert ByteTokenizer().encode_text("abcdefgh\n").tolist() == [0x64636261, 0x68676665, 0x0A]


def copy_model(folder: Path, **settings: object) -> Path:
    """The tiny model with other settings and no template file."""
    (folder / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_template_may_lie_in_the_tokenizer_settings(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
    model = copy_model(tmp_path, chat_template=template, bos_token="<s>", eos_token={"content": "</s>"})
    tokenizer = WorkerTokenizer(model)
    ids = tokenizer.encode_chat(Chat([{"role": "user", "content": "hello"}]))
    assert "".join(tokenizer.pieces(ids)) == "<s>hello</s>"


def test_variables_reach_the_template(tmp_path):
    model = copy_model(tmp_path, chat_template="{{ mood }}")
    tokenizer = WorkerTokenizer(model)
    assert "".join(tokenizer.pieces(tokenizer.encode_chat(Chat([], variables={"mood": "calm"})))) == "calm"


@pytest.mark.parametrize("template", ["{{ raise_exception('no system role') }}", "{{ messages[0].content + 1 }}"])
def test_what_the_template_refuses_is_the_prompts_fault(tmp_path, template):
    tokenizer = WorkerTokenizer(copy_model(tmp_path, chat_template=template))
    with pytest.raises(PromptError, match="does not accept this conversation"):
        tokenizer.encode_chat(Chat([USER]))


def test_a_model_without_template_has_no_chats(tmp_path):
    with pytest.raises(PromptError, match="no chat template"):
        WorkerTokenizer(copy_model(tmp_path)).encode_chat(Chat([USER]))


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot be read: No such file"):
        WorkerTokenizer(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        WorkerTokenizer(tmp_path)


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(PromptError, match="not valid Unicode"):
        WorkerTokenizer(TINY).encode_text("\ud800")
