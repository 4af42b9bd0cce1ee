"""kvway's service: bytes in, a KV-aware decision, bytes out.

A request passes the rooms in one direction::

    relay -> prompt -> index -> policy (in ``policies``) -> relay

Beside that path, ``events`` feeds ``index`` with what the engines store and evict, ``fleet`` knows the workers and what
is in flight on them, ``observe`` counts, and ``admin`` lets people look in. ``docs/architecture.md`` tells the story.
"""

__version__ = "0.1.0"
