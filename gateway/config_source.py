"""Where configuration values come from, and what is said when one of them is wrong.

Knows YAML, environment variables and pydantic's errors, but no section by name: the root model is an argument.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from gateway.errors import ConfigError

PREFIX: Final = "KVWAY_"

Origins = dict[tuple[str, ...], str]
"""Key path → the environment variable, or command-line option, that set it."""


class _Loader(yaml.SafeLoader):
    """Refuses a key written twice, of which YAML itself would silently keep the last one, and says where a value that
    looks like a date or a number is none.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", key.start_mark)
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        ConfigError: the file cannot be read, is not YAML (the message names line and column), or is not a mapping.
    """
    try:
        raw = yaml.load(path.read_text("utf-8"), _Loader)  # noqa: S506 - a SafeLoader that refuses more
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid YAML: {_yaml_problem(error)}") from None
    if not isinstance(raw, dict | None):
        raise ConfigError(f"{path}: must be a mapping of sections such as 'server:' and 'workers:'")
    return raw or {}


def overlay_environment(
    raw: dict[str, Any], environ: Mapping[str, str], root: type[BaseModel], mistakes: list[str]
) -> Origins:
    """Write ``KVWAY_SECTION__KEY=value`` into ``raw``; values are YAML, so numbers, booleans and lists work.

    Secrets are taken as they are: a password may consist of digits, or of what is a sign in YAML.

    Variables without ``__`` that name no section (``KVWAY_CONFIG``) belong to tools and are left alone.

    Args:
        raw: what the file said; changed in place.
        environ: environment variables.
        root: model whose fields are the sections.
        mistakes: a line is appended for every variable that cannot be used.

    Returns:
        Which variable set which key.
    """
    origins: Origins = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX):
            continue
        *parents, key = path = variable.removeprefix(PREFIX).lower().split("__")
        if path[0] not in root.model_fields:
            if parents:
                mistakes.append(
                    f"{variable}: unknown section {path[0]!r}; {_suggest(path[0], list(root.model_fields))}"
                )
            continue
        try:
            value = text if _is_secret(path, root) else yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader that refuses more
            _section(raw, parents)[key] = value
        except (yaml.YAMLError, RecursionError) as error:
            mistakes.append(f"{variable}: is not a valid value: {_yaml_problem(error)}")
        except TypeError as error:
            mistakes.append(f"{variable}: {error}")
        else:
            origins[tuple(path)] = variable
    return origins


def describe_mistakes(error: ValidationError, root: type[BaseModel], source: str, origins: Origins) -> list[str]:
    """Return one line per mistake: where it was made (file or variable), which key, and what would be right."""
    lines = []
    for item in error.errors(include_url=False):
        loc = tuple(part for part in item["loc"] if part != "[key]")
        where = _dotted(loc)
        if item["type"] == "extra_forbidden":
            message = f"unknown key {where!r}; {_right_key(loc, root)}"
        else:
            given = "what is given" if loc and _is_secret(loc, root) else _described(item["input"])
            message = _plain(item["type"], item["msg"], given)
            if loc:
                message = f"{where}: {message}"
        lines.append(f"{_origin(loc, origins) or source}: {message}")
    return lines


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the pydantic models that an annotation such as ``tuple[X, ...]`` or ``X | None`` is about."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in models_in(part)]


def _section(raw: dict[str, Any], parents: list[str]) -> dict[str, Any]:
    section = raw
    for depth, parent in enumerate(parents, 1):
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            whole = PREFIX + "__".join(parents[:depth]).upper()
            raise TypeError(
                f"{'.'.join(parents[:depth])!r} has no keys of its own; set it whole, as YAML, with {whole}"
            )
    return section


def _plain(kind: str, message: str, given: str) -> str:
    """Say a pydantic message in the words of someone who writes YAML."""
    if kind == "missing":
        return "is required"
    if kind == "json_invalid":
        return message
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        message = "must be a mapping of keys"
    elif kind == "tuple_type":
        message = "must be a list"
    elif kind == "path_type":
        message = "must be a path"
    return f"{message.replace('Input should', 'must').replace('String should', 'must')}, not {given}"


def _described(value: object) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return _shortened(without_password(repr(value)))


def without_password(text: str) -> str:
    """Return a text with the passwords of URLs in it masked."""
    return re.sub(r"(://[^:@/]*):.*@", r"\1:***@", text)


def _right_key(loc: tuple[int | str, ...], root: type[BaseModel]) -> str:
    """Suggest the nearest key of the same section, else the section that does have this key, else all keys."""
    key = str(loc[-1])
    valid = list(_model_at(loc[:-1], root).model_fields)
    elsewhere = [path for path in _all_keys(root) if path.rpartition(".")[2] == key]
    if elsewhere and not get_close_matches(key, valid, n=1, cutoff=0.8):
        return f"did you mean {elsewhere[0]!r}?"
    return _suggest(key, valid)


def _suggest(key: str, valid: list[str]) -> str:
    near = get_close_matches(key, valid, n=1)
    return f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}"


def _model_at(loc: tuple[int | str, ...], root: type[BaseModel]) -> type[BaseModel]:
    """Return the model of the section at ``loc``; list positions and keys of mappings lead nowhere new."""
    model = root
    for part in loc:
        field = model.model_fields.get(str(part))
        if field is not None and (nested := models_in(field.annotation)):
            model = nested[0]
    return model


def _is_secret(loc: Sequence[int | str], root: type[BaseModel]) -> bool:
    """Whether ``loc`` is a key whose value is not to be shown."""
    field = _model_at(tuple(loc[:-1]), root).model_fields.get(str(loc[-1]))
    return field is not None and not field.repr


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for nested in models_in(field.annotation):
            yield from _all_keys(nested, f"{prefix}{name}.")


def _origin(loc: tuple[int | str, ...], origins: Origins) -> str | None:
    """Return the variable that set the key at ``loc``, something around it or something inside it."""
    where = tuple(str(part) for part in loc)
    for path, variable in origins.items():
        shared = min(len(path), len(where))
        if shared and path[:shared] == where[:shared]:
            return variable
    return None


def _dotted(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _yaml_problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split())


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
