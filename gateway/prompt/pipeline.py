"""From a request to its chunk hashes, by the best source of tokens that there is for its model."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from gateway.config import Config
from gateway.fleet.registry import Candidates
from gateway.prompt.chains import Chains, Link
from gateway.prompt.chat import template_variables
from gateway.prompt.conversation import Outline, Unreadable, outline
from gateway.prompt.engine import (
    EngineError,
    EnginePrompt,
    EngineTokenizer,
    NotRenderedError,
    chunk_extras,
    without_tensors,
)
from gateway.prompt.growth import Conversation, Conversations
from gateway.prompt.harmony import HarmonyRenderer
from gateway.prompt.model import Model, load_models
from gateway.prompt.parsing import parse_request
from gateway.prompt.passing import with_token_ids
from gateway.prompt.plan import Pieces
from gateway.prompt.prompt import Prompt
from gateway.prompt.reading import Reading
from gateway.prompt.renderer import ChatRenderer
from gateway.prompt.request import (
    ABSENT,
    ChatRequest,
    CompletionRequest,
    InferenceRequest,
    Message,
    MessagesRequest,
    ResponsesRequest,
)
from gateway.prompt.segments import Segment, SegmentCache
from gateway.prompt.selfcheck import SelfCheck
from gateway.prompt.source import Source
from gateway.prompt.template import TemplateError
from gateway.prompt.tokenizer import pack
from gateway.prompt.tools import parse_tools
from policies.chunks import TOKEN_BYTES, ChunkHasher

log = logging.getLogger("kvway")

T = TypeVar("T")

# Longer chats are rendered in a thread: a template takes some 10 µs per message, and tools and arguments their time.
_INLINE_MESSAGES: Final = 400
_INLINE_BYTES: Final = 128 * 2**10
# Still longer ones are read and looked at in a thread altogether.
_GLANCE_MESSAGES: Final = 2_000
_GLANCE_BYTES: Final = 2**20


class PromptPipeline:
    """Makes prompts of requests.

    Args:
        config: tokenizers are loaded here, which can take seconds; one that is missing or broken is logged, and its
            models are routed by approximate chunks.

    Attributes:
        checks: what came of holding prompts against the engine's.
    """

    def __init__(self, config: Config) -> None:
        settings = config.prompt
        self._config = config
        self._executor = ThreadPoolExecutor(2, "kvway-prompt")
        hasher = ChunkHasher(settings.chunk_tokens, settings.hash_seed)
        share = settings.segment_cache_bytes // 5
        self._conversations = Conversations(share)
        self._chains = Chains(hasher, share)
        self._models = load_models(config.models.values(), 2 * share, self._executor)
        self._engine = EngineTokenizer(share)
        self.checks = SelfCheck(settings.self_check, self._engine, self._leave_to_engine)
        # without tokens, a chunk is as many bytes as a chunk of tokens usually has
        words = max(1, round(settings.chunk_tokens * settings.bytes_per_token / TOKEN_BYTES))
        self._byte_hasher = ChunkHasher(words, settings.hash_seed)
        self._sources: dict[str, Source] = {}
        self._told_of: set[str] = set()  # models of which the log has said that they need engines that render
        self._bytes_per_token = settings.bytes_per_token

    async def close(self) -> None:
        """Stop threads and close connections."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        await self._engine.close()

    def parse(self, path: str, body: bytes) -> InferenceRequest:
        """Read a request body; see ``parse_request``."""
        return parse_request(path, body, self._conversations)

    async def read(self, path: str, body: bytes) -> InferenceRequest:
        """As ``parse``; a long body is read in a thread."""
        if len(body) <= _GLANCE_BYTES:
            return self.parse(path, body)
        return await self._in_thread(self.parse, path, body)

    async def prompt(self, request: InferenceRequest, candidates: Candidates) -> Prompt:
        """Return the prompt of a request. It does not suspend unless there is much to tokenize, or an engine to ask.

        Never raises for what a client sent: where only the engine can tell, the prompt has no chunks.
        """
        if request.opaque:
            return self._unread(request)
        try:
            if isinstance(request, ChatRequest):
                return await self._chat(request, candidates)
            return await self._completion(request, candidates)
        except (Unreadable, TemplateError, UnicodeEncodeError) as error:  # a template can put out lone surrogates
            log.debug("a prompt cannot be read: %s", error)
            return self._unread(request)

    def check(self, path: str, body: bytes, request: InferenceRequest, prompt: Prompt, candidates: Candidates) -> None:
        """Hold a prompt against the engine's, in the background and if it is in the sample; see ``SelfCheck``.

        Args:
            path: of the request.
            body: of the request, as it came.
            request: what ``parse`` made of them.
            prompt: what ``prompt`` made of it; of no interest unless ``tokenized``.
            candidates: as for ``prompt``.
        """
        if prompt.tokenized and not _renders_otherwise(request) and self.checks.due(candidates.model):
            self.checks.begin(path, body, self._payload_maker(request, candidates), prompt.ids, candidates)

    async def engine_ids(self, path: str, body: bytes, candidates: Candidates) -> bytes:
        """Return the packed ids that a worker makes of a request, without running it.

        Raises:
            EngineError: no answer, or none that can be used.
        """
        payload = self._payload_maker(self.parse(path, body), candidates)
        return await self._engine.rendered(random.choice(candidates.workers).config, path, body, payload)

    def _payload_maker(self, request: InferenceRequest, candidates: Candidates) -> Callable[[], dict[str, Any]]:
        """Return what makes the ``/tokenize`` request for workers that do not render."""
        alike = self._source(candidates).tokenizes_alike and not _is_tokenized_otherwise(request)
        return partial(_payload, request) if alike else _nothing_alike

    def body_with_ids(self, body: bytes, prompt: Prompt, candidates: Candidates) -> bytes | None:
        """Return the body to send in place of ``body``, where its model wants token ids passed on; else None.

        Only ids of a model of which the engine has confirmed a prompt are passed on: wrong ones would be answered.
        """
        if not prompt.tokenized or not self._config.model_config_for(candidates.model).pass_token_ids:
            return None
        return with_token_ids(body, prompt.ids) if self.checks.proven(candidates.model) else None

    async def _chat(self, request: ChatRequest, candidates: Candidates) -> Prompt:
        source = self._source(candidates)
        model = source.model
        if model is None or model.renderer is None or request.chat_template is not None:
            if model is not None and model.harmony is not None and not isinstance(request, ResponsesRequest):
                return await self._harmony(request, candidates, model, model.harmony)
            return await self._chat_elsewhere(request, candidates, source)
        if isinstance(request, MessagesRequest):
            model.renderer.settle(request)
        texts: Sequence[Pieces] | None
        if len(request.messages) > _GLANCE_MESSAGES or len(request.body) > _GLANCE_BYTES:
            outlined, texts = await self._in_thread(model.renderer.glance, request)
        else:
            outlined, texts = model.renderer.glance(request)
        root = self._root(request, candidates)
        if texts is None:
            if outlined.first_media is not None:
                prompt = await self._rendered_by_engine(request, candidates, source) if source.asks_media else None
                return prompt or await self._before_media(request, outlined, model, root)
            texts = await self._rendered(request, outlined, model.renderer)
        if request.conversation is not None and not request.add_special_tokens:
            return await self._going_on(request.conversation, texts, model.segments, root)
        segments = await model.segments.get(texts)
        if request.add_special_tokens:
            segments = [*model.before, *segments, *model.after]
        prompt = await self._exact(segments, root)
        if isinstance(request, ResponsesRequest) and request.cut_to_fit:  # only the engine knows what fits
            prompt.exact = prompt.tokenized = False
        return prompt

    async def _going_on(
        self, conversation: Conversation, texts: Sequence[Pieces], cache: SegmentCache, root: Link
    ) -> Prompt:
        """Return the prompt of a conversation that begins as it was read before."""
        reading = conversation.reading
        if reading is None or reading.cache is not cache or reading.root is not root:
            reading = Reading(cache, root)
        n_common = reading.common(texts)
        added = await cache.get(texts[n_common:])
        conversation.reading = reading = await reading.going_on(texts, n_common, added, self._chains)
        return Prompt(reading.tokens, reading.hashes, True, reading.parts, tokenized=True)

    async def _rendered(self, request: ChatRequest, outlined: Outline, renderer: ChatRenderer) -> Sequence[Pieces]:
        if len(outlined.shapes) > _INLINE_MESSAGES or len(request.body) > _INLINE_BYTES:
            chat, texts = await self._in_thread(renderer.rendered, request, outlined)
        else:
            chat, texts = renderer.rendered(request, outlined)
        renderer.learn(request, outlined, chat, texts)
        return texts

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    async def _harmony(
        self, request: ChatRequest, candidates: Candidates, model: Model, harmony: HarmonyRenderer
    ) -> Prompt:
        pieces = harmony.pieces(request)
        made = iter(await model.segments.get([piece for piece in pieces if not isinstance(piece, Segment)]))
        segments = [piece if isinstance(piece, Segment) else next(made) for piece in pieces]
        return await self._exact(segments, self._root(request, candidates))

    async def _chat_elsewhere(self, request: ChatRequest, candidates: Candidates, source: Source) -> Prompt:
        if request.chat_template is not None and not source.takes_templates:
            raise Unreadable("a chat template of the request's own")
        if source.engine or request.chat_template is not None:
            prompt = await self._rendered_by_engine(request, candidates, source)
            if prompt is not None:
                return prompt
        head = [bytes(request.tools), bytes(request.chat_template_kwargs)]
        text = b"\n".join([*head, *map(msgspec.json.encode, request.messages)])
        return self._approximate(text, request, candidates)

    async def _rendered_by_engine(self, request: ChatRequest, candidates: Candidates, source: Source) -> Prompt | None:
        has_media = outline(request.messages, parts=False).first_media is not None
        if has_media and not source.asks_media:
            raise Unreadable("media, which the engine would fetch")
        worker = random.choice(candidates.workers)
        try:
            made = await self._engine.render(worker.config, request.path, without_tensors(request.body))
        except NotRenderedError as error:
            if has_media or not source.tokenizes_alike:
                if candidates.model not in self._told_of:
                    self._told_of.add(candidates.model)
                    log.warning("model %s: %s; start vLLM with --enable-scale-out", candidates.model, error)
                return None
            return await self._from_engine(_payload(request), request, candidates)
        except EngineError as error:
            log.warning("%s; the request is routed by approximate chunks", error)
            return None
        return self._of_engine(made, request, candidates)

    async def _before_media(self, request: ChatRequest, outlined: Outline, model: Model, root: Link) -> Prompt:
        assert model.renderer is not None
        texts, chars = model.renderer.certain_prefix(request, outlined)
        known = await self._exact(await model.segments.get(texts), root)
        return Prompt(max(known.tokens, self._estimate(chars)), known.chunks, False)

    async def _completion(self, request: CompletionRequest, candidates: Candidates) -> Prompt:
        first, others = self._first_prompt(request.prompt)
        root = self._root(request, candidates)
        if not isinstance(first, str):
            try:
                packed = pack(first)
            except (OverflowError, TypeError) as error:
                raise Unreadable(f"token ids: {error}") from None
            return Prompt(len(first) + others, self._chains.hasher.chain(root.last, packed), True, [packed])
        source = self._source(candidates)
        model, prompt = source.model, None
        if model is not None:
            segments = await model.segments.get(model.cutter.cut(first))
            if request.add_special_tokens:
                segments = [*model.before, *segments, *model.after]
            prompt = await self._exact(segments, root)
        elif source.engine:
            prompt = await self._from_engine(_payload(request), request, candidates)
        if prompt is None:
            prompt = self._approximate(first.encode(), request, candidates)
        if others:
            prompt.tokens += others
            prompt.exact = prompt.tokenized = False
        return prompt

    def _first_prompt(self, prompt: Any) -> tuple[str | list[int], int]:
        """Return the first of a request's prompts, by which it is routed, and about how many tokens the others have."""
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return prompt, 0
        first, *others = prompt
        if isinstance(first, str) and all(isinstance(other, str) for other in others):
            return first, sum(self._estimate(len(other)) for other in others)
        if isinstance(first, list) and all(isinstance(other, list) for other in others):
            return first, sum(map(len, others))
        raise Unreadable("a list of prompts of several kinds")

    async def _from_engine(
        self, payload: dict[str, Any], request: InferenceRequest, candidates: Candidates
    ) -> Prompt | None:
        worker = random.choice(candidates.workers)
        try:
            made = await self._engine.tokenize(worker.config, payload)
        except EngineError as error:
            log.warning("%s; the request is routed by approximate chunks", error)
            return None
        return self._of_engine(made, request, candidates)

    def _of_engine(self, made: EnginePrompt, request: InferenceRequest, candidates: Candidates) -> Prompt:
        root, hasher = self._root(request, candidates), self._chains.hasher
        chunks = hasher.chain(root.last, made.packed, chunk_extras(made.media, hasher.chunk_tokens))
        return Prompt(len(made.packed) // TOKEN_BYTES, chunks, True, [made.packed])

    def _source(self, candidates: Candidates) -> Source:
        source = self._sources.get(candidates.model)
        if source is None:
            config = self._config.model_config_for(candidates.model)
            model = (
                self._models.get((config.tokenizer_files, config.chat_template)) if config.source != "bytes" else None
            )
            source = self._sources[candidates.model] = Source.of(config, model)
        return source

    def _leave_to_engine(self, model: str) -> None:
        self._sources[model] = self._sources[model]._replace(model=None, engine=True)

    def _root(self, request: InferenceRequest, candidates: Candidates) -> Link:
        return self._chains.root(candidates.model, candidates.lora, request.cache_salt)

    async def _exact(self, segments: Sequence[Segment], root: Link) -> Prompt:
        parts = [segment.ids for segment in segments]
        hashes = await self._chains.hashes(root, segments)
        return Prompt(sum(map(len, parts)) // TOKEN_BYTES, hashes, True, parts, tokenized=True)

    def _approximate(self, text: bytes, request: InferenceRequest, candidates: Candidates) -> Prompt:
        root = self._byte_hasher.root(candidates.model, candidates.lora, request.cache_salt)
        return Prompt(self._estimate(len(text)), self._byte_hasher.chain(root, text), False)

    def _unread(self, request: InferenceRequest) -> Prompt:
        return Prompt(self._estimate(len(request.body)), [], False)

    def _estimate(self, length: int) -> int:
        return max(1, int(length / self._bytes_per_token))


def _renders_otherwise(request: InferenceRequest) -> bool:
    """Return whether vLLM's ``/render`` may differ from what it runs: it does not ask how a model disables thinking."""
    return isinstance(request, MessagesRequest) and request.thinking_disabled


def _is_tokenized_otherwise(request: InferenceRequest) -> bool:
    """Return whether vLLM's ``/tokenize`` may differ from what it runs: it puts a called function's arguments first."""
    return isinstance(request, ResponsesRequest) and any(message.tool_calls for message in request.messages)


def _nothing_alike() -> dict[str, Any]:
    raise EngineError("only /render makes the tokens with which the request runs; start vLLM with --enable-scale-out")


def _payload(request: InferenceRequest) -> dict[str, Any]:
    """Return the ``/tokenize`` request that gives the tokens of a chat, or of a completion's first text.

    Raises:
        Unreadable: there are media, which the engine would fetch, or fields that it would refuse.
    """
    if isinstance(request, CompletionRequest):
        first = request.prompt if isinstance(request.prompt, str) else (request.prompt or [""])[0]
        return {"model": request.model, "prompt": first, "add_special_tokens": request.add_special_tokens}
    if outline(request.messages, parts=False).first_media is not None:
        raise Unreadable("media")
    if isinstance(request, MessagesRequest) and not request.settled:
        raise Unreadable("what becomes of it depends on a template that is not known here")
    payload = {
        "model": request.model,
        "messages": list(map(_with_reasoning, request.messages)),
        "chat_template_kwargs": template_variables(request),
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
        "add_special_tokens": request.add_special_tokens,
        "chat_template": request.chat_template,
    }
    if request.tools is ABSENT:
        return payload
    return {**payload, "tools": parse_tools(bytes(request.tools), request.kind) or None}


def _with_reasoning(message: Message) -> Message:
    """Return a message with its reasoning under the name by which vLLM's ``/tokenize`` knows it."""
    if message.reasoning_content is None or message.reasoning is not None:
        return message
    return msgspec.structs.replace(message, reasoning=message.reasoning_content, reasoning_content=None)
