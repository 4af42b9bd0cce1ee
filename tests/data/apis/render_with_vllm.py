"""Writes renders.json: what vLLM makes of bodies.json, Responses and Anthropic Messages, with each template of ours.

Run with the Python of an environment that holds vLLM (``make e2e-vllm`` sets one up in ``.venv-vllm``). It goes the way
that vLLM's server goes, from the request to the token ids, without an engine.
"""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

from transformers import AutoTokenizer
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.renderers.hf import HfRenderer
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tokenizers.hf import get_cached_tokenizer

HERE = Path(__file__).parent
TEMPLATES = HERE.parent / "templates"
TINY = HERE.parents[2] / "sim" / "data" / "tiny-model"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

model_config = ModelConfig(model=str(TINY))
tokenizer = get_cached_tokenizer(AutoTokenizer.from_pretrained(TINY, **SPECIAL_TOKENS))
renderer = HfRenderer(VllmConfig(model_config=model_config), tokenizer)


def online(source):
    return OnlineRenderer(
        model_config,
        renderer,
        request_logger=None,
        chat_template=source,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        tool_parser="hermes",
    )


class Messages(AnthropicServingMessages):
    """The server's handler, as far as it turns requests into prompts."""

    def __init__(self, renderer):
        self.online_renderer = renderer
        self.model_config = model_config
        self._merge_inline_system = self._should_merge_inline_system(renderer)
        self._disabled_thinking_effort = None


async def render_messages(renderer, body):
    """Follow ``AnthropicServingMessages.create_messages``."""
    handler = Messages(renderer)
    request = AnthropicMessagesRequest.model_validate(body)
    chat = handler.to_chat_completion_request(
        request,
        merge_inline_system=handler._merge_inline_system,
        disabled_thinking_effort=await handler._get_disabled_thinking_effort(),
    )
    result = await renderer.render_chat(chat)
    return result if isinstance(result, ErrorResponse) else result[1][0]


async def render_responses(renderer, body):
    """Follow ``OpenAIServingResponses.create_responses``."""
    result = await renderer.render_responses(ResponsesRequest.model_validate(body))
    return result if isinstance(result, ErrorResponse) else result.engine_input


async def outcome(render, source, body):
    try:
        result = await render(online(source), json.loads(json.dumps(body)))
    except Exception as error:
        result = SimpleNamespace(error=SimpleNamespace(message=str(error)))
    if isinstance(result, dict):
        return {"text": tokenizer.decode(result["prompt_token_ids"], clean_up_tokenization_spaces=False)}
    return {"error": (result.error.message.splitlines() or [""])[0]}


async def main():
    bodies = json.loads((HERE / "bodies.json").read_text())
    renders = {}
    for template in sorted(TEMPLATES.glob("*.jinja")):
        source = template.read_text()
        renders[template.stem] = {
            api: {name: await outcome(render, source, body) for name, body in bodies[api].items()}
            for api, render in (("messages", render_messages), ("responses", render_responses))
        }
    (HERE / "renders.json").write_text(json.dumps(renders, indent=1, ensure_ascii=False) + "\n")


asyncio.run(main())
