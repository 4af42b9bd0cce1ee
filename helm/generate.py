"""Writes what follows from other files; run it after a change to values.yaml or to the configuration.

- ``values.schema.json``: the part about ``config``, from the gateway's own models, so that a typo in ``kvway.yaml``
  fails the install, and which profiles and scenarios there are. The rest of the schema is written by hand.
- ``README.md``: the table of values, from the comments in ``values.yaml``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from gateway.config import Config
from sim.generators import GENERATORS
from sim.load.scenario import CODE
from sim.profiles import PROFILES

CHART: Final = Path(__file__).parent / "kvway"
_BEGIN: Final = "<!-- values: python helm/generate.py -->\n"
_END: Final = "<!-- end of values -->\n"
_ROOT: Final = "kvway.yaml"


class Value(NamedTuple):
    """One documented value: its path, its default as it is written, and what the comment above it says."""

    path: str
    default: Any
    about: str


def schema() -> str:
    """Return ``values.schema.json`` with the configuration's models, profiles and scenarios as they are now."""
    whole = json.loads((CHART / "values.schema.json").read_text())
    models = Config.model_json_schema(ref_template="#/$defs/{model}")
    by_hand = {name: each for name, each in whole["$defs"].items() if name[0].islower() and name != _ROOT}
    generated = {**models.pop("$defs"), _ROOT: models}
    whole["$defs"] = by_hand | {name: _without_noise(each) for name, each in sorted(generated.items())}
    sections = whole["properties"]
    sections["simulatedWorkers"]["properties"]["profile"] = {"enum": sorted(PROFILES)}
    # A path is a trace that an image of one's own has.
    scenario = rf"^(({'|'.join([*GENERATORS, CODE])})(:.*)?|/.+)$"
    sections["loadTest"]["properties"]["scenario"] = {"type": "string", "pattern": scenario}
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def readme() -> str:
    """Return ``README.md`` with the table of values as it is now."""
    before, _, rest = (CHART / "README.md").read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    rows = (f"| `{each.path}` | `{_shown(each.default)}` | {each.about} |\n" for each in values())
    return before + _BEGIN + "| value | default | |\n| --- | --- | --- |\n" + "".join(rows) + _END + after


def values() -> list[Value]:
    """Return every documented value of ``values.yaml``, in its order.

    Raises:
        ValueError: a value has no comment, neither of its own nor above a mapping that holds it.
    """
    text = (CHART / "values.yaml").read_text()
    root = yaml.compose(text, yaml.SafeLoader)
    return list(_documented(root, text.splitlines(), ""))


def _documented(node: Any, lines: list[str], prefix: str) -> Iterator[Value]:
    for key, value in node.value:
        path = prefix + key.value
        about = _comment_above(key.start_mark.line, lines)
        if about:
            yield Value(path, yaml.SafeLoader("").construct_object(value, deep=True), about)
        elif isinstance(value, yaml.MappingNode) and value.value:
            yield from _documented(value, lines, f"{path}.")
        else:
            raise ValueError(f"{path} has no comment that begins with '# --'")


def _comment_above(line: int, lines: list[str]) -> str:
    above = lines[line - 1].strip() if line else ""
    return above.removeprefix("# -- ") if above.startswith("# -- ") else ""


def _shown(default: Any) -> str:
    return json.dumps(default, separators=(", ", ": ")).replace("|", "\\|")


def _without_noise(node: Any) -> Any:
    """Return a JSON schema without what Helm does not read."""
    if isinstance(node, list):
        return [_without_noise(each) for each in node]
    if not isinstance(node, dict):
        return node
    kept = {key: each for key, each in node.items() if key not in ("title", "description", "default")}
    names = kept.get("properties", {})  # what is called description there is none
    return {key: _without_noise(each) for key, each in kept.items()} | (
        {"properties": {name: _without_noise(each) for name, each in names.items()}} if names else {}
    )


if __name__ == "__main__":
    (CHART / "values.schema.json").write_text(schema())
    (CHART / "README.md").write_text(readme())
