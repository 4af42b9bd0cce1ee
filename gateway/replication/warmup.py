"""The request that makes an engine compute a prefix and no more."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.fleet.credentials import credentials
from gateway.fleet.registry import Worker
from gateway.prompt.tokenizer import unpack
from gateway.relay.head import RequestHead, field_lines, new_request_id
from gateway.relay.legs import prefill_only, read_fields, sequences, write_fields
from gateway.replication.seen import SeenPrompt
from policies.chunks import ChunkHasher

_COMPLETIONS = "/v1/completions"


class WarmUp(msgspec.Struct):
    """A request of our own.

    Attributes:
        path: where it goes.
        body: what it says.
        tokens: length of its prompt; an estimate where this is a client's prompt whose tokens are not known.
    """

    path: str
    body: bytes
    tokens: int

    def head_for(self, worker: Worker) -> RequestHead:
        """Return its head, with an id that no request has and the API key of the worker."""
        return RequestHead(
            method=b"POST",
            target=self.path.encode(),
            path=self.path,
            fields=field_lines({"content-type": "application/json", **credentials(worker.config)}),
            content_length=len(self.body),
            request_id=new_request_id(),
        )

    def head_like(self, client: RequestHead) -> RequestHead:
        """Return its head as a client's request has it: what is done for a client is done with its own API key."""
        return msgspec.structs.replace(
            client,
            target=self.path.encode(),
            path=self.path,
            content_length=len(self.body),
            request_id=new_request_id(),
        )


def make_warm_up(seen: SeenPrompt, n_chunks: int, hasher: ChunkHasher, root: bytes) -> WarmUp | None:
    """Return the request that makes a worker hold the first chunks of a prompt.

    It is a completion of these chunks' token ids. Where they are not known it is the client's request, as a whole, but
    for one token and without streaming.

    Args:
        seen: the prompt.
        n_chunks: how much of it.
        hasher: the same as for prompts.
        root: what its chain begins with.

    Returns:
        None where neither would do: token ids do not bring what the engine makes of an image, and of some requests one
        cannot say what they would cost.
    """
    if not seen.prompt.exact:
        if sequences(seen.path, seen.body) != 1:
            return None
        only = write_fields(prefill_only(read_fields(seen.body, keep_params=False)))
        return WarmUp(seen.path, only, seen.prompt.tokens)
    ids = seen.prompt.ids[: n_chunks * hasher.chunk_bytes]
    if hasher.chain(root, ids) != seen.prompt.chunks[:n_chunks]:
        return None
    body: dict[str, Any] = {"model": seen.model, "prompt": unpack(ids), "max_tokens": 1, "stream": False}
    if seen.cache_salt is not None:
        body["cache_salt"] = seen.cache_salt
    return WarmUp(_COMPLETIONS, msgspec.json.encode(body), n_chunks * hasher.chunk_tokens)
