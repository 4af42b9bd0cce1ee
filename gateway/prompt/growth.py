"""Long chats that grow: what was made of a conversation's last request serves its next, which begins as that did.

Clients send the whole conversation each time, with something added at its end. So the messages of a request that begins
like an earlier one are not decoded again, and where the template makes the same of them, their tokens and chunk hashes
are not looked up again. What was learned is compared, never believed: a body must begin with the very bytes, a text be
the very text.

A conversation is found by its *mark*, the bytes before the last multiple of 2 KiB in what is known of it, which costs
nearly nothing. Those that share a system prompt, tools or documents can have the same mark; then they are a *crowd*,
and a body's own is found by a digest of all its bytes up to where one of the crowd ended.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from secrets import token_hex
from threading import Lock
from typing import Any, Final

import mmh3
import msgspec

from gateway.prompt.cache import ByteCache, Entry
from gateway.prompt.reading import Reading
from gateway.prompt.request import ABSENT, ChatRequest, Message

LEAST_BYTES: Final = 8 * 2**10
"""Shorter chats are read anew in less time than it takes to find them."""

_STEP: Final = 2048  # conversations are found at lengths that are multiples of this …
_STEPS: Final = 128  # … and were so many of them shorter at most
_MARK: Final = 64  # bytes before such a length, by which they are found
_TRIES: Final = 8  # at what is found there, before a body is read anew
_MESSAGE_END: Final = re.compile(rb"\}(?=[,\]])")
_OVERHEAD: Final = 2000
_CROWD_OVERHEAD: Final = 500
_MESSAGE_OVERHEAD: Final = 1000  # bytes of Python objects per message, its segments included
# What one byte of a body takes: itself, its text twice, ids and hashes. A single character can make a text four times
# as wide.
_BYTES_PER_BYTE: Final = 5
_BYTES_PER_WIDE_BYTE: Final = 8
_CONTAINER: Final = 64  # bytes of a Python list or dict
_BYTES_PER_CONTAINER: Final = 16  # of a body: a list or dict in so many is within what its bytes are charged
_LEAST_SIZE: Final = (LEAST_BYTES // 2 // _STEP + 1) * _STEP
_Key = tuple[int, bytes]

_NAME: Final = b'"messages"'
_OPENING: Final = b'{"messages":['
_FIRST_FIELD: Final = b'{"role"'  # of a message, as nearly all clients write them
_GUESSES: Final = 8  # at where such a message begins: tools have properties of that name
_NO_ROLE: Final = token_hex(16)  # of a message that no client can have sent
_ONE_MORE: Final = b',{"role":"%b"}]}' % _NO_ROLE.encode()


class _RawChatRequest(ChatRequest, kw_only=True):
    messages: msgspec.Raw = ABSENT  # type: ignore[assignment]


_CHAT: Final = msgspec.json.Decoder(ChatRequest)
_RAW_CHAT: Final = msgspec.json.Decoder(_RawChatRequest)
_RAWS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MESSAGE: Final = msgspec.json.Decoder(Message)
_digest: Final = mmh3.mmh3_x64_128_digest
_FIELDS: Final = [
    (field.name, field.encode_name, field.default)
    for field in msgspec.structs.fields(ChatRequest)
    if field.name not in ("messages", "body", "conversation")
]


class Conversation(Entry):
    """A chat that was read before.

    Attributes:
        prefix: the beginning of its last body, up to the end of the last message but one: the last may be another
            next time, as when an answer is asked for again. A view, as long bodies take their time to copy.
        messages: of the prefix; not to be changed.
        head: attributes of the request that stand before the messages, and their values.
        names: of these in the body, and of the messages.
        reading: what became of its texts, None until then.
        key: under which it is kept.
        containers: how many lists and objects there are in the prefix, at most.
        wide: whether there are other characters than those of ASCII in a body.
        shared: whether a request ended one message after the prefix since it is kept, so that more may: all chats
            with one system prompt begin like that. What goes on is another conversation then.
    """

    __slots__ = ("containers", "head", "key", "messages", "names", "prefix", "reading", "shared", "wide")

    def __init__(
        self, prefix: memoryview, messages: list[Message], head: Sequence[tuple[str, Any]], names: frozenset[str]
    ) -> None:
        super().__init__(0)
        self.prefix = prefix
        self.messages = messages
        self.head = head
        self.names = names
        self.reading: Reading | None = None
        self.key: _Key = 0, b""
        self.containers = 0
        self.wide = False
        self.shared = False

    @classmethod
    def of(cls, prefix: memoryview, request: ChatRequest) -> Conversation:
        """Return the conversation of a prefix and what was read of it."""
        head: list[tuple[str, Any]] = []
        names = {"messages"}
        for attribute, name, default in _FIELDS:
            if (value := getattr(request, attribute)) is not default:
                # a raw value would keep all of what it was read from
                head.append((attribute, value.copy() if isinstance(value, msgspec.Raw) else value))
                names.add(name)
        return cls(prefix, request.messages, head, frozenset(names))

    def branch(self) -> Conversation:
        """Return a conversation that is this one so far."""
        branch = Conversation(self.prefix, self.messages, self.head, self.names)
        branch.reading = self.reading
        branch.containers, branch.wide = self.containers, self.wide
        return branch


class Crowd(Entry):
    """In place of several conversations that have the same mark; each is kept under length and digest of its prefix.

    Attributes:
        ends: by how many bytes the prefixes are longer than where the mark ends; true at each such number.
    """

    __slots__ = ("ends",)

    def __init__(self) -> None:
        super().__init__(_CROWD_OVERHEAD + _STEP)
        self.ends = bytearray(_STEP)


class Conversations:
    """The conversations read of late.

    Args:
        max_bytes: bound on what is kept of them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._known: ByteCache[_Key, Conversation | Crowd] = ByteCache(max_bytes)
        self._keeping = Lock()  # long bodies are read in threads

    def read(self, body: bytes) -> ChatRequest:
        """Read the body of a chat. Its messages are shared with other requests and must not be changed.

        Raises:
            msgspec.DecodeError: the body is not a chat; where, only decoding it as a whole can say.
            RecursionError: it is nested too deeply.
        """
        request = None
        with self._keeping:
            conversation = self._find(body)
            if conversation is not None:
                start, messages = len(conversation.prefix), conversation.messages
        if conversation is not None:
            request = self._read_on(body, conversation, start, messages)
        return request or self._read_anew(body)

    def _read_on(
        self, body: bytes, conversation: Conversation, start: int, messages: list[Message]
    ) -> ChatRequest | None:
        """Return the request of a body that begins as a conversation does, up to ``start``; None if it cannot be told.

        Args:
            body: of the request.
            conversation: with which it goes on.
            start: length of the conversation's prefix.
            messages: of the prefix.
        """
        separator = body[start : start + 1]
        if separator not in (b",", b"]"):
            return None
        added = separator == b","
        rest: Any = _RAW_CHAT.decode(_OPENING + body[start + added :])
        array = bytes(rest.messages)[1:]
        end = start + added + len(array)  # of the whole array
        if not body.startswith(array, start + added):  # it comes twice
            return None
        after = _OBJECT.decode(b"{" + body[end:].lstrip().removeprefix(b","))
        # a field that comes twice counts the second time
        if not conversation.names.isdisjoint(after):
            return None
        raws = _RAWS.decode(rest.messages)
        if added and not raws:  # a comma that nothing follows
            return None
        messages = rest.messages = [*messages, *map(_MESSAGE.decode, raws)]
        for attribute, value in conversation.head:
            setattr(rest, attribute, value)
        rest.conversation = conversation
        if len(raws) > 1:
            prefix = _before(body, body.rindex(raws[-1], 0, end))
            with self._keeping:
                if conversation.shared:
                    rest.conversation = conversation = conversation.branch()
                else:
                    self._forget(conversation)
                conversation.prefix, conversation.messages = prefix, messages[:-1]
                self._keep(conversation, start)
        else:
            conversation.shared = True
        request: ChatRequest = rest
        return request

    def _read_anew(self, body: bytes) -> ChatRequest:
        """Read a body, and remember its conversation so that it is known when it goes on."""
        request = None
        conversation = _beginning(body, _likely_end(body))
        if conversation is not None:
            request = self._read_on(body, conversation, len(conversation.prefix), conversation.messages)
        if request is None:
            request = _CHAT.decode(body)
            if conversation is None and len(request.messages) > 1:
                conversation = _beginning(body, _end_of_last_but_one(body))
        request.conversation = conversation
        if conversation is not None:
            with self._keeping:
                self._keep(conversation)
        return request

    def _find(self, body: bytes) -> Conversation | None:
        """Return the longest known conversation with which a body begins."""
        lookup = self._known.entries.get
        longest = len(body) // _STEP * _STEP
        tries = _TRIES
        for size in range(longest, max(_LEAST_SIZE - 1, longest - _STEPS * _STEP), -_STEP):
            known = lookup((size, body[size - _MARK : size]))
            if known is None:
                continue
            conversation = self._among(known, body, size) if isinstance(known, Crowd) else known
            if conversation is not None and body.startswith(conversation.prefix):
                known.used = conversation.used = True
                return conversation
            tries -= 1
            if not tries:
                break
        return None

    def _among(self, crowd: Crowd, body: bytes, size: int) -> Conversation | None:
        """Return the longest conversation of a crowd with which a body begins; ``size`` is where their mark ends."""
        found = [match.end() for match in _MESSAGE_END.finditer(body, size - 1, size + _STEP)]
        ends = [end for end in reversed(found) if crowd.ends[end - size]]
        for key in zip(ends, _digests(body, size, ends) if ends else (), strict=True):
            conversation: Any = self._known.entries.get(key)
            if conversation is not None and body.startswith(conversation.prefix):
                return conversation  # type: ignore[no-any-return]
        return None

    def _keep(self, conversation: Conversation, start: int = 0) -> None:
        """Keep a conversation that is known up to ``start``."""
        body: Any = conversation.prefix.obj
        end = len(conversation.prefix)
        conversation.containers += _containers(body[start:end])
        conversation.wide |= not body[start:].isascii()
        conversation.cost = (
            _OVERHEAD
            + _MESSAGE_OVERHEAD * len(conversation.messages)
            + (_BYTES_PER_WIDE_BYTE if conversation.wide else _BYTES_PER_BYTE) * len(body)
            + _CONTAINER * max(0, conversation.containers - end // _BYTES_PER_CONTAINER)
        )
        conversation.shared = False
        size = end // _STEP * _STEP
        if size >= _LEAST_SIZE:
            self._put((size, bytes(conversation.prefix[size - _MARK : size])), conversation)

    def _put(self, mark: _Key, conversation: Conversation) -> None:
        """Keep a conversation under its mark, or in a crowd if there is another one with that mark."""
        other = self._known.entries.get(mark)
        if isinstance(other, Conversation) and not _same(other.prefix, conversation.prefix):
            crowd = Crowd()
            self._known.drop(mark)
            self._known.put(mark, crowd)
            self._join(crowd, mark, other)
            other = crowd
        if isinstance(other, Crowd):
            self._join(other, mark, conversation)
        else:
            conversation.key = mark
            self._known.put(mark, conversation)

    def _join(self, crowd: Crowd, mark: _Key, conversation: Conversation) -> None:
        size, end = mark[0], len(conversation.prefix)
        crowd.ends[end - size] = True
        conversation.key = end, _digests(conversation.prefix, size, [end])[0]
        self._known.put(conversation.key, conversation)

    def _forget(self, conversation: Conversation) -> None:
        if self._known.entries.get(conversation.key) is conversation:
            self._known.drop(conversation.key)


def _digests(body: bytes | memoryview, size: int, ends: list[int]) -> list[bytes]:
    """Return digests of what precedes each of the ``ends``, none of which is before ``size``."""
    before = _digest(memoryview(body)[:size])
    return [_digest(before + body[size:end]) for end in ends]


def _containers(text: bytes) -> int:
    """Return how many lists and objects there are in JSON, at most."""
    # where a byte is rare, removing it takes a tenth of the time of ``count``
    return sum([len(text) - len(text.replace(byte, b"")) for byte in (b"[", b"{")])


def _same(one: memoryview, other: memoryview) -> bool:
    whole: Any = one.obj
    return len(one) == len(other) and whole.startswith(other)


def _beginning(body: bytes, end: int) -> Conversation | None:
    """Return the conversation of which the last message but one ends at ``end``; None if it does not.

    What is open there is the array of the chat's messages if a message that is added there becomes the last of them.
    """
    if body[end : end + 1] != b",":
        return None
    prefix = memoryview(body)[:end]
    try:
        head = _CHAT.decode(b"".join((prefix, _ONE_MORE)))
    except (msgspec.DecodeError, RecursionError):
        return None
    if not head.messages or head.messages.pop().role != _NO_ROLE:
        return None
    return Conversation.of(prefix, head)


def _likely_end(body: bytes) -> int:
    """Return where the last message but one ends if messages are written as by nearly all clients, else perhaps 0."""
    last = len(body)
    for _ in range(_GUESSES):
        last = max(0, body.rfind(_FIRST_FIELD, 0, last))
        end = body.rfind(b"}", 0, last) + 1
        if body[end:last].strip() == b",":
            return end
    return 0


def _end_of_last_but_one(body: bytes) -> int:
    """Return where the last message but one ends, however the messages are written; anything if that cannot be told."""
    array: Any = _RAW_CHAT.decode(body).messages
    start = body.find(b"[", body.find(_NAME))
    last = body.rfind(_RAWS.decode(array)[-1], start, start + len(array))
    return body.rfind(b"}", 0, max(last, 0)) + 1


def _before(body: bytes, last: int) -> memoryview:
    """Return what ends with the last message but one; ``last`` is where the last one begins."""
    return memoryview(body)[: body.rindex(b"}", 0, last) + 1]
