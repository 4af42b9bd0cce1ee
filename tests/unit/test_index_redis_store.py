"""The commands that are sent to Redis."""

from __future__ import annotations

import hiredis
import pytest

from gateway.index.redis_store import _mgets


@pytest.mark.parametrize("n_chunks", [1, 15, 16, 17, 32, 500])
def test_commands_name_every_chunk_once_in_order_and_no_more_than_a_server_fetches_ahead(n_chunks: int) -> None:
    chunks = [bytes([13, 10, *number.to_bytes(14, "big")]) for number in range(n_chunks)]
    parser = hiredis.Reader()
    for command in _mgets(b"kvway:1:{tag}", chunks):
        parser.feed(command)
    commands = []
    while (command := parser.gets()) is not False:
        commands.append(command)
    assert {name for name, *_ in commands} == {b"MGET"}
    assert [key for _, *keys in commands for key in keys] == [b"kvway:1:{tag}" + chunk for chunk in chunks]
    *full, last = [len(keys) for _, *keys in commands]
    assert set(full) <= {16} and last <= 16


def test_no_chunk_of_another_length_is_asked_for() -> None:
    with pytest.raises(ValueError, match="not 16 bytes"):
        _mgets(b"kvway:1:{tag}", [b"a" * 16, b"b" * 15])
