"""Fixtures that several unit tests of the prompt room use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from gateway.prompt.pipeline import PromptPipeline
from tests.prompt_rig import config


@pytest.fixture(scope="module")
def pipeline() -> Iterator[PromptPipeline]:
    """A pipeline with the tiny model for every name."""
    made = PromptPipeline(config())
    yield made
    asyncio.run(made.close())
