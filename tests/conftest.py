"""How long properties are tried: briefly by ``make test``, thoroughly by ``make test-all``."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("brief", parent=settings.default, max_examples=30, deadline=None)
settings.register_profile("thorough", parent=settings.default, max_examples=150, deadline=None)
settings.load_profile("brief")
