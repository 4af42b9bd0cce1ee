"""Which conversation a body goes on with: the longest that is known, however many others begin alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gateway.prompt.growth import Conversation, Conversations
from gateway.prompt.parsing import parse_request
from gateway.prompt.plan import Pieces
from gateway.prompt.request import ChatRequest, Message
from gateway.prompt.segments import Segment
from gateway.tasks import spawn
from tests.prompt_rig import CHAT, candidates, ids_of

USERS = 30
Chat = list[dict[str, Any]]

RULES = "You are a careful engineer. " * 500
EXAMPLES = [{"role": role, "content": f"An example of what to {verb}. " * 60} for role, verb in (("user", "ask"),
    ("assistant", "answer"))]  # fmt: skip


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


BEGINNINGS: dict[str, Callable[[int], Chat]] = {
    "a system prompt": lambda user: [said("system", RULES), said("user", f"user {user} asks")],
    "a first question": lambda user: [said("system", RULES), said("user", "Hello!"), said("assistant", f"I am {user}."),
        said("user", "Go on.")],
    "a document": lambda user: [said("user", [{"type": "text", "text": RULES}]), said("assistant", "Yes?"),
        said("user", f"question {user}")],
    "examples": lambda user: [said("system", "Do as below."), *EXAMPLES * 4, said("user", f"user {user} asks")],
    "all but a name at the beginning": lambda user: [said("system", f"For user {user:04}. {RULES}"),
        said("user", "Hello!")],
    "all but a name in between": lambda user: [said("system", f"{RULES} For user {user:04}. {RULES}"),
        said("user", "Hello!")],
    "nothing": lambda user: [said("system", f"For user {user}: " * 800), said("user", "Hello!")],
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": f"f{n}", "description": RULES[:900]}} for n in range(9)]
ORDERS: dict[str, tuple[str, ...]] = {
    "messages last": ("model", "tools", "stream", "messages"),
    "messages first": ("messages", "model", "stream"),
    "tools after": ("model", "messages", "tools"),
    "stream after": ("model", "messages", "stream"),
    "role second": ("model", "messages", "stream"),
}


def body_of(chat: Chat, order: str) -> bytes:
    if order == "role second":
        chat = [dict(reversed(message.items())) for message in chat]
    fields = {"model": "m", "stream": True, "tools": TOOLS, "messages": chat}
    return json.dumps({name: fields[name] for name in ORDERS[order]}).encode()


def read(body: bytes, known: Conversations) -> ChatRequest:
    request, alone = parse_request(CHAT, body, known), parse_request(CHAT, body)
    assert isinstance(request, ChatRequest)
    assert isinstance(alone, ChatRequest)
    assert request.messages == alone.messages
    return request


def kept(request: ChatRequest) -> list[Message]:
    """What is known of the conversation by now; a list that is not changed when it goes on."""
    return list(request.conversation.messages)


def goes_on(request: ChatRequest, messages: list[Message]) -> bool:
    """Whether a request begins with the very messages that were known, that is, they were not read again."""
    return all(one is other for one, other in zip(messages, request.messages, strict=False))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("alike", BEGINNINGS)
def test_conversations_are_found_again_whatever_they_have_in_common(alike, order):
    known = Conversations(10**8)
    chats = [BEGINNINGS[alike](user) for user in range(USERS)]
    last = [kept(read(body_of(chat, order), known)) for chat in chats]
    for turn in range(3):
        for user, chat in enumerate(chats):
            chat += [said("assistant", f"answer {turn}"), said("user", "Go on.")]
            request = read(body_of(chat, order), known)
            assert goes_on(request, last[user])
            last[user] = kept(request)
            assert len(last[user]) == len(chat) - 1


def test_what_conversations_begin_with_stays_known_when_they_go_on():
    known = Conversations(10**8)
    chats = [BEGINNINGS["a system prompt"](user) for user in range(5)]
    requests = [read(body_of(chat, "messages last"), known) for chat in chats]
    beginning = kept(requests[0])
    assert len(beginning) == 1
    for chat in chats:
        later = read(body_of([*chat, said("assistant", "answer"), said("user", "more")], "messages last"), known)
        assert goes_on(later, beginning)
    new = read(body_of(BEGINNINGS["a system prompt"](9), "messages last"), known)
    assert goes_on(new, beginning)
    assert {request.conversation for request in requests} == {new.conversation}


def test_a_conversation_that_only_grows_is_kept_once():
    known = Conversations(10**8)
    chat = BEGINNINGS["a system prompt"](0)
    for turn in range(9):
        read(body_of(chat, "messages last"), known)
        chat += [said("assistant", f"answer {turn}"), said("user", "more")]
    assert [len(entry.messages) for entry in known._known.entries.values()] == [17]


def test_of_several_beginnings_the_longest_counts():
    known = Conversations(10**8)
    chat = BEGINNINGS["a system prompt"](0)
    for turn in range(4):
        for _ in range(2):  # an answer is asked for again, so that this beginning stays known
            read(body_of(chat, "messages last"), known)
        chat += [said("assistant", f"answer {turn}"), said("user", "more")]
    for end in range(2, len(chat), 2):
        request = read(body_of([*chat[: end - 1], said("user", "otherwise")], "messages last"), known)
        assert len(kept(request)) == end - 1


def test_a_conversation_is_found_below_a_long_new_message():
    known = Conversations(10**8)
    chat = BEGINNINGS["a system prompt"](0)
    beginning = kept(read(body_of(chat, "tools after"), known))
    chat += [said("assistant", "Show me."), said("user", "a long file\n" * 15_000)]
    assert goes_on(read(body_of(chat, "tools after"), known), beginning)


def test_what_is_kept_of_alike_conversations_is_bounded():
    limit = 2_000_000
    known = Conversations(limit)
    entries = known._known.entries
    chats = [BEGINNINGS["a system prompt"](user) for user in range(50)]
    for _ in range(3):
        for chat in chats:
            read(body_of(chat, "messages last"), known)
            chat += [said("assistant", "answer"), said("user", "more")]
            assert sum(entry.cost for entry in entries.values()) == known._known.bytes <= limit
    conversations = [entry for entry in entries.values() if isinstance(entry, Conversation)]
    assert 5 < len(conversations) < len(entries)
    assert sum(5 * len(each.prefix.obj) for each in conversations) < limit


@pytest.mark.parametrize("spare", range(-2, 3))
def test_conversations_are_told_apart_wherever_they_end(spare):
    known = Conversations(10**8)
    bodies = []
    for user in "AB":
        empty = json.dumps([said("system", ""), said("user", "Hello!")])
        size = 10_240 + spare - empty.index(', {"role": "user"') - len('{"messages": ')
        bodies.append(json.dumps({"messages": [said("system", user * 9 + "x" * (size - 9)), said("user", "Hello!")]}))
    conversations = [read(body.encode(), known).conversation for body in bodies]
    assert [len(each.prefix) for each in conversations] == [10_240 + spare] * 2
    assert [read(body.encode(), known).conversation for body in bodies] == conversations


def test_a_conversation_that_cannot_be_gone_on_with_is_kept_once():
    known = Conversations(10**8)
    again = body_of(BEGINNINGS["a system prompt"](0), "messages last")[:-1] + b', "model": "again"}'
    for _ in range(3):
        assert read(again, known).model == "again"
        assert len(known._known) == 1


def test_a_body_too_short_to_be_found_is_not_kept():
    known = Conversations(10**8)
    read(body_of([said("user", "Hello!"), said("user", "again")], "tools after"), known)
    assert len(known._known) == 0


async def test_of_a_very_long_conversation_only_what_is_new_is_looked_up(pipeline, monkeypatch):
    [model] = pipeline._models.values()
    get = model.segments.get
    looked_up = []

    async def counted(texts: Sequence[Pieces]) -> list[Segment]:
        looked_up.append(len(texts))
        return await get(texts)

    monkeypatch.setattr(model.segments, "get", counted)
    chat = [said("user", f"message {number}") for number in range(3_000)]
    prompts = []
    for _ in range(2):
        raw = body_of(chat, "messages first")
        looked_up.clear()
        prompts.append(await pipeline.prompt(pipeline.parse(CHAT, raw), candidates()))
        assert ids_of(prompts[-1]) == ids_of(await pipeline.prompt(parse_request(CHAT, raw), candidates()))
        chat = [*chat, said("assistant", "answer"), said("user", "more")]
    assert looked_up[0] < 10
    assert prompts[1].chunks[: len(prompts[0].chunks) - 1] == prompts[0].chunks[:-1]


async def test_others_have_many_turns_while_a_very_long_chat_is_looked_up(pipeline):
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    [model] = pipeline._models.values()
    task = spawn(others(), "others")
    await model.segments.get([f"text {number}" for number in range(2_000)])
    task.cancel()
    assert turns >= 4
