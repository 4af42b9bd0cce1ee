"""Token pass-through: a request's body with its token ids in it, so that the engine does not tokenize it again.

Two forms of it are OpenAI requests to which the engine answers as ever:

- a chat, in any API, carries ``kv_transfer_params.prompt_token_ids``, which vLLM takes instead of what it would render
  (``_reused_prompt_token_ids`` in vllm/renderers/online_renderer.py; there for the decode side of disaggregated
  serving);
- a completion has its ids as ``prompt``, which every engine accepts.
"""

from __future__ import annotations

import msgspec

from gateway.prompt.tokenizer import unpack

_PARAMS = "kv_transfer_params"
_WANT_TEXT = ("echo", "return_prompt_text", "enable_response_messages")
_NO = (b"", b"false", b"null")

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def with_token_ids(body: bytes, ids: bytes) -> bytes | None:
    """Return the body with token ids, or None for a request that is better sent as it came.

    That is one with ``kv_transfer_params`` of its own, and one that gets its prompt back as text.

    Args:
        body: of a chat or a completion; it was read before.
        ids: its prompt, packed little-endian u32.
    """
    try:
        fields = _decode(body)
    except msgspec.DecodeError:  # some JSON is read only by the parser that engines use
        return None
    if not ids or _PARAMS in fields or any(bytes(fields.get(name, b"")) not in _NO for name in _WANT_TEXT):
        return None
    listed = msgspec.json.encode(unpack(ids))
    if "messages" in fields or "input" in fields:
        fields[_PARAMS] = msgspec.Raw(b'{"prompt_token_ids":%b}' % listed)
    else:
        fields["prompt"] = msgspec.Raw(listed)
    return msgspec.json.encode(fields)
