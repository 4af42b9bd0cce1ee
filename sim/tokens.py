"""Text to token ids and back, as a simulated worker does it.

``WorkerTokenizer`` reads a model's tokenizer files and renders its chat template, as vLLM does. ``ByteTokenizer`` needs
no files: a token is four bytes of text. Both also invent answers, which read back as the very tokens they were made of:
the next turn of a conversation then finds the blocks of this one's answer. Answers are those of a model at temperature
0: a prompt that ends with the beginning of one is answered with its rest.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import mmh3
import msgspec
import numpy as np
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import DecodeStream

from policies.chunks import TOKEN_BYTES
from sim.cache import Tokens

_WORD: Final = re.compile(r"[Ġ▁][a-z]+")
_MAX_WORDS: Final = 2048
_BASE: Final = 0x9E3779B97F4A7C15  # odd, so that no power of it is 0 modulo 2^64
_MASK: Final = 2**64 - 1

_SAMPLE: Final = "A naïve test:\n\tdef f(x): return 3.14 * x['ключ']  # 你好 🙂 \u200d\r\n" * 2


class PromptError(ValueError):
    """A prompt that cannot become tokens; the message says why."""


@dataclass(slots=True, frozen=True)
class Chat:
    """A conversation to be rendered.

    Attributes:
        messages: in OpenAI's form; content may be a list of text parts.
        tools: in OpenAI's form.
        add_generation_prompt: end with what announces an answer.
        continue_final_message: leave the last message open, to be continued.
        variables: further variables for the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class Tokenizer(ABC):
    """What a worker needs of a tokenizer.

    Attributes:
        vocab_size: ids run from 0 to one below it.
    """

    vocab_size: int

    @abstractmethod
    def encode_text(self, text: str) -> Tokens:
        """Return the ids of a text prompt, special tokens that the model wants added.

        Raises:
            PromptError: the text is not valid Unicode.
        """

    @abstractmethod
    def encode_chat(self, chat: Chat) -> Tokens:
        """Return the ids of a conversation.

        Raises:
            PromptError: the chat template does not accept it.
        """

    @abstractmethod
    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return the text each token adds to a stream, "" where a character is not yet complete."""

    @abstractmethod
    def _word(self, draw: int) -> int:
        """Return the id of a word whose text reads back as itself, chosen by ``draw``, a random number of 64 bits."""

    def answer(self, prompt: Tokens, length: int) -> Tokens:
        """Return ``length`` invented output ids. Each follows from all tokens before it, and from nothing else."""
        ids = array("I")
        state = _digest(prompt)
        for _ in range(length):
            token = self._word(mmh3.hash64(state.to_bytes(8, "little"), signed=False)[0])
            ids.append(token)
            state = (state * _BASE + token) & _MASK
        return ids

    def others(self, count: int) -> list[str]:
        """Return the texts of up to ``count`` words, the same ones always."""
        return self.pieces(dict.fromkeys(map(self._word, range(count))))

    def encode_body(self, body: Mapping[str, Any]) -> Tokens:
        """Return the prompt of an OpenAI body, chat or completion with one prompt."""
        if "messages" in body:
            return self.encode_chat(Chat(body["messages"], body.get("tools")))
        prompt = body["prompt"]
        return self.encode_text(prompt) if isinstance(prompt, str) else array("I", prompt)


class ByteTokenizer(Tokenizer):
    """Four bytes of UTF-8 make a token, their little-endian value its id. Parts of a conversation begin afresh."""

    vocab_size = 2**32

    def encode_text(self, text: str) -> Tokens:
        """Return the ids of a text; the last one may stand for fewer than four bytes."""
        raw = text.encode("utf-8", "surrogatepass")
        ids = array("I")
        ids.frombytes(raw.ljust(-(-len(raw) // TOKEN_BYTES) * TOKEN_BYTES, b"\0"))
        return ids

    def encode_chat(self, chat: Chat) -> Tokens:
        """Return the ids of a conversation in a plain form of its own."""
        parts = [msgspec.json.encode(chat.tools).decode()] if chat.tools else []
        for message in chat.messages:
            parts += [f"<|{message.get('role', '')}|>", _text(message.get("content"))]
            if message.get("tool_calls"):
                parts.append(msgspec.json.encode(message["tool_calls"]).decode())
            parts.append("<|end|>")
        if chat.continue_final_message and chat.messages:
            parts.pop()
        elif chat.add_generation_prompt:
            parts.append("<|assistant|>")
        ids = array("I")
        for part in parts:
            ids += self.encode_text(part)
        return ids

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return the text of each token; characters cut by a token's end become U+FFFD."""
        return [token.to_bytes(TOKEN_BYTES, "little").rstrip(b"\0").decode("utf-8", "replace") for token in ids]

    def _word(self, draw: int) -> int:
        letters = (draw % 26, draw // 26 % 26, draw // 676 % 26)
        return int.from_bytes((ord(" "), *(ord("a") + letter for letter in letters)), "little")


class WorkerTokenizer(Tokenizer):
    """A model's own tokenizer and chat template.

    Args:
        folder: holds ``tokenizer.json``, and for chats ``chat_template.jinja`` or ``tokenizer_config.json``.

    Raises:
        ValueError: the files are missing or unreadable; the message says which.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str((folder / "tokenizer.json").read_text("utf-8"))
            self._special, self._template = _load_template(folder)
        except OSError as error:
            raise ValueError(f"{error.filename}: cannot be read: {error.strerror}") from None
        except Exception as error:  # tokenizers raises bare Exceptions
            raise ValueError(f"{folder}: is not a tokenizer: {error}") from None
        self._fast = _fast_twin(self._tokenizer)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self._words = self._find_words()

    def encode_text(self, text: str) -> Tokens:
        """Return the ids of a text prompt, special tokens added as the tokenizer's post-processor says."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, chat: Chat) -> Tokens:
        """Return the ids of a conversation, rendered with the model's chat template."""
        if self._template is None:
            raise PromptError("this model has no chat template")
        messages = [{**message, "content": _text(message.get("content"))} for message in chat.messages]
        known = {"messages": messages, "tools": chat.tools, "add_generation_prompt": chat.add_generation_prompt}
        try:
            text = self._template.render(self._special | known | dict(chat.variables))
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise PromptError(f"the chat template does not accept this conversation: {error}") from None
        if chat.continue_final_message and messages:
            final = messages[-1]["content"].strip()
            text = text[: text.rfind(final) + len(final)]
        return self._encode(text, add_special_tokens=False)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return the text each token adds, special tokens left out."""
        stream = DecodeStream(skip_special_tokens=True)
        return [stream.step(self._tokenizer, token) or "" for token in ids]

    def _encode(self, text: str, add_special_tokens: bool) -> Tokens:
        try:
            if self._fast is not None:
                return array("I", self._fast.encode(text, add_special_tokens=add_special_tokens).ids)
            # encode_batch lets other threads run meanwhile, encode does not
            encoding = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except (TypeError, UnicodeError):
            raise PromptError("the prompt is not valid Unicode") from None
        return array("I", encoding.ids)

    def _word(self, draw: int) -> int:
        return self._words[draw % len(self._words)]

    def _find_words(self) -> list[int]:
        """Return the ids of lower-case words with a space before them that are tokenized as that one id."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        words = sorted((token_id, token) for token, token_id in vocabulary.items() if _WORD.fullmatch(token))
        words = words[:_MAX_WORDS]
        # the letter before stands for the text that an answer continues
        encodings = self._tokenizer.encode_batch([f"a {token[1:]}" for _, token in words], add_special_tokens=False)
        stable = [word for (word, _), encoding in zip(words, encodings, strict=True) if encoding.ids[-1:] == [word]]
        return stable or list(range(self.vocab_size))


def _digest(ids: Tokens) -> int:
    """Return the polynomial hash of a prompt, ``Σ id_i · BASE^(n-1-i) mod 2^64``: one more token is one step more."""
    if not ids:
        return 0
    powers = np.full(len(ids), _BASE, np.uint64)
    powers[0] = 1
    return int(np.frombuffer(ids, np.uint32).astype(np.uint64)[::-1] @ np.cumprod(powers))


def _fast_twin(exact: tokenizers.Tokenizer) -> Any:
    """Return the same tokenizer in a library some fifty times as fast, None where that is missing or differs."""
    try:
        import fastokens

        fast = fastokens.Tokenizer.from_json_str(exact.to_str())
        same = fast.encode(_SAMPLE, add_special_tokens=True).ids == exact.encode(_SAMPLE).ids
    except Exception:  # it refuses what it does not know, in ways of its own
        return None
    return fast if same else None


@lru_cache(maxsize=4)
def load_tokenizer(folder: Path | None) -> Tokenizer:
    """Return the tokenizer of a model's folder, or one that needs no files: one for all workers of a process.

    Raises:
        ValueError: the files are missing or unreadable.
    """
    return WorkerTokenizer(folder) if folder is not None else ByteTokenizer()


def _text(content: Any) -> str:
    """Return a message's content as text: parts of a list are joined by newlines, as vLLM does for plain templates."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "\n".join(part for part in parts if isinstance(part, str))
    raise PromptError("content must be a text or a list of parts")


def _load_template(folder: Path) -> tuple[dict[str, Any], jinja2.Template | None]:
    """Return the special tokens that templates refer to, and the folder's chat template if it has one."""
    settings_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    settings: dict[str, Any] = msgspec.json.decode(settings_file.read_bytes()) if settings_file.exists() else {}
    source = template_file.read_text("utf-8") if template_file.exists() else settings.get("chat_template")
    special = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = settings.get(name)
        special[name] = token.get("content") if isinstance(token, dict) else token
    if not isinstance(source, str):
        return special, None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _refuse
    return special, environment.from_string(source)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
