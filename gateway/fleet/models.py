"""Which models each worker serves, as its own ``/v1/models`` says."""

from __future__ import annotations

import logging
from typing import Any, Final

import msgspec

from gateway.fleet.polling import Fetcher, FetchFailed, Poller
from gateway.fleet.registry import Registry, Worker

log = logging.getLogger("kvway.fleet")

Card = dict[str, Any]
"""One entry of ``/v1/models``, with every field the worker gave it."""

_INTERVAL_S: Final = 10.0  # adapters are loaded at run time
_RETRY_S: Final = 1.0  # a worker whose models are not known gets no requests
_TIMEOUT_S: Final = 5.0


class _Listing(msgspec.Struct):
    data: list[Card]


class ModelCards:
    """Keeps ``worker.models`` and ``worker.model_cards`` up to date; the configuration decides which names count.

    Args:
        registry: whose workers.
        fetch: asks them.
    """

    def __init__(self, registry: Registry, fetch: Fetcher) -> None:
        self._registry = registry
        self._fetch = fetch
        self._poller = Poller(registry, self._ask, "models", _INTERVAL_S, _RETRY_S)
        self._silent: set[Worker] = set()  # told in the log, once
        registry.on_change(lambda worker, _: self._silent.discard(worker))

    async def start(self) -> None:
        """Begin to ask."""
        await self._poller.start()

    async def close(self) -> None:
        """Stop asking."""
        await self._poller.close()

    def refresh(self, worker: Worker) -> None:
        """Ask a worker at once: it has restarted, or an adapter was loaded."""
        self._poller.nudge(worker)

    async def _ask(self, worker: Worker) -> bool:
        try:
            status, body = await self._fetch(worker, "/v1/models", _TIMEOUT_S)
        except FetchFailed:
            return False
        cards = _cards_in(body) if status == 200 else []
        if not cards:
            if worker not in self._silent:
                self._silent.add(worker)
                log.warning("worker does not list its models", extra={"worker": worker.name, "status": status})
            return False
        self._silent.discard(worker)
        worker.model_cards = cards
        models = base_models(cards)
        if worker.config.models:
            models = {name: models.get(name, name) for name in worker.config.models}
        if models != worker.models:
            worker.models = models
            self._registry.touch()
            log.info("worker serves", extra={"worker": worker.name, "models": list(models)})
        return True


def _cards_in(body: bytes) -> list[Card]:
    try:
        cards = msgspec.json.decode(body, type=_Listing).data
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []
    return [card for card in cards if isinstance(card.get("id"), str)]


def base_models(cards: list[Card]) -> dict[str, str]:
    """Return model name → base model.

    An adapter's base is its ``parent``. Cards without a parent that have the same ``root`` are names of one model; the
    first of them is what the base model is called.
    """
    by_root: dict[Any, str] = {}
    models: dict[str, str] = {}
    for card in cards:
        name, root, parent = card["id"], card.get("root"), card.get("parent")
        if not isinstance(parent, str):
            models[name] = by_root.setdefault(root, name) if isinstance(root, str) else name
    for card in cards:
        name, parent = card["id"], card.get("parent")
        if isinstance(parent, str):
            models[name] = models.get(parent, parent)
    return models


def merged_models(registry: Registry) -> list[Card]:
    """Return every model that requests may name, each once: the first worker's card, whole, or a bare one."""
    merged: dict[str, Card] = {}
    for worker in registry.workers.values():
        for card in worker.model_cards:
            if card["id"] in worker.models:
                merged.setdefault(str(card["id"]), card)
    for name in registry.model_names():
        merged.setdefault(name, {"id": name, "object": "model", "created": 0, "owned_by": "kvway"})
    return list(merged.values())
