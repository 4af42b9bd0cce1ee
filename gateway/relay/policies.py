"""Which policy decides about which requests: the model's own, else the path's, else the one for all.

Each can be replaced while requests run. A policy is asked once per attempt and is not waited for, so whoever comes
after a replacement is decided about by the new one, and nobody else notices.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import Field, model_validator

from gateway.config import Config, PolicyConfig, RoutePath
from policies.base import Policy, create_policy


class PolicyChange(PolicyConfig):
    """Another policy for a model, for a path, or, with neither, for all that have none of their own."""

    name: str = Field(description="policy; see docs/policies.md")
    model: str | None = Field(None, description="a model, an adapter, or `*` for all models without one of their own")
    path: RoutePath | None = Field(None, description="instead of model: requests to this path")

    @model_validator(mode="after")
    def _one_of_them(self) -> PolicyChange:
        if self.model is not None and self.path is not None:
            raise ValueError("model and path exclude each other; give one")
        return self


def policies_in(config: Config) -> dict[tuple[str | None, str | None], PolicyConfig]:
    """Return the policies of a configuration by the model or the path that they are for; the default has neither."""
    found: dict[tuple[str | None, str | None], PolicyConfig] = {(None, None): config.policy}
    for name, model in config.models.items():
        if model.policy is not None:
            found[name, None] = model.policy
    for path, route in config.routes.items():
        if route.policy is not None:
            found[None, path] = route.policy
    return found


class Policies:
    """The policies in force, built from the configuration.

    Attributes:
        default: decides about the requests that no other policy is for.
    """

    __slots__ = ("_described", "_of_models", "_of_paths", "default")

    def __init__(self, config: Config) -> None:
        self._of_models: dict[str, Policy] = {}
        self._of_paths: dict[str, Policy] = {}
        self._described: dict[str, Any] = {"default": {}, "models": {}, "routes": {}}
        for (model, path), settings in policies_in(config).items():
            self.put(settings, model=model, path=path)

    def of(self, name: str, base: str, path: str) -> Policy:
        """Return the policy for a request.

        Args:
            name: the model as the request names it.
            base: its base model, the same unless it is an adapter.
            path: where the request was sent.
        """
        if self._of_models:
            for model in (name, base, "*"):
                if model in self._of_models:
                    return self._of_models[model]
        return self._of_paths.get(path, self.default)

    def put(self, settings: PolicyConfig, *, model: str | None = None, path: str | None = None) -> None:
        """Let a new policy decide from now on, for a model, for a path, or by default. It has learned nothing yet."""
        policy = create_policy(settings.name, settings.params)
        params = msgspec.to_builtins(msgspec.convert(settings.params, policy.Params))
        described = {"name": settings.name, "params": params}
        if model is not None:
            self._of_models[model], self._described["models"][model] = policy, described
        elif path is not None:
            self._of_paths[path], self._described["routes"][path] = policy, described
        else:
            self.default, self._described["default"] = policy, described

    def follow(self, old: Config, new: Config) -> None:
        """Put the policies of ``new`` that are not those of ``old``; the others stay, with what they have learned."""
        was, now = policies_in(old), policies_in(new)
        for (model, path), settings in now.items():
            if settings != was.get((model, path)):
                self.put(settings, model=model, path=path)
        for model, path in was.keys() - now.keys():
            if model is not None:
                del self._of_models[model], self._described["models"][model]
            elif path is not None:
                del self._of_paths[path], self._described["routes"][path]

    def describe(self) -> dict[str, Any]:
        """Return ``default``, ``models`` by name and ``routes`` by path, each with ``name`` and all its ``params``."""
        return self._described
