"""Consistent hashing with bounded loads.

Every worker owns 256 points of a 64-bit circle; a key belongs to the owner of the first point at or after its own.
A worker that joins or leaves therefore moves only the keys that it takes or gives up. With bounded loads (Mirrokni,
Thorup and Zadimoghaddam, 2018) a key walks on past the workers that already have more than their share.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from math import ceil
from typing import Final

import mmh3
import numpy as np
from numpy.typing import NDArray

from policies.base import FleetView, Floats

VIRTUAL_NODES: Final = 256
_FAR: Final = 64  # points to pass on the way to the next of some rows, beyond which their own points are looked at
_RECENT: Final = 16  # sets of candidates: by model, by adapter, without the workers that were tried


class Ring:
    """The circle for one set of workers; rows are positions in ``names``."""

    __slots__ = ("_owners", "_points", "_points_of_rows", "size")

    def __init__(self, names: Sequence[str]) -> None:
        self.size = len(names)
        self._points_of_rows = np.stack([_points_of(name) for name in names])
        points = self._points_of_rows.reshape(-1)
        order = np.argsort(points, kind="stable")
        # arrays rather than lists: 1,000 workers have 256,000 points
        self._points = array("Q", points[order].tobytes())
        self._owners = array("q", (order // VIRTUAL_NODES).tobytes())

    def walk(self, key: bytes, rows: Collection[int] | None = None) -> Iterator[int]:
        """Yield every row, or every one of ``rows``, once, in the order in which ``key`` meets them on the circle."""
        if rows is not None and len(rows) * _FAR < self.size:
            yield from self._by_distance(key, rows)
            return
        owners = self._owners
        wanted = None if rows is None else set(rows)
        left = self.size if wanted is None else len(wanted)
        met: set[int] = set()
        start = self._position(key)
        for position in chain(range(start, len(owners)), range(start)):
            row = owners[position]
            if row not in met and (wanted is None or row in wanted):
                yield row
                met.add(row)
                left -= 1
                if left == 0:
                    return

    def first(self, key: bytes, rows: Collection[int] | None = None) -> int:
        """Return the row, of ``rows`` if given, that ``key`` meets first."""
        if rows is not None:
            return next(self.walk(key, rows))
        return self._owners[self._position(key) % len(self._owners)]

    def bounded(
        self, key: bytes, loads: Floats | list[float], factor: float, rows: Collection[int] | None = None
    ) -> int:
        """Return the first row whose load, this request included, stays within ``⌈factor·(total + 1)/n⌉``.

        Args:
            key: what is hashed.
            loads: requests in flight per row, ``[n]``, without this one.
            factor: how far above the mean a worker may go, at least 1: then some worker always fits.
            rows: choose among these only (at least one); if none of them fits, the least loaded.
        """
        total = sum(loads) if isinstance(loads, list) else float(np.add.reduce(loads))
        bound = ceil(factor * (total + 1) / self.size)
        passed = []
        for row in self.walk(key, rows):
            if loads[row] + 1 <= bound:
                return row
            passed.append(row)
        return min(passed, key=loads.__getitem__)

    def _position(self, key: bytes) -> int:
        return bisect_left(self._points, mmh3.hash64(key, signed=False)[0])

    def _by_distance(self, key: bytes, rows: Collection[int]) -> list[int]:
        """Return a few of many rows in the same order, without passing the points of all others."""
        some = np.array(sorted(set(rows)))
        distances = self._points_of_rows[some] - np.uint64(mmh3.hash64(key, signed=False)[0])  # modulo the circle
        order: list[int] = some[distances.min(1).argsort(kind="stable")].tolist()
        return order


_recent: OrderedDict[int, tuple[Sequence[str], int, Ring]] = OrderedDict()  # id of the names → names, version, ring


def ring_for(fleet: FleetView) -> Ring:
    """Return the ring of the candidates. As long as they are the same ones, their names are not looked at."""
    names, version = fleet.names, fleet.version
    known = _recent.get(id(names))
    if known is not None and known[0] is names and known[1] == version:
        return known[2]
    ring = ring_of(tuple(names))
    _recent[id(names)] = names, version, ring
    if len(_recent) > _RECENT:
        _recent.popitem(last=False)
    return ring


@lru_cache(maxsize=16)
def ring_of(names: tuple[str, ...]) -> Ring:
    """Return the ring of these workers, in this order; built once per set of candidates."""
    return Ring(names)


@lru_cache(maxsize=8192)
def _points_of(name: str) -> NDArray[np.uint64]:
    raw = name.encode("utf-8", "surrogatepass")
    digests = [mmh3.mmh3_x64_128_digest(raw, seed) for seed in range(VIRTUAL_NODES // 2)]  # two points each
    return np.frombuffer(b"".join(digests), np.dtype("<u8"))
