"""What one rendering of a chat depends on: messages, tools, and the variables that a request hands to the template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.prompt.conversation import Outline, Shapes, Unreadable
from gateway.prompt.request import ChatRequest
from gateway.prompt.tools import Tools, decode_raw

# Names that are no variables of a template but parameters of what calls it; engines refuse or misuse them.
_RESERVED: Final = frozenset(
    "chat_template conversation max_length messages padding return_assistant_tokens_mask return_dict return_tensors "
    "tokenize tokenizer_kwargs tools truncation".split()
)


@dataclass(slots=True)
class Chat:
    """Everything that one rendering depends on, but for the time.

    Attributes:
        shapes: of the messages, see ``conversation``.
        leaves: their texts.
        tools: as the engine dumps them, or None.
        variables: ``chat_template_kwargs``, and what the engine adds to them.
        add_generation_prompt: end with the beginning of an answer.
        continue_final_message: leave the last message open.
    """

    shapes: Shapes
    leaves: list[str]
    tools: Tools | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @classmethod
    def of(cls, request: ChatRequest, outlined: Outline, tools: Tools | None) -> Chat:
        """Return the chat of a request.

        Args:
            request: the request.
            outlined: outline of its messages.
            tools: its tools, from ``tools.parse_tools``.

        Raises:
            Unreadable: only the engine knows what it makes of this.
        """
        if request.continue_final_message and request.add_generation_prompt:
            raise Unreadable("continue_final_message and add_generation_prompt exclude each other")
        return cls(
            outlined.shapes,
            outlined.leaves,
            tools,
            template_variables(request),
            request.add_generation_prompt,
            request.continue_final_message,
        )


def template_variables(request: ChatRequest) -> dict[str, Any]:
    """Return the variables that a request hands to the template.

    As ``build_chat_params`` in vllm/entrypoints/openai/chat_completion/protocol.py and what follows it.

    Raises:
        Unreadable: an engine would refuse them.
    """
    given = decode_raw(bytes(request.chat_template_kwargs))
    if given is None:
        given = {}
    if not isinstance(given, dict) or not _RESERVED.isdisjoint(given):
        raise Unreadable("chat_template_kwargs")
    variables = {key: value for key, value in given.items() if value is not None and value != "auto"}
    variables.pop("continue_final_message", None)  # no variable, and the request's own field counts
    documents = decode_raw(bytes(request.documents))
    if documents is not None:
        variables["documents"] = documents
    effort = request.reasoning_effort
    if effort is not None:
        variables["reasoning_effort"] = effort
        if "enable_thinking" not in given:
            variables["enable_thinking"] = effort != "none"
    return variables
