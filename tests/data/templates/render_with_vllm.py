"""Writes renders.json: what vLLM makes of bodies.json with each template here.

Run with the Python of an environment that holds vLLM (``make e2e-vllm`` sets one up in ``.venv-vllm``). It calls the
functions that vLLM's server calls, without an engine.
"""

import json
from pathlib import Path
from types import SimpleNamespace

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import merge_kwargs
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

HERE = Path(__file__).parent
TINY = HERE.parents[2] / "sim" / "data" / "tiny-model"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

tokenizer = AutoTokenizer.from_pretrained(TINY, **SPECIAL_TOKENS)
model_config = SimpleNamespace(
    multimodal_config=None,
    enable_prompt_embeds=False,
    hf_config=SimpleNamespace(model_type="llama"),
    revision=None,
    code_revision=None,
    trust_remote_code=False,
)


def render(source, body):
    """Follow ``OnlineRenderer.render_chat`` and ``HfRenderer.render_messages`` to the rendered text."""
    request = ChatCompletionRequest.model_validate(body)
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    params = request.build_chat_params(source, "auto").with_defaults(
        merge_kwargs(None, {"tools": tools, "tokenize": False})
    )
    content_format = resolve_chat_template_content_format(source, tools, "auto", tokenizer, model_config=model_config)
    conversation, _, _ = parse_chat_messages(request.messages, model_config, content_format)
    kwargs = params.get_apply_chat_template_kwargs()
    return safe_apply_chat_template(model_config, tokenizer, conversation, **{**kwargs, "tokenize": False})


def outcome(source, body):
    try:
        return {"text": render(source, json.loads(json.dumps(body)))}
    except Exception as error:
        return {"error": str(error).splitlines()[0]}


bodies = json.loads((HERE / "bodies.json").read_text())
renders = {
    template.stem: {name: outcome(template.read_text(), body) for name, body in bodies.items()}
    for template in sorted(HERE.glob("*.jinja"))
}
(HERE / "renders.json").write_text(json.dumps(renders, indent=1, ensure_ascii=False) + "\n")
