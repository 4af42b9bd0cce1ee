"""Writes ``docs/configuration.md`` from the configuration models (``python -m gateway.config``)."""

from __future__ import annotations

import inspect
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import msgspec
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gateway.config import Config
from gateway.config_source import models_in

_INTRODUCTION: Final = """\
# Configuration

kvway reads one YAML file, `kvway serve --config kvway.yaml` (or the path in `KVWAY_CONFIG`). The whole file is
validated before anything starts. Each mistake is reported as one line that names the file, the key and the nearest
valid name, and the exit code is 2. A tokenizer that is missing or broken, or a chat template that cannot be used,
does not keep the gateway from serving: it warns, and routes that model by approximate chunks of bytes.
`kvway serve --check` validates and exits, and counts these as mistakes too. A small file:

```yaml
server:
  port: 8000
workers:
  - url: http://10.0.0.1:8000
    kv_events: {endpoint: "tcp://10.0.0.1:5557", replay_endpoint: "tcp://10.0.0.1:5558"}
  - url: http://10.0.0.2:8000
    kv_events: {endpoint: "tcp://10.0.0.2:5557", replay_endpoint: "tcp://10.0.0.2:5558"}
models:
  "*": {tokenizer: /models/llama-3.1-8b}
policy:
  name: expected-cost
```

Every key has a default except those marked *required*; a key without a value keeps its default. Names that end in
`_s` are seconds.

**Environment.** `KVWAY_SECTION__KEY` overrides the file: `KVWAY_SERVER__PORT=9000`, `KVWAY_POLICY__NAME=round-robin`.
Values are YAML, so a list is set whole: `KVWAY_WORKERS='[{url: "http://10.0.0.1:8000"}]'`. Variables are read as
lower-case keys: a model whose name has capitals is set in the file. Passwords and the recorder's salt are taken as they
are, digits and signs included.

This page is generated: `python -m gateway.config > docs/configuration.md`.
"""

_BOUNDS: Final = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_SCALARS: Final = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path", Any: "any"}


def reference() -> str:
    """Return the whole page as Markdown."""
    sections = [_section(name, field) for name, field in Config.model_fields.items()]
    return "\n".join([_INTRODUCTION, *sections])


def _section(path: str, field: FieldInfo) -> str:
    model = models_in(field.annotation)[0]
    repeated, keyed = get_origin(field.annotation) is tuple, get_origin(field.annotation) is dict
    heading = f"{path}[]" if repeated else f"{path}.*" if keyed else path
    about = inspect.cleandoc(model.__doc__ or "").replace("``", "`")
    if keyed:
        about += f" Each key is {field.description}."
    fields = sorted(model.model_fields.items(), key=lambda item: not item[1].is_required())  # required ones first
    nested = [_section(f"{heading}.{name}", inner) for name, inner in fields if models_in(inner.annotation)]
    rows = [_row(name, inner) for name, inner in fields]
    level = "#" * (2 + path.count("."))
    table = "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows])
    return "\n".join([f"{level} {heading}\n\n{about}\n\n{table}\n", *nested])


def _row(name: str, field: FieldInfo) -> str:
    description = (field.description or "").replace("|", "\\|")
    return f"| `{name}` | {_type(field)} | {_default(field)} | {description} |"


def _type(field: FieldInfo) -> str:
    text = _type_name(field.annotation)
    bounds = [
        f"{sign} {getattr(rule, word)}"
        for rule in field.metadata
        for word, sign in _BOUNDS.items()
        if getattr(rule, word, None) is not None
    ]
    return " ".join([text, ", ".join(bounds)]).rstrip()


def _type_name(annotation: Any) -> str:
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    arguments = [part for part in get_args(annotation) if part is not NoneType]
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(part) for part in arguments)
    if origin is tuple:
        return "list"
    if models_in(annotation) or origin is dict:
        return "mapping"
    return _type_name(arguments[0])  # Annotated[...]: what matters is what it annotates


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    default = field.default
    if default is None or default is PydanticUndefined or isinstance(default, BaseModel):
        return "see below" if models_in(field.annotation) and default is not None else "none"
    plain = default.value if isinstance(default, Enum) else default
    return f"`{msgspec.json.encode(plain, enc_hook=str).decode()}`"
