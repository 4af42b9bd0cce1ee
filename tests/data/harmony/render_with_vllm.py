"""Writes renders.json: the token ids that vLLM makes of bodies.json, and of the Anthropic bodies, for gpt-oss.

Run with the Python of an environment that holds vLLM (``make e2e-vllm`` sets one up in ``.venv-vllm``) and with
VLLM_SYSTEM_START_DATE=2025-01-31. It goes the way that vLLM's server goes, without an engine or a model.
"""

import json
from pathlib import Path
from types import SimpleNamespace

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.online_renderer import OnlineRenderer

HERE = Path(__file__).parent
renderer = SimpleNamespace(supports_browsing=False, supports_code_interpreter=False, renderer=None)


def render_chat(body):
    """Follow ``OnlineRenderer.render_chat``."""
    request = ChatCompletionRequest.model_validate(body)
    _, [prompt] = OnlineRenderer._make_request_with_harmony(renderer, request, request.tools is not None)
    return prompt["prompt_token_ids"]


def render_messages(body):
    """Follow ``AnthropicServingMessages.create_messages``; its probes (template, effort "none") fail for gpt-oss."""
    request = AnthropicServingMessages.to_chat_completion_request(
        AnthropicMessagesRequest.model_validate(body), merge_inline_system=True, disabled_thinking_effort="low"
    )
    _, [prompt] = OnlineRenderer._make_request_with_harmony(renderer, request, request.tools is not None)
    return prompt["prompt_token_ids"]


def outcome(render, body):
    try:
        return render(json.loads(json.dumps(body)))
    except Exception as error:
        return str(error).splitlines()[0]


chats = json.loads((HERE / "bodies.json").read_text())
messages = json.loads((HERE.parent / "apis" / "bodies.json").read_text())["messages"]
renders = {
    "chat": {name: outcome(render_chat, body) for name, body in chats.items()},
    "messages": {name: outcome(render_messages, body) for name, body in messages.items()},
}
lines = [
    f' "{api}": {{\n' + ",\n".join(f"  {json.dumps(name)}: {json.dumps(ids)}" for name, ids in found.items()) + "\n }"
    for api, found in renders.items()
]
(HERE / "renders.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
