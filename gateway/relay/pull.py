"""Telling an engine from which worker to fetch a prefix, where it has to be told.

vLLM's offloading connector with a secondary tier of type ``p2p`` asks the peer that ``kv_transfer_params`` names in
``remote_kv_source``, and computes what that peer has not. LMCache and the Mooncake store find out by themselves.
"""

from __future__ import annotations

from random import getrandbits

import msgspec

from gateway.fleet.registry import Worker
from gateway.relay.legs import read_fields, sequences, with_params, write_fields


class SourceHint(msgspec.Struct):
    """What a worker is told that fetches from a source it is given.

    Attributes:
        source: where to fetch from; None: from nobody.
        own_params: ``kv_transfer_params`` in the body are of our own making, not the client's.
    """

    source: Worker | None
    own_params: bool

    def body(self, path: str, body: bytes) -> bytes:
        """Return a request body that names the source, and no other host that the engine would connect to.

        Args:
            path: of the request.
            body: a JSON object, read before.
        """
        one = sequences(path, body) == 1  # several sequences cannot share a fetch; other APIs have no such field
        fields = read_fields(body, keep_params=self.own_params)
        if self.source is not None and one:
            config = self.source.config
            source = {
                "kv_request_id": f"{getrandbits(128):032x}",
                "remote_host": self.source.host,
                "remote_port": config.pull.port + (config.data_parallel_rank or 0),
            }
            fields = with_params(fields, msgspec.json.encode({"remote_kv_source": source}))
        return write_fields(fields)
