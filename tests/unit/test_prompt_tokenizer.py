"""Tokenizers: which library serves, what goes around a text, and what is said when a file is broken."""

from __future__ import annotations

import json
from array import array

import pytest
from tokenizers import AddedToken, processors

from gateway.prompt import tokenizer as module
from gateway.prompt.tokenizer import FastEncoder, HuggingFaceEncoder, TokenizerError, load_tokenizer, pack, varied_texts
from tests.prompt_rig import KINDS, TINY, reference, save, train

SPECIALS = [AddedToken("<s>", special=True, normalized=False), AddedToken("</s>", special=True, normalized=False)]


def unpacked(ids: bytes) -> list[int]:
    return array("I", ids).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_encodes_as_hugging_face_does(kind, tmp_path):
    trained = train(kind, SPECIALS)
    loaded = load_tokenizer(save(trained, tmp_path))
    texts = varied_texts(["<s>", "</s>"])
    expected = [trained.encode(text, add_special_tokens=False).ids for text in texts]
    assert [unpacked(ids) for ids in loaded.encoder.encode(texts)] == expected


def test_more_text_than_is_encoded_at_once_becomes_the_same_ids():
    encoder = load_tokenizer(TINY).encoder
    assert isinstance(encoder, FastEncoder)
    texts = [*varied_texts(["<|im_start|>"]), *(f"text {number}. " * number for number in range(150))]
    assert sum(map(len, texts)) > encoder.inline_chars
    assert encoder.encode(texts) == HuggingFaceEncoder(reference()).encode(texts)


@pytest.mark.parametrize(("kind", "encoder"), [("byte-level", FastEncoder), ("metaspace", HuggingFaceEncoder)])
def test_fastokens_serves_where_it_can(kind, encoder, tmp_path):
    assert type(load_tokenizer(save(train(kind, SPECIALS), tmp_path)).encoder) is encoder


def test_hugging_face_serves_where_fastokens_gives_other_ids(monkeypatch, caplog):
    class Wrong(FastEncoder):
        def encode(self, texts):
            return [ids[:-4] for ids in super().encode(texts)]

    monkeypatch.setattr(module, "FastEncoder", Wrong)
    assert type(load_tokenizer(TINY).encoder) is HuggingFaceEncoder
    assert "gives other ids" in caplog.text


def test_hugging_face_serves_where_there_is_no_fastokens(monkeypatch):
    monkeypatch.setattr(module, "fastokens", None)
    assert type(load_tokenizer(TINY).encoder) is HuggingFaceEncoder


def test_a_file_does_as_well_as_its_directory():
    by_file, by_directory = load_tokenizer(TINY / "tokenizer.json"), load_tokenizer(TINY)
    assert by_file.digest == by_directory.digest
    assert (
        by_file.special_tokens
        == by_directory.special_tokens
        == {
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        }
    )


def test_what_the_post_processor_adds_is_known(tmp_path):
    trained = train("byte-level", SPECIALS)
    bos, eos = trained.token_to_id("<s>"), trained.token_to_id("</s>")
    trained.post_processor = processors.TemplateProcessing(
        single="<s> <s> $A </s>", special_tokens=[("<s>", bos), ("</s>", eos)]
    )
    loaded = load_tokenizer(save(trained, tmp_path))
    assert (unpacked(loaded.prefix), unpacked(loaded.suffix)) == ([bos, bos], [eos])


def test_truncation_and_padding_of_the_file_are_ignored_as_in_the_engine(tmp_path):
    trained = reference()
    trained.enable_truncation(4)
    trained.enable_padding(length=16)
    loaded = load_tokenizer(save(trained, tmp_path))
    text = "one two three four five six"
    assert unpacked(loaded.encoder.encode([text])[0]) == reference().encode(text).ids


def test_tokens_that_only_the_configuration_adds_are_added(tmp_path):
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    config = {"added_tokens_decoder": {"8000": {"content": "<tool>", **flags}}}
    loaded = load_tokenizer(save(reference(), tmp_path, config))
    expected = reference()
    expected.add_tokens([AddedToken("<tool>", **flags)])
    assert unpacked(loaded.encoder.encode(["a<tool>b"])[0]) == expected.encode("a<tool>b").ids
    assert "<tool>" in [token.content for token in loaded.added_tokens]


