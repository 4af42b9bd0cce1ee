"""The Dockerfile, read."""

from __future__ import annotations

from tests.processes import ROOT

Instruction = tuple[str, str]


def instructions() -> list[list[Instruction]]:
    """Return the instructions of each stage, as verb and rest; the first of each is its FROM."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    stages: list[list[Instruction]] = []
    for line in lines:
        verb, _, rest = line.partition(" ")
        if verb == "FROM":
            stages.append([])
        stages[-1].append((verb, " ".join(rest.split())))
    return stages
