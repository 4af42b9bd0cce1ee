"""Models that vLLM renders without a chat template are recognized by their files."""

from __future__ import annotations

import json

import pytest

from gateway.prompt.special import HARMONY, MISTRAL, special_renderer


def directory(path, config=None, files=()):
    if config is not None:
        (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name in files:
        (path / name).touch()
    return path


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}, "Harmony"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "DeepSeek V3.2's encoding"),
        ({"architectures": ["DeepseekV4ForConditionalGeneration"]}, "DeepSeek V4's encoding"),
        ({"architectures": ["MoonshotKimiaForCausalLM"]}, "Kimi-Audio's tokenizer"),
    ],
)
def test_the_configuration_tells(config, name, tmp_path):
    found = special_renderer(directory(tmp_path, config))
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "config",
    [None, {}, {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, {"architectures": [5]}, [1], "{"],
)
def test_any_other_model_has_a_template(config, tmp_path):
    assert special_renderer(directory(tmp_path, config)) is None


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["tekken.json", "consolidated.safetensors"], MISTRAL),
        (["tokenizer.model.v3", "consolidated-00001-of-00002.safetensors"], MISTRAL),
        (["tekken.json"], MISTRAL),
        (["tekken.json", "model.safetensors"], None),
        (["consolidated.safetensors"], None),
    ],
)
def test_mistrals_own_tokenizer_is_used_where_vllm_would(files, found, tmp_path):
    assert special_renderer(directory(tmp_path, {"model_type": "mistral"}, files)) is found


def test_only_harmony_is_unknown_to_tokenize():
    assert not HARMONY.tokenizes_alike
    assert MISTRAL.tokenizes_alike
