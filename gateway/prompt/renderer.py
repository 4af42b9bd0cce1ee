"""From a chat request to the texts of its segments: by a plan where there is one, else by the template itself."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import Final

import msgspec

from gateway.prompt.anthropic import EFFORTS, wants_system_first, with_system_first
from gateway.prompt.cache import ByteCache, Entry
from gateway.prompt.chat import Chat, template_variables
from gateway.prompt.conversation import Outline, Shape, outline
from gateway.prompt.plan import Leaves, Pieces, Plan, Recipe, whole
from gateway.prompt.request import ABSENT, ChatRequest, MessagesRequest
from gateway.prompt.segments import Cutter
from gateway.prompt.template import ChatTemplate, TemplateError
from gateway.prompt.tools import Tools, parse_tools
from gateway.prompt.tracing import PlanDrafter

_PLANS_BYTES: Final = 16 * 2**20
_TOOLS_BYTES: Final = 16 * 2**20
# One shape can need several plans, one for each set of answers to the template's questions.
_PLANS_PER_SHAPE: Final = 4
_DRAFTS_PER_SHAPE: Final = 8
_MESSAGES_PER_PLAN: Final = 512

_Key = tuple[tuple[str | Shape, ...], bytes, bytes, bytes, str, str | None, bool]


class _Plans(Entry):
    """The plans of one shape of conversation, each with recipes for its segments."""

    __slots__ = ("drafts", "plans")

    def __init__(self, key: _Key) -> None:
        shapes, tools, variables, documents, *_ = key
        given = len(tools) + len(variables) + len(documents)
        given += sum(len(shape) if isinstance(shape, str) else shape.size() for shape in shapes)
        # each plan repeats what is constant in its output
        super().__init__(2_000 + 3_000 * len(shapes) + (1 + _PLANS_PER_SHAPE) * given)
        self.plans: list[tuple[Plan, list[Recipe]]] = []
        self.drafts = 0


class _KnownTools(Entry):
    __slots__ = ("tools",)

    def __init__(self, raw: bytes, kind: str) -> None:
        super().__init__(1_000 + 8 * len(raw))
        self.tools = parse_tools(raw, kind)


class ChatRenderer:
    """Renders the chats of one model.

    Args:
        template: for requests without tools.
        tool_template: for requests with tools; often the same one.
        cutter: cuts rendered text into segments.
        executor: where plans are drawn up.
    """

    def __init__(self, template: ChatTemplate, tool_template: ChatTemplate, cutter: Cutter, executor: Executor) -> None:
        self._templates = {False: template, True: tool_template}
        self._drafters = {chosen: PlanDrafter(chosen) for chosen in {template, tool_template}}
        self._drafting = Lock()  # a drafter holds the state of one draft
        self._keeping = Lock()  # of tools, which threads parse, too
        self._cutter = cutter
        self._executor = executor
        self._plans: ByteCache[_Key, _Plans] = ByteCache(_PLANS_BYTES)
        self._tools: ByteCache[tuple[bytes, str], _KnownTools] = ByteCache(_TOOLS_BYTES)

    def template_for(self, request: ChatRequest) -> ChatTemplate:
        """Return the template that the engine would use."""
        return self._templates[request.tools is not ABSENT]

    def settle(self, request: MessagesRequest) -> None:
        """Do to an Anthropic request what depends on the templates. Doing it again changes nothing."""
        request.settled = True
        if self._system_first:
            request.messages = with_system_first(request.messages)
        if request.thinking_disabled:
            request.reasoning_effort = self._disabled_effort

    @cached_property
    def _system_first(self) -> bool:
        return any(wants_system_first(template.source) for template in self._templates.values())

    @cached_property
    def _disabled_effort(self) -> str:
        """The effort that stands for disabled thinking: ``none``, where templates take it for something of its own."""
        none = self._probe("none")
        return "low" if none is None or any(self._probe(effort) == none for effort in EFFORTS) else "none"

    def _probe(self, effort: str) -> str | None:
        request = ChatRequest(reasoning_effort=effort)
        with suppress(TemplateError):
            return self._templates[False].render(Chat(["user"], ["Hi"], variables=template_variables(request)))
        return None

    def glance(self, request: ChatRequest) -> tuple[Outline, list[Pieces] | None]:
        """Return the outline of a request, and what ``planned`` makes of it. Safe to call in a thread.

        Raises:
            Unreadable: only the engine knows what it makes of the request.
        """
        outlined = outline(request.messages, self.template_for(request).parts, request.name_first)
        return outlined, self.planned(request, outlined)

    def planned(self, request: ChatRequest, outlined: Outline) -> list[Pieces] | None:
        """Return the texts of the request's segments if a plan knows them, else None."""
        entry = self._plans.get(_key(request, outlined))
        if entry is not None and not request.continue_final_message:
            for plan, recipes in entry.plans:
                if plan.serves(outlined.leaves):
                    return _followed(recipes, outlined.leaves)
        return None

    def chat(self, request: ChatRequest, outlined: Outline) -> Chat:
        """Return what the template needs to render the request.

        Raises:
            Unreadable: only the engine knows what it makes of the request.
        """
        return Chat.of(request, outlined, self._parsed_tools(request))

    def rendered(self, request: ChatRequest, outlined: Outline) -> tuple[Chat, list[str]]:
        """Return the request as its template gets it, and the texts of its segments. Safe to call in a thread.

        Raises:
            TemplateError: the template refuses the conversation.
            Unreadable: only the engine knows what it makes of the request.
        """
        chat = self.chat(request, outlined)
        return chat, self._cutter.cut(self.template_for(request).render(chat))

    def certain_prefix(self, request: ChatRequest, outlined: Outline) -> tuple[list[str], int]:
        """Return the segments before the first image, audio or video, and how many characters the whole chat has.

        What the engine puts in a medium's place is not known here, and a template may render a chat with media
        differently from its beginning. Certain is that beginning of the whole chat which the messages before the medium
        give on their own, too.

        Raises:
            TemplateError: the template refuses the conversation.
            Unreadable: only the engine knows what it makes of the request.
        """
        assert outlined.first_media is not None
        template = self.template_for(request)
        chat = replace(self.chat(request, outlined), continue_final_message=False)
        whole = template.render(chat)
        if outlined.first_media == 0:
            return [], len(whole)
        before = outline(request.messages[: outlined.first_media], template.parts, request.name_first)
        alone = replace(chat, shapes=before.shapes, leaves=before.leaves, add_generation_prompt=False)
        common = _common_prefix(template.render(alone), whole)
        starts = [start for start in self._cutter.starts(whole) if start <= common]
        return [whole[start:end] for start, end in pairwise([0, *starts]) if start < end], len(whole)

    def learn(self, request: ChatRequest, outlined: Outline, chat: Chat, texts: list[str]) -> None:
        """Consider a plan for conversations like this one: a shape seen for the second time gets one, in a thread."""
        if len(chat.shapes) > _MESSAGES_PER_PLAN or chat.continue_final_message:
            return
        key = _key(request, outlined)
        entry = self._plans.get(key)
        if entry is None:
            self._plans.put(key, _Plans(key))
        elif entry.drafts < _DRAFTS_PER_SHAPE and len(entry.plans) < _PLANS_PER_SHAPE:
            entry.drafts += 1
            drafter = self._drafters[self.template_for(request)]
            self._executor.submit(self._draft, entry, drafter, chat, "".join(texts))

    def _draft(self, entry: _Plans, drafter: PlanDrafter, chat: Chat, text: str) -> None:
        with self._drafting:
            if any(plan.serves(chat.leaves) for plan, _ in entry.plans):
                return
            plan = drafter.draft(chat, text)
        if plan is None:
            return
        recipes = plan.recipes(self._cutter.starts)
        if "".join(map(whole, _followed(recipes, chat.leaves))) == text:
            entry.plans.append((plan, recipes))

    def _parsed_tools(self, request: ChatRequest) -> Tools | None:
        if request.tools is ABSENT:
            return None
        key = bytes(request.tools), request.kind
        known = self._tools.get(key)
        if known is None:
            known = _KnownTools(*key)
            with self._keeping:
                self._tools.put(key, known)
        return known.tools


def _key(request: ChatRequest, outlined: Outline) -> _Key:
    """Return everything that a rendering depends on, but for the leaves and the time."""
    return (
        tuple(outlined.shapes),
        _bytes(request.tools),
        _bytes(request.chat_template_kwargs),
        _bytes(request.documents),
        request.kind,
        request.reasoning_effort,
        request.add_generation_prompt,
    )


def _bytes(raw: msgspec.Raw) -> bytes:
    return b"" if raw is ABSENT else bytes(raw)


def _followed(recipes: list[Recipe], leaves: Leaves) -> list[Pieces]:
    return [recipe if isinstance(recipe, str) else recipe(leaves) for recipe in recipes]


def _common_prefix(one: str, other: str) -> int:
    """Return the length of the longest common prefix."""
    alike, differing = 0, min(len(one), len(other)) + 1
    while differing - alike > 1:
        middle = (alike + differing) // 2
        if one[:middle] == other[:middle]:
            alike = middle
        else:
            differing = middle
    return alike
