"""Where the prompts of each model come from, and whether they are the engine's, as metrics."""

from __future__ import annotations

from gateway.observe.exposition import Values
from gateway.observe.observer import Observer
from gateway.prompt.selfcheck import SelfCheck


def export_prompts(observer: Observer, checks: SelfCheck) -> None:
    """Expose what came of holding prompts against the engines'."""

    def left_to_engine() -> Values:
        return {model: float(model in checks.differing) for model, _ in checks.results}

    observer.counter(
        "kvway_prompt_checks_total",
        "Prompts that an engine rendered, too, by how its tokens compare; unanswered: it did not tell.",
        lambda: checks.results,
        ("model", "result"),
    )
    observer.gauge(
        "kvway_prompt_engine_side",
        "1 for a model of which a check was different, so that the engine renders its prompts.",
        left_to_engine,
        ("model",),
    )
