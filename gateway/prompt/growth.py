"""Long chats that grow: what was made of a conversation's last request serves its next, which begins as that did.

Clients send the whole conversation each time, with something added at its end. So the messages of a request that begins
like an earlier one are not decoded again, and where the template makes the same of them, their tokens and chunk hashes
are not looked up again. What was learned is compared, never believed: a body must begin with the very bytes, a text be
the very text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from secrets import token_hex
from threading import Lock
from typing import Any, Final

import msgspec

from gateway.prompt.cache import ByteCache, Entry
from gateway.prompt.chains import Chains, Link
from gateway.prompt.plan import Pieces
from gateway.prompt.request import ABSENT, ChatRequest, Message
from gateway.prompt.segments import Segment, SegmentCache
from policies.chunks import TOKEN_BYTES, ChunkHasher

LEAST_BYTES: Final = 8 * 2**10
"""Shorter chats are read anew in less time than it takes to find them."""

_STEP: Final = 2048  # conversations are found at lengths that are multiples of this …
_STEPS: Final = 32  # … and were so many of them shorter at most
_MARK: Final = 64  # bytes before such a length, by which they are found
_OVERHEAD: Final = 2000
_MESSAGE_OVERHEAD: Final = 1000  # bytes of Python objects per message, its segments included
# What one byte of a body takes: itself, its text twice, ids and hashes. A single character can make a text four times
# as wide.
_BYTES_PER_BYTE: Final = 5
_BYTES_PER_WIDE_BYTE: Final = 8
_CONTAINER: Final = 64  # bytes of a Python list or dict
_BYTES_PER_CONTAINER: Final = 16  # of a body: a list or dict in so many is within what its bytes are charged
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
_FIELDS: Final = [
    (field.name, field.encode_name, field.default)
    for field in msgspec.structs.fields(ChatRequest)
    if field.name not in ("messages", "body", "conversation")
]


class Reading:
    """What became of a conversation's texts.

    Attributes:
        cache: where its segments are from.
        root: of its chain.
        texts: of its segments.
        parts: packed ids of each segment.
        ends: how many bytes of ids there are up to the end of each segment.
        hashes: of all whole chunks.
    """

    __slots__ = ("cache", "ends", "hashes", "parts", "root", "texts")

    def __init__(self, cache: SegmentCache, root: Link) -> None:
        self.cache = cache
        self.root = root
        self.texts: Sequence[Pieces] = []
        self.parts: list[bytes] = []
        self.ends: list[int] = []
        self.hashes: list[bytes] = []

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return self.ends[-1] // TOKEN_BYTES if self.ends else 0

    def common(self, texts: Sequence[Pieces]) -> int:
        """Return how many leading texts are the same."""
        known, most = self.texts, min(len(self.texts), len(texts))
        # mostly all but the last message, and what asks for the answer
        start = most - 2 if most > 1 and known[: most - 2] == texts[: most - 2] else 0
        return next((at for at in range(start, most) if known[at] != texts[at]), most)

    def going_on(self, texts: Sequence[Pieces], n_common: int, added: list[Segment], chains: Chains) -> Reading:
        """Return the reading of ``texts``, the first ``n_common`` of which are ours and the others became ``added``."""
        reading = Reading(self.cache, self.root)
        reading.texts = texts
        reading.ends = ends = self.ends[:n_common]
        end = ends[-1] if ends else 0
        new = [segment.ids for segment in added]
        for ids in new:
            end += len(ids)
            ends.append(end)
        reading.parts = self.parts[:n_common] + new
        if n_common:
            reading.hashes = self._hashes_on(reading, n_common, chains.hasher)
        else:
            chains.follow(self.root, added, reading.hashes)
        return reading

    def _hashes_on(self, reading: Reading, n_common: int, hasher: ChunkHasher) -> list[bytes]:
        """Return the hashes of ``reading``, whose first ``n_common`` segments are ours."""
        hashes = self.hashes[: self.ends[n_common - 1] // hasher.chunk_bytes]
        hashed = len(hashes) * hasher.chunk_bytes
        first = bisect_right(reading.ends, hashed)  # of the segments, the first that ends after that
        rest = reading.parts[first:]
        if rest:
            start = reading.ends[first - 1] if first else 0
            rest[0] = rest[0][hashed - start :]
        hashes += hasher.chain(hashes[-1] if hashes else self.root.last, b"".join(rest))
        return hashes


class Conversation(Entry):
    """A chat that was read before.

    Attributes:
        prefix: the beginning of its last body, up to the end of the last message but one: the last may be another
            next time, as when an answer is asked for again. A view, as long bodies take their time to copy.
        messages: of the prefix; not to be changed.
        head: attributes of the request that stand before the messages, and their values.
        names: of these in the body, and of the messages.
        reading: what became of its texts, None until then.
    """

    __slots__ = ("head", "messages", "names", "prefix", "reading")

    def __init__(self, prefix: memoryview, messages: list[Message], head: ChatRequest) -> None:
        super().__init__(0)
        self.prefix = prefix
        self.messages = messages
        self.head: list[tuple[str, Any]] = []
        self.names = {"messages"}
        for attribute, name, default in _FIELDS:
            if (value := getattr(head, attribute)) is not default:
                # a raw value would keep all of what it was read from
                self.head.append((attribute, value.copy() if isinstance(value, msgspec.Raw) else value))
                self.names.add(name)
        self.reading: Reading | None = None


class Conversations:
    """The conversations read of late.

    Args:
        max_bytes: bound on what is kept of them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._known: ByteCache[tuple[int, bytes], Conversation] = ByteCache(max_bytes)
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
                self._forget(conversation)
                conversation.prefix, conversation.messages = prefix, messages[:-1]
                self._keep(conversation)
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
        lookup = self._known.entries.get
        longest = len(body) // _STEP * _STEP
        for size in range(longest, max(LEAST_BYTES // 2, longest - _STEPS * _STEP), -_STEP):
            conversation = lookup((size, body[size - _MARK : size]))
            if conversation is not None and body.startswith(conversation.prefix):
                conversation.used = True
                return conversation
        return None

    def _keep(self, conversation: Conversation) -> None:
        body: Any = conversation.prefix.obj
        containers = body.count(b"[") + body.count(b"{") - len(body) // _BYTES_PER_CONTAINER
        conversation.cost = (
            _OVERHEAD
            + _MESSAGE_OVERHEAD * len(conversation.messages)
            + (_BYTES_PER_BYTE if body.isascii() else _BYTES_PER_WIDE_BYTE) * len(body)
            + _CONTAINER * max(0, containers)
        )
        self._known.put(_key(conversation), conversation)

    def _forget(self, conversation: Conversation) -> None:
        key = _key(conversation)
        if self._known.entries.get(key) is conversation:
            self._known.drop(key)


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
    return Conversation(prefix, head.messages, head)


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


def _key(conversation: Conversation) -> tuple[int, bytes]:
    size = len(conversation.prefix) // _STEP * _STEP
    return size, bytes(conversation.prefix[size - _MARK : size])