SPECIAL_ONLY = AddedToken("<x>", special=True, normalized=False)
FLAGS = {"lstrip": True, "rstrip": False, "single_word": False, "normalized": False}


@pytest.mark.parametrize(
    ("files", "token"),
    [
        ({"tokenizer_config": {"eos_token": "<x>"}}, SPECIAL_ONLY),
        ({"tokenizer_config": {"eos_token": {"__type": "AddedToken", "content": "<x>", **FLAGS}}}, None),
        ({"tokenizer_config": {"additional_special_tokens": ["<s>", "<x>"]}}, SPECIAL_ONLY),
        ({"tokenizer_config": {"extra_special_tokens": ["<x>"]}}, SPECIAL_ONLY),
        ({"tokenizer_config": {"extra_special_tokens": {"image_token": "<x>"}}}, SPECIAL_ONLY),
        ({"tokenizer_config": {"image_token": "<x>", "add_bos_token": True}}, SPECIAL_ONLY),
        ({"special_tokens_map": {"pad_token": "<x>"}}, SPECIAL_ONLY),
        ({"added_tokens": {"<x>": 900}}, AddedToken("<x>", normalized=True)),
    ],
)
def test_special_tokens_that_are_no_added_ones_yet_are_added_as_transformers_does(files, token, tmp_path):
    trained = train("split", SPECIALS)
    save(trained, tmp_path)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    loaded = load_tokenizer(tmp_path)
    trained.add_tokens([token or AddedToken("<x>", special=True, **FLAGS)])
    texts = ["a <x> b<x>c<s>", "<x><x>"]
    expected = [trained.encode(text, add_special_tokens=False).ids for text in texts]
    assert [unpacked(ids) for ids in loaded.encoder.encode(texts)] == expected


def test_templates_read_the_tokens_that_a_model_has_of_its_own(tmp_path):
    config = {"bos_token": "<s>", "image_token": "<img>", "extra_special_tokens": {"audio_token": "<aud>"}}
    loaded = load_tokenizer(save(train("split", SPECIALS), tmp_path, config))
    assert loaded.special_tokens == {"bos_token": "<s>", "image_token": "<img>", "audio_token": "<aud>"}


def test_what_older_models_list_apart_counts_only_without_a_newer_list(tmp_path):
    save(train("split", SPECIALS), tmp_path, {"bos_token": "<s>", "added_tokens_decoder": {}})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "</s>"}))
    assert load_tokenizer(tmp_path).special_tokens == {"bos_token": "<s>"}


def test_special_tokens_are_text_where_the_configuration_says_so(tmp_path):
    trained = train("split", SPECIALS)
    loaded = load_tokenizer(save(trained, tmp_path, {"bos_token": "<s>", "split_special_tokens": True}))
    trained.encode_special_tokens = True
    text = "a<s>b</s>"
    assert unpacked(loaded.encoder.encode([text])[0]) == trained.encode(text, add_special_tokens=False).ids
    assert loaded.added_tokens == []  # no text may be cut before one


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("", "is not a tokenizer.json"),
        ("{}", "is not a tokenizer.json"),
        ('{"model": {"type": "Nonsense"}}', "is not a tokenizer.json"),
    ],
)
def test_a_missing_or_broken_file_is_named_and_what_to_do(content, message, tmp_path):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


def test_a_file_in_which_libraries_find_no_tokenizer_is_named(tmp_path):
    broken = {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "?"}, "added_tokens": []}
    content = json.loads(train("split", []).to_str()) | broken
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: is of no use"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("config", ["[]", "{", "[" * 100_000, '{"added_tokens_decoder": {"x": {"content": "t"}}}'])
def test_a_broken_configuration_is_named(config, tmp_path):
    save(reference(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_ids_are_packed_as_little_endian_u32():
    assert pack([1, 2**32 - 1]) == b"\1\0\0\0\xff\xff\xff\xff"
    for wrong in ([-1], [2**32]):
        with pytest.raises(OverflowError):
            pack(wrong)
    with pytest.raises(TypeError):
        pack([1.5])
