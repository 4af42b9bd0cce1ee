"""How long properties are tried: briefly by ``make test``, thoroughly by ``make test-all``; whom HTTP clients trust."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

# An authority whose key nobody has, and the only one: to read all the usual ones took each of many clients long.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "data" / "nobody.pem")

settings.register_profile("brief", parent=settings.default, max_examples=30, deadline=None)
settings.register_profile("thorough", parent=settings.default, max_examples=150, deadline=None)
settings.load_profile("brief")
