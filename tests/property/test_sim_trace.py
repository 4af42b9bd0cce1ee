"""Whatever a file holds, reading it gives a trace that can be simulated, or an error that names the file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sim.trace import TraceError, read_trace
from tests.unit.test_sim_trace import HEAD, LINE, MOONCAKE, SESSION

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=4)
)


def check(content: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(content)
        file.flush()
        try:
            trace = read_trace(Path(file.name), block_tokens=64)
        except TraceError as error:
            assert str(error).startswith(file.name)
        else:
            trace.check()


@given(st.binary(max_size=200))
def test_any_bytes(content: bytes) -> None:
    check(content)
    check(json.dumps(MOONCAKE).encode() + b"\n" + content)
    check(b"\x1f\x8b" + content)


@given(st.sampled_from([MOONCAKE, SESSION, LINE, HEAD]), st.data())
def test_a_field_that_is_something_else(line: dict[str, Any], data: st.DataObject) -> None:
    changed = json.loads(json.dumps(line))
    place = changed
    if changed.get("requests") and data.draw(st.booleans()):
        place = data.draw(st.sampled_from(changed["requests"]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(ODD)
    first = [HEAD] if "duration" in line else [line]
    check("\n".join(json.dumps(each) for each in [*first, changed]).encode())
