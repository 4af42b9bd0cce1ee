"""The two requests that one request becomes where prefill and decode are apart, in the form that each engine expects.

``nixl`` (vLLM's NixlConnector): the prefill worker answers with ``kv_transfer_params``, which the decode request brings
on, whole. ``mooncake`` (vLLM's MooncakeConnector): both requests bring one ``transfer_id``. ``lmcache``: the prefill
request says which decode worker the KV is written to. ``sglang``: both bring one ``bootstrap_room``, and are the
client's request otherwise.
"""

from __future__ import annotations

import json
from random import getrandbits
from typing import Any, Final

import msgspec

from gateway.errors import BadRequest
from gateway.fleet.registry import Worker

Fields = dict[str, msgspec.Raw]
"""A request body by top-level field."""

AT_ONCE: Final = frozenset({"mooncake", "sglang"})
"""Protocols whose legs run at the same time."""

APART_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})

MAX_SEQUENCES: Final = 1024
"""Bound on the sequences of one request: each of SGLang's gets a room, some 50 bytes of its body."""

_PARAMS: Final = "kv_transfer_params"
_BOOTSTRAP: Final = "bootstrap_"
_ONE: Final = msgspec.Raw(b"1")
_FALSE: Final = msgspec.Raw(b"false")

_decode = msgspec.json.Decoder(Fields).decode
_encode = msgspec.json.encode

_NOTHING_TO_PULL: Final = _encode(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)


class _Items(msgspec.Struct):
    n: Any = None
    best_of: Any = None
    prompt: Any = None
    echo: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None


_items = msgspec.json.Decoder(_Items).decode


def read_fields(body: bytes, keep_params: bool) -> Fields:
    """Return a body's fields without those that are for gateways to set: they name hosts that a worker connects to.

    Args:
        body: a JSON object, read before.
        keep_params: ``kv_transfer_params`` are of our own making.

    Raises:
        BadRequest: it is nested too deeply; what has read it before may have had a little more room.
    """
    try:
        fields = _raw_fields(body)
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.") from None
    return {
        name: value
        for name, value in fields.items()
        if not name.startswith(_BOOTSTRAP) and (keep_params or name != _PARAMS)
    }


def without_hosts(body: bytes) -> bytes | None:
    """Return the body of a request whose prompt is not read, without such fields; None where it is no JSON object.

    Raises:
        BadRequest: it is nested too deeply.
    """
    try:
        return write_fields(read_fields(body, keep_params=False))
    except (ValueError, AttributeError):
        return None


def _raw_fields(body: bytes) -> Fields:
    try:
        return _decode(body)
    except msgspec.DecodeError:  # some JSON is read only by the parser that engines use
        return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in json.loads(body).items()}


def write_fields(fields: Fields) -> bytes:
    """Return fields as a body."""
    return _encode(fields)


def sequences(path: str, body: bytes) -> int:
    """Return how many sequences a request asks for; 0 where it cannot go over two workers.

    That is where a decode worker would need more of the prompt than its KV cache, or there are too many sequences.
    """
    try:
        items = _items(body)
    except (msgspec.DecodeError, RecursionError):
        return 0
    if items.echo or items.prompt_logprobs is not None or items.use_beam_search or items.best_of not in (None, 1):
        return 0
    several = isinstance(items.prompt, list) and bool(items.prompt) and not isinstance(items.prompt[0], int)
    n = 1 if items.n is None else items.n
    if path not in APART_PATHS or type(n) is not int:
        return 0
    count = max(0, n) * (len(items.prompt) if several else 1)
    return count if count <= MAX_SEQUENCES else 0


def prefill_only(fields: Fields) -> Fields:
    """Return the request that makes vLLM prefill a prompt and no more: one token, not streamed."""
    only = {name: value for name, value in fields.items() if name not in ("stream_options", "min_tokens")}
    only |= {"max_tokens": _ONE, "stream": _FALSE}
    if "max_completion_tokens" in only:
        only["max_completion_tokens"] = _ONE
    return only


