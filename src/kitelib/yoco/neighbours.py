"""The nearest of what was seen before, by the angle between vectors."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kitelib.errors import ConfigError, InvalidRequestError

__all__ = ["Neighbours"]

T = TypeVar("T")

Vector = npt.NDArray[np.float32]
Rows = npt.NDArray[np.intp]

_ENTRY_BYTES: Final = (
    370  # an entry beside its vector, key and item: places in the dictionary, the lists and the arrays
)
_ROOT_BYTES: Final = 1100  # the dictionaries of a root
_FIRST_ROWS: Final = 16
_CHUNK_ROWS: Final = 1024  # rows multiplied in one go: 2 MB, some 0.3 ms


class _Entry(Generic[T]):
    __slots__ = ("group", "item", "key", "num_bytes", "root")

    def __init__(self, root: bytes, group: bytes, key: bytes, item: T, num_bytes: int) -> None:
        self.root = root
        self.group = group
        self.key = key
        self.item = item
        self.num_bytes = num_bytes


class _Root:
    """What belongs to one root: rows by key, the oldest first, and the number and the size of each of its groups."""

    __slots__ = ("numbers", "rows", "sizes")

    def __init__(self) -> None:
        self.rows: OrderedDict[bytes, int] = OrderedDict()
        self.numbers: dict[bytes, int] = {}
        self.sizes: dict[bytes, int] = {}


class Neighbours(Generic[T]):
    """An index of vectors, bounded in bytes; nothing of one root is ever found under another.

    Exact search: every vector of the group is multiplied with the one looked for. A million multiplications take
    0.2 ms, 20,000 vectors of 512 dimensions 6 to 8 ms on one thread, and that is as many as 64 MiB hold; a graph index
    would take more memory for each vector, find fewer of them, and can neither drop the oldest nor keep roots apart.

    All vectors lie in one matrix that grows by doubling. When the bytes are used up, the root that has most entries
    gives up its oldest, so that a tenant who asks much can't push out the others. Adding a key again makes it young.

    Thread-safe. The lock is held for microseconds (while the matrix grows, for as long as copying it takes), the
    products are made outside; `add`, `nearest`, and `forget` and `clear` of a full index take milliseconds all the same,
    so that an event loop calls them through a `ThreadDoor`.

    Args:
        max_bytes: bound of everything that the index holds; while it grows, the old matrix is there too. 0 keeps nothing.
        dimensions: length of a vector.
        size_of: bytes of an item.
    """

    def __init__(self, max_bytes: int, dimensions: int = 512, *, size_of: Callable[[T], int] = sys.getsizeof) -> None:
        if max_bytes < 0 or dimensions < 1:
            raise ConfigError(f"max_bytes is {max_bytes} and dimensions {dimensions}; give at least 0 and 1")
        self.max_bytes = max_bytes
        self.dimensions = dimensions
        self._size_of = size_of
        self._lock = threading.Lock()
        self._next_number = 0
        self._reset()

    def _reset(self) -> None:
        self._vectors: Vector = np.empty((0, self.dimensions), dtype=np.float32)
        self._owners = np.empty(0, dtype=np.int64)  # per row the number of its group, -1 where it is free
        self._entries: list[_Entry[T] | None] = []  # per row
        self._free: list[int] = []
        self._roots: dict[bytes, _Root] = {}
        self._entry_bytes = 0

    def __len__(self) -> int:
        """Entries of all roots."""
        return len(self._entries) - len(self._free)

    @property
    def num_bytes(self) -> int:
        """Bytes held: the matrix as it was allocated, and the entries."""
        return self._vectors.nbytes + self._owners.nbytes + self._entry_bytes + _ROOT_BYTES * len(self._roots)

    def add(self, root: bytes, key: bytes, vector: Vector, item: T, *, group: bytes = b"") -> bool:
        """Keeps an item, in the place of what `root` has under `key`.

        Args:
            root: fingerprint of the model and the tenant.
            key: identity of the item within the root.
            vector: shape (dimensions,), of any length above 0.
            item: what `nearest` gives back.
            group: only asked for together: a part of the root that is searched apart.

        Returns:
            Whether it is kept: not if the vector holds no direction (zeros, NaN), nor if it does not fit alone.

        Raises:
            InvalidRequestError: the vector has another shape; what was there stays.
        """
        unit = self._unit(vector)
        with self._lock:
            self._drop(root, key)
            if unit is None:
                return False
            num_bytes = _ENTRY_BYTES + sys.getsizeof(key) + self._size_of(item)
            row = self._row_for(root, num_bytes)
            if row is None:
                return False
            kept = self._roots.setdefault(root, _Root())
            if group not in kept.numbers:
                kept.numbers[group] = self._next_number
                self._next_number += 1
            kept.sizes[group] = kept.sizes.get(group, 0) + 1
            kept.rows[key] = row
            self._vectors[row] = unit
            self._owners[row] = kept.numbers[group]
            self._entries[row] = _Entry(root, group, key, item, num_bytes)
            self._entry_bytes += num_bytes
        return True

    def nearest(self, root: bytes, vector: Vector, count: int, *, group: bytes = b"") -> list[tuple[T, float]]:
        """The `count` items of a root (and group) that are most alike, with their cosine similarity, the nearest first.

        Raises:
            InvalidRequestError: the vector has another shape.
        """
        unit = self._unit(vector)
        with self._lock:
            kept = self._roots.get(root)
            number = -1 if kept is None else kept.numbers.get(group, -1)
            if unit is None or number < 0 or count < 1:
                return []
            vectors, rows = self._vectors, np.flatnonzero(self._owners == number)
        likeness = _products(vectors, rows, unit)
        best = rows[_largest(likeness, count)]
        with self._lock:
            # Rows may have been given to others meanwhile: what is there now counts, with its own similarity.
            best = best[best < len(self._owners)]
            best = best[self._owners[best] == number]
            now = np.einsum("ij,j->i", self._vectors[best], unit)
            order = np.argsort(-now, kind="stable")
            found = [(self._entries[best[place]], float(now[place])) for place in order]
        return [(entry.item, value) for entry, value in found if entry is not None]

    def forget(self, root: bytes) -> int:
        """Drops all of a root; returns how many items that were."""
        with self._lock:
            kept = self._roots.get(root)
            keys = [] if kept is None else list(kept.rows)
            for key in keys:
                self._drop(root, key)
        return len(keys)

    def clear(self) -> None:
        """Drops everything and frees the memory."""
        with self._lock:
            self._reset()

    def _unit(self, vector: Vector) -> Vector | None:
        array = np.asarray(vector, dtype=np.float32)
        if array.shape != (self.dimensions,):
            raise InvalidRequestError(f"the vector has the shape {array.shape}; this index keeps ({self.dimensions},)")
        length = float(np.sqrt(np.einsum("i,i->", array, array, dtype=np.float64)))
        return array / np.float32(length) if 0.0 < length < np.inf else None

    def _drop(self, root: bytes, key: bytes) -> None:
        kept = self._roots.get(root)
        row = None if kept is None else kept.rows.pop(key, None)
        if kept is None or row is None:
            return
        entry = self._entries[row]
        assert entry is not None
        self._entries[row] = None
        self._owners[row] = -1
        self._free.append(row)
        self._entry_bytes -= entry.num_bytes
        kept.sizes[entry.group] -= 1
        if not kept.sizes[entry.group]:
            del kept.sizes[entry.group], kept.numbers[entry.group]
        if not kept.rows:
            del self._roots[root]

    def _row_for(self, root: bytes, num_bytes: int) -> int | None:
        """A free row; the oldest of the largest root go until there is one and the entry fits."""
        if self._vectors.nbytes + self._owners.nbytes + num_bytes + _ROOT_BYTES > self.max_bytes:
            return None  # it would not fit if all others were gone
        while True:
            total = num_bytes + self.num_bytes + (0 if root in self._roots else _ROOT_BYTES)
            if total <= self.max_bytes and (self._free or self._grow(num_bytes)):
                return self._free.pop()
            if not self._roots:
                return None
            largest = max(self._roots, key=lambda each: len(self._roots[each].rows))
            self._drop(largest, next(iter(self._roots[largest].rows)))

    def _grow(self, num_bytes: int) -> bool:
        """Doubles the matrix, as far as the entries still fit beside it if they are as large as those so far."""
        rows = len(self._entries)
        row_bytes = self._vectors.dtype.itemsize * self.dimensions + self._owners.itemsize
        mean = (self._entry_bytes + num_bytes + _ROOT_BYTES * (len(self._roots) + 1)) // (len(self) + 1)
        target = min(max(_FIRST_ROWS, 2 * rows), self.max_bytes // (row_bytes + mean))
        if target <= rows:
            return False
        vectors = np.empty((target, self.dimensions), dtype=np.float32)
        vectors[:rows] = self._vectors
        owners = np.full(target, -1, dtype=np.int64)
        owners[:rows] = self._owners
        self._vectors, self._owners = vectors, owners
        self._entries.extend([None] * (target - rows))
        self._free.extend(range(target - 1, rows - 1, -1))
        return True


def _products(vectors: Vector, rows: Rows, unit: Vector) -> Vector:
    """Products of some rows with a vector, shape (len(rows),).

    einsum, not matmul: it stays on the calling thread, where BLAS wakes threads on all cores, which then spin beside
    those that run the model.
    """
    products = np.empty(len(rows), dtype=np.float32)
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[start : start + _CHUNK_ROWS]
        whole = int(chunk[-1]) - int(chunk[0]) == len(chunk) - 1  # neighbours in memory need no copy
        part = vectors[chunk[0] : chunk[-1] + 1] if whole else vectors[chunk]
        products[start : start + len(chunk)] = np.einsum("ij,j->i", part, unit)
    return products


def _largest(values: Vector, count: int) -> Rows:
    """Places of the `count` largest values, in no order."""
    if len(values) <= count:
        return np.arange(len(values))
    return np.argpartition(-values, count - 1)[:count]
