"""Tokenizers: ``tokenizer.json`` in, packed little-endian u32 ids out.

fastokens encodes some fifty times as fast as Hugging Face ``tokenizers``, but only what both encode alike is of use:
at load it is held against ``tokenizers`` on a varied corpus, and where it differs or refuses, ``tokenizers`` serves.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

import tokenizers

from policies.chunks import TOKEN_BYTES

try:
    import fastokens
except ImportError:  # no wheel for this platform
    fastokens = None

log = logging.getLogger("kvway")

_SPECIAL_TOKEN_NAMES: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class TokenizerError(Exception):
    """There is no usable tokenizer; the message says where it was looked for and what to do."""


class Encoder(Protocol):
    """Encodes texts without adding anything to them.

    Attributes:
        inline_chars: how much text may be encoded on the event loop; more would delay other streams noticeably.
        loop_chars: how much may be encoded there in all, if other streams get their turn in between.
    """

    inline_chars: int
    loop_chars: int

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Return one packed array of ids per text."""
        ...


class FastEncoder:
    """Encoder on fastokens.

    It lets other threads run, and shares out what comes in one call among threads of its own. To wake and await these
    takes longer than to encode a message, and on busy cores than much more; so texts come one by one where they are
    few, and otherwise in groups.
    """

    inline_chars = 65_536
    loop_chars = 2**20
    group_chars = 24_576

    def __init__(self, tokenizer: Any) -> None:
        self._encode = tokenizer.encode_batch_flat

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Return one packed array of ids per text."""
        chars = sum(map(len, texts))
        if chars <= self.inline_chars:
            return [self._encode([text])[0] for text in texts]
        packed: list[bytes] = []
        # in groups: after each call, the thread waits for its turn
        n_texts = max(1, len(texts) * self.group_chars // chars)
        for first in range(0, len(texts), n_texts):
            ids, packed_offsets = self._encode(list(texts[first : first + n_texts]))
            offsets = memoryview(packed_offsets).cast("Q")
            packed += [ids[start * TOKEN_BYTES : end * TOKEN_BYTES] for start, end in pairwise(offsets)]
        return packed


class HuggingFaceEncoder:
    """Encoder on ``tokenizers``. Only its batch call lets other threads run."""

    inline_chars = loop_chars = 4_096

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Return one packed array of ids per text."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [pack(encoding.ids) for encoding in encodings]


def pack(ids: Sequence[int]) -> bytes:
    """Pack token ids as little-endian u32.

    Raises:
        OverflowError: an id is negative or does not fit.
        TypeError: an id is not an integer.
    """
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> list[int]:
    """Return the token ids that ``pack`` has packed."""
    ids = array("I", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in the text before anything else happens to it; fields as in ``tokenizer.json``."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


@dataclass(slots=True)
class Tokenizer:
    """A loaded tokenizer.

    Attributes:
        encoder: what encodes.
        added_tokens: every added token.
        special_tokens: ``bos_token``, ``eos_token`` …, as chat templates read them.
        prefix: packed ids that the engine puts before a text with ``add_special_tokens``.
        suffix: packed ids that it puts after it.
        directory: where it was found.
        config: ``tokenizer_config.json``, empty if there is none.
        digest: of what determines its ids; tokenizers with equal digests share caches.
    """

    encoder: Encoder
    added_tokens: list[AddedToken]
    special_tokens: dict[str, str]
    prefix: bytes
    suffix: bytes
    directory: Path
    config: dict[str, Any]
    digest: bytes


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.

    Args:
        path: ``tokenizer.json``, or a directory that holds it; ``tokenizer_config.json`` is read from beside it.

    Raises:
        TokenizerError: a file is missing or broken.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return _load(file)
    except TokenizerError:
        raise
    except Exception as error:  # what is wrong with a file may show first where a library makes use of it
        raise TokenizerError(
            f"{file}: is of no use, or a file beside it ({type(error).__name__}: {error}); copy the model's own files, "
            "or set models.<name>.source to engine"
        ) from None


def _load(file: Path) -> Tokenizer:
    text, reference, added = _read_tokenizer(file)
    config = _read_config(file.parent)
    # transformers adds, or gives other flags to, what the configuration lists otherwise
    changed = [token for token in _declared_tokens(config, file.parent, added) if token not in added]
    reference.add_tokens([tokenizers.AddedToken(**asdict(token)) for token in changed])
    reference.no_truncation()
    reference.no_padding()
    added = [*(token for token in added if token.content not in {other.content for other in changed}), *changed]
    if config.get("split_special_tokens") is True:  # then they are text like any other
        reference.encode_special_tokens = True
        added = [token for token in added if not token.special]
    prefix, suffix = _around(reference)
    return Tokenizer(
        encoder=_encoder(file, text, reference, added, changed),
        added_tokens=added,
        special_tokens={name: token.content for name, token in _named_tokens(config).items()},
        prefix=prefix,
        suffix=suffix,
        directory=file.parent,
        config=config,
        digest=hashlib.sha256(text.encode() + repr(added).encode()).digest(),
    )


def _read_tokenizer(file: Path) -> tuple[str, tokenizers.Tokenizer, list[AddedToken]]:
    try:
        text = file.read_text("utf-8")
        return text, tokenizers.Tokenizer.from_str(text), [_added(token) for token in json.loads(text)["added_tokens"]]
    except OSError as error:
        raise TokenizerError(
            f"{file}: cannot be read ({error.strerror or error}); copy tokenizer.json of the model there, "
            "or set models.<name>.tokenizer to the directory that holds it"
        ) from None
    except Exception as error:  # tokenizers raises plain Exception for a file it does not understand
        raise TokenizerError(
            f"{file}: is not a tokenizer.json that tokenizers {tokenizers.__version__} reads ({error}); "
            "copy the model's own, or set models.<name>.source to engine"
        ) from None


def _read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is no such file."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{file}: must hold a JSON object")
    return content


def _read_config(directory: Path) -> dict[str, Any]:
    """Return ``tokenizer_config.json``, with what older models list in ``special_tokens_map.json``."""
    config = _read_object(directory / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    return config | _read_object(directory / "special_tokens_map.json")


def _declared_tokens(config: dict[str, Any], directory: Path, added: Sequence[AddedToken]) -> list[AddedToken]:
    """Return the tokens that a model's other files add to those of ``tokenizer.json``, in the order of their ids.

    As ``_from_pretrained`` and ``TokenizersBackend`` of ``transformers`` 5 do: what is listed by id, then the special
    tokens that are no added ones so far.
    """
    special = [*_named_tokens(config).values(), *_extra_tokens(config)]
    names = {token.content for token in special}
    listed = config.get("added_tokens_decoder")
    try:
        if isinstance(listed, dict):
            by_id = {int(number): _added(token) for number, token in listed.items()}
        else:
            older = _read_object(directory / "added_tokens.json")
            by_id = {int(number): _plain_token(name, name in names) for name, number in older.items()}
    except (TypeError, ValueError, AttributeError) as error:
        file = "tokenizer_config.json" if isinstance(listed, dict) else "added_tokens.json"
        raise TokenizerError(f"{directory / file}: its added tokens are not understood: {error}") from None
    declared = [by_id[number] for number in sorted(by_id)]
    known = {token.content for token in (*added, *declared)}
    return [*declared, *{token.content: token for token in special if token.content not in known}.values()]


def _named_tokens(config: dict[str, Any]) -> dict[str, AddedToken]:
    """Return ``bos_token``, ``eos_token`` …, and those that the model has besides, as ``image_token``."""
    standard = [f"{name}_token" for name in _SPECIAL_TOKEN_NAMES]
    own = [name for name in config if name.endswith("_token") and name not in standard]
    extra = config.get("extra_special_tokens")
    values = {name: config.get(name) for name in (*standard, *own)} | (extra if isinstance(extra, dict) else {})
    tokens = {name: _special_token(value) for name, value in values.items()}
    return {name: token for name, token in tokens.items() if token is not None}


def _extra_tokens(config: dict[str, Any]) -> list[AddedToken]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    tokens = map(_special_token, extra if isinstance(extra, list) else ())
    return [token for token in tokens if token is not None]


def _special_token(value: Any) -> AddedToken | None:
    """Return a special token, which a configuration gives as a text or as an object; None if it is neither."""
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return replace(_added({"normalized": False} | value), special=True)
    return _plain_token(value, special=True) if isinstance(value, str) and value else None


def _plain_token(content: str, special: bool) -> AddedToken:
    return AddedToken(content, normalized=not special, special=special)


def _added(token: dict[str, Any]) -> AddedToken:
    return AddedToken(**{name: value for name, value in token.items() if name in AddedToken.__slots__})


def _encoder(
    file: Path, text: str, reference: tokenizers.Tokenizer, added: list[AddedToken], changed: list[AddedToken]
) -> Encoder:
    """Return the fastest encoder that agrees with ``reference``, which is ``text`` with ``changed`` tokens."""
    slow = HuggingFaceEncoder(reference)
    if fastokens is None or reference.encode_special_tokens:
        return slow
    try:
        tokenizer = fastokens.Tokenizer.from_json_str(text)
        tokenizer.add_tokens(changed)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        fast = FastEncoder(tokenizer)
        corpus = varied_texts([token.content for token in added])
        differing = sum(one != other for one, other in zip(fast.encode(corpus), slow.encode(corpus), strict=True))
    except Exception as error:  # it refuses pre-tokenizers that it does not implement
        log.info("%s: fastokens does not take it (%s); tokenizers serves, more slowly", file, error)
        return slow
    if differing:
        log.warning("%s: fastokens gives other ids on %d texts; tokenizers serves, more slowly", file, differing)
        return slow
    return fast


def varied_texts(tokens: Sequence[str]) -> list[str]:
    """Return texts that tell tokenizers apart: scripts, spaces, digits, code, and the given tokens among them."""
    plain = [
        "",
        " ",
        "a",
        "Hello, world! It's the user's 1st test; isn't it? THEY'LL see. we've I'm he'd",
        "  leading, trailing  \n\n\n and   inner \t\t spaces \r\n\r\n ends \u00a0\u2003here\u3000",
        "def f(x: int) -> str:\n    return f'{x:>10}'  # comment\n\tif a != b and c <= d:\n\t\tpass\n",
        '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 23, 456, 7890, -1.5e-7]}}',
        "https://example.org/a/b?c=d&e=%20f#g  user@example.org  /usr/lib/x86_64-linux-gnu/libc.so.6",
        "0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 0xFF ½ ² ①",
        "Ünïcödé ﬁ ﬂ e\u0301 é Å Å ẛ̣ naïve façade Straße İstanbul",
        "日本語のテキスト。中文字符，한국어 텍스트 ไทย العربية עברית हिन्दी Ελληνικά русский",
        "😀👍🏽👩‍👩‍👧‍👦🇩🇪❤️ \U0001f9d1\u200d\U0001f4bb \ufeff\u200b\u200e",
        "\x00\x01\x7f\x80\ufffd\ue000\U0010ffff",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" + "=" * 80 + "\n" * 40 + " " * 90,
        "<|im_start|>user\nx<|im_end|> <s>[INST] y [/INST]</s> <unk><pad>▁▁ ##ing Ġthe Ċ",
    ]
    sample = list(dict.fromkeys([*tokens[:48], *tokens[-16:]]))
    between = [f"{token}{plain[3]}{token} x {token}\n\n{token}{token}  y{token}z" for token in sample]
    return [*plain, *between, "".join(sample), " ".join(sample), "".join(plain)]


def _around(tokenizer: tokenizers.Tokenizer) -> tuple[bytes, bytes]:
    """Return the packed ids that the post-processor puts before and after a text."""
    bare = tokenizer.encode("a b", add_special_tokens=False).ids
    full = tokenizer.encode("a b", add_special_tokens=True).ids
    starts = range(len(full) - len(bare) + 1)
    at = next(start for start in starts if full[start : start + len(bare)] == bare)
    return pack(full[:at]), pack(full[at + len(bare) :])
