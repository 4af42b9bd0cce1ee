"""From words to what is simulated: traffic by path or name, a fleet by YAML file and flags, policies by name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
import yaml

from policies.base import Tier, create_policy
from sim.fleet import FleetSettings, host_tier
from sim.generators import GENERATORS, generator
from sim.profiles import PROFILES
from sim.requests import Trace
from sim.scaling import scale_load, scale_working_set, subset
from sim.shapes import find_shape, kv_capacity_tokens
from sim.trace import read_trace
from sim.users import play


@dataclass(frozen=True, slots=True)
class Traffic:
    """Which requests, and how they are scaled.

    Attributes:
        source: path of a trace, or ``name:key=value,…`` of a generator.
        load: times as many requests per second.
        working_set: times as large a working set at the same rate.
        share: part of the conversations, 0..1.
        first: so many requests, 0 for all.
        closed_loop: None as the trace says.
        spread_s: see ``read_trace``.
        users: so many users play the sessions, one after another (``sim.users``); 0: the sessions as they are.
    """

    source: str
    load: float = 1.0
    working_set: float = 1.0
    share: float = 1.0
    first: int = 0
    closed_loop: bool | None = None
    spread_s: float = 3600.0
    users: int = 0

    def trace(self, seed: int) -> Trace:
        """Read or make the requests.

        Raises:
            ValueError: there is no such traffic, or it cannot be scaled so.
        """
        if self._is_file():
            trace = read_trace(Path(self.source), closed_loop=self.closed_loop, spread_s=self.spread_s, seed=seed)
        else:
            trace = generator(self.source).trace(seed)
            if self.closed_loop and not trace.closed_loop:
                raise ValueError(f"{trace.name}: the traffic has no sessions; it runs in an open loop only")
            trace.closed_loop = trace.closed_loop and self.closed_loop is not False
        if self.share != 1 or self.first:
            trace = subset(trace, self.share, self.first, seed)
        if self.working_set != 1:
            trace = scale_working_set(trace, self.working_set, seed)
        if self.users:
            if self.closed_loop is False:
                raise ValueError("users wait for their answers: they play in a closed loop only")
            trace = play(trace, self.users, seed)
        return scale_load(trace, self.load) if self.load != 1 else trace

    def _is_file(self) -> bool:
        """Whether the source is meant as a path: a word that is no file is a misspelt generator."""
        name = self.source.partition(":")[0]
        return name not in GENERATORS and ("/" in name or "." in name or os.path.exists(self.source))  # noqa: PTH110 - no error where too long


def read_fleet(path: Path | None, **flags: Any) -> FleetSettings:
    """Return the fleet of a YAML file, with flags that were given in place of its values.

    Args:
        path: mapping with the fields of ``FleetSettings``; tiers name theirs ``host``, ``disk`` or ``remote``.
        flags: fields of ``FleetSettings``, None where not given; ``host_tokens`` is the size of the tier ``host``.
            With a profile and no capacity, HBM holds what fits beside the weights.

    Raises:
        ValueError: the file cannot be read, a key is not known, or a value is out of range.
    """
    raw, node = _read_yaml(path) if path is not None else ({}, None)
    host_tokens = flags.pop("host_tokens", None)
    given = {name: value for name, value in flags.items() if value is not None}
    wanted = _with_tier_numbers(raw) | given
    if isinstance(profile := wanted.get("profile"), str) and profile in PROFILES:
        shape = find_shape(profile.split("/")[0])
        wanted = {"capacity_tokens": kv_capacity_tokens(profile), "layers": shape.layers} | wanted
    try:
        _reject_unknown(raw, msgspec.inspect.type_info(FleetSettings), "$")
        fleet = msgspec.convert(wanted, FleetSettings, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}:{_line_of(str(error), node)}: {error}" if path is not None else str(error)) from None
    if host_tokens:
        host = host_tier(fleet.speed, host_tokens)
        fleet = replace(fleet, tiers=(host, *(tier for tier in fleet.tiers if tier.name != host.name)))
    return fleet


class _OnceLoader(yaml.SafeLoader):
    """Refuses a key written twice; YAML itself would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", key.start_mark)
            if key.value in keys and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> tuple[dict[str, Any], yaml.Node | None]:
    """Return a mapping, and its parts with their lines."""
    try:
        text = path.read_bytes()
        raw, node = yaml.load(text, _OnceLoader), yaml.compose(text, _OnceLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ValueError(f"{path}:{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not YAML ({error})") from None
    if raw is None:
        return {}, None
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise ValueError(f"{path}:1: a fleet is a mapping, for instance `workers: 8`")
    return raw, node


def _line_of(mistake: str, node: yaml.Node | None) -> int:
    """Return the line of what a message is about, as far down its path, ``$.tiers[0].tier``, as the file goes."""
    line = 1
    _, _, path = mistake.rpartition(" - at `$")
    for part in re.findall(r"[^.\[\]`]+", path):
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == part]
        elif isinstance(node, yaml.SequenceNode) and part.isdigit():
            found = [(value, value) for value in node.value[int(part) :][:1]]
        else:
            break
        if not found:
            break
        key, node = found[-1]
        line = key.start_mark.line + 1
    return line


def _reject_unknown(raw: Any, kind: msgspec.inspect.Type, where: str) -> None:
    """Refuse keys that no field has: a fleet with a misspelt key would be another one than was meant."""
    if isinstance(kind, msgspec.inspect.UnionType):
        for each in kind.types:
            _reject_unknown(raw, each, where)
    elif isinstance(kind, msgspec.inspect.VarTupleType) and isinstance(raw, list):
        for number, entry in enumerate(raw):
            _reject_unknown(entry, kind.item_type, f"{where}[{number}]")
    elif isinstance(kind, msgspec.inspect.DataclassType) and isinstance(raw, dict):
        known = {field.name: field.type for field in kind.fields}
        for key, value in raw.items():
            if key not in known:
                near = get_close_matches(str(key), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise msgspec.ValidationError(
                    f"unknown key {key!r}{hint} Keys: {', '.join(known)} - at `{where}.{key}`"
                )
            _reject_unknown(value, known[key], f"{where}.{key}")


def _with_tier_numbers(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping with the tiers' names as their numbers."""
    tiers = raw.get("tiers")
    if not isinstance(tiers, list):
        return raw
    numbers = {tier.name.lower(): tier.value for tier in Tier}
    return raw | {
        "tiers": [
            entry | {"tier": numbers.get(str(entry.get("tier")).lower(), entry.get("tier"))}
            if isinstance(entry, dict)
            else entry
            for entry in tiers
        ]
    }


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy by name, with parameters; ``label`` is what the user wrote."""

    label: str
    name: str
    params: Mapping[str, Any]


def read_policy(words: str) -> PolicyChoice:
    """Return the policy that ``name`` or ``name:key=value:key=value`` means.

    Raises:
        ValueError: it is not known, or does not accept a parameter.
    """
    name, *pairs = words.split(":")
    params = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator:
            raise ValueError(f"policy {words!r}: {pair!r} is not key=value")
        try:
            params[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"policy {words!r}: {value!r} is no value for {key}") from None
    create_policy(name, params)
    return PolicyChoice(words, name, params)