def nixl_prefill(fields: Fields, params: bytes = _NOTHING_TO_PULL) -> bytes:
    """Return the prefill request of NIXL; its worker pulls what ``params`` lead to, and computes the rest."""
    return _encode(with_params(prefill_only(fields), params))


def nixl_decode(fields: Fields, params: bytes) -> bytes:
    """Return the decode request of NIXL, with the ``kv_transfer_params`` of the prefill answer as they came."""
    return _encode(with_params(fields, params))


def mooncake_bodies(fields: Fields, transfer_id: str, engine_id: str, bootstrap_url: str) -> tuple[bytes, bytes]:
    """Return the prefill and the decode request of Mooncake.

    Args:
        fields: of the client's request.
        transfer_id: what both call this hand-over.
        engine_id: of the prefill engine, as its bootstrap server says.
        bootstrap_url: of that server.
    """
    prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    decode = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": bootstrap_url,
    }
    first = with_params(prefill_only(fields), _encode(prefill))
    return _encode(first), _encode(with_params(fields, _encode(decode)))


def lmcache_prefill(fields: Fields, transfer_id: str, decode: Worker) -> bytes:
    """Return the prefill request of LMCache; the decode request is the client's, whose prompt is found in the cache.

    Args:
        fields: of the client's request.
        transfer_id: what LMCache calls it in its notices.
        decode: the worker that the KV is written to.
    """
    config = decode.config
    spec = {
        "req_id": transfer_id,
        "receiver_host": decode.host,
        "receiver_init_port": config.lmcache_init_ports,
        "receiver_alloc_port": config.lmcache_alloc_ports,
    }
    params = {"ret_first_tok": True, "disagg_spec": spec}
    return _encode(with_params(prefill_only(fields), _encode(params)))


def sglang_body(fields: Fields, worker: Worker, count: int) -> bytes:
    """Return the request that both workers get of SGLang.

    Args:
        fields: of the client's request.
        worker: the prefill worker, where the two meet.
        count: sequences; each has a room of its own.
    """
    host, port = worker.host, worker.config.bootstrap_port
    rooms = [getrandbits(63) for _ in range(count)]
    meeting: dict[str, Any]
    if count == 1:
        meeting = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": rooms[0]}
    else:
        meeting = {"bootstrap_host": [host] * count, "bootstrap_port": [port] * count, "bootstrap_room": rooms}
    if worker.config.data_parallel_rank is not None:  # it need not be the one that follows from the room
        meeting["disagg_prefill_dp_rank"] = worker.config.data_parallel_rank
    return _encode(fields | meeting)


def with_params(fields: Fields, params: bytes) -> Fields:
    """Return fields with ``kv_transfer_params``, a JSON object that is not empty, beside those of our own in them."""
    ours = fields.get(_PARAMS)
    if ours is not None:
        params = bytes(ours)[:-1] + b"," + params[1:]
    return fields | {_PARAMS: msgspec.Raw(params)}


class PrefillAnswer(msgspec.Struct):
    """What a prefill worker's answer says.

    Attributes:
        params: its ``kv_transfer_params``, ``null`` where it has none.
        cached_tokens: prompt tokens that it had cached, None where it does not say.
    """

    params: bytes
    cached_tokens: int | None

    @property
    def hands_over(self) -> bool:
        """Whether there are parameters that lead a decode worker to the KV."""
        return self.params.startswith(b"{") and len(self.params) > 2

    @property
    def tells_cached_tokens(self) -> bool:
        """Whether the parameters tell the decode worker what to report as cached, as vLLM does since 0.32."""
        return b'"remote_prefill_cached_tokens"' in self.params


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_answer = msgspec.json.Decoder(_Answer).decode


def read_params(body: bytes) -> bytes:
    """Return the ``kv_transfer_params`` of a prefill worker's answer as they came; ``null`` where there are none."""
    try:
        return bytes(_answer(body).kv_transfer_params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # SGLang's answers may be streams
        return b"null"
