"""What a Redis server holds: its units in pages, and how much they are."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

from kitelib.abc import StoredItem
from kitelib.stores.redis.fault import Fault
from kitelib.stores.redis.nodes import Command, Node, Reply
from kitelib.stores.redis.wire import pack

__all__ = ["Listing", "Sizes"]

_PREFIX: Final = b"kite:"
_PAGE: Final = 500
_REMEMBERED: Final = 32_768
_EXACT_KEYS: Final = 4096
_SAMPLED_KEYS: Final = 1000
_ESTIMATE_EVERY_S: Final = 10.0

EachNode = Callable[[Sequence[Node], Callable[[Node], list[Command]]], Awaitable[list[list[Reply]]]]


class Listing:
    """Lists the units of a server without making them look used.

    STRLEN counts as a use for OBJECT IDLETIME (before Redis 7.2, where a connection can ask not to be counted). So what
    a unit was like before it was looked at is remembered, up to 32,768 units: one that has been idle ever since has the
    same length and the same last use, and one that has not is looked at again, which then changes nothing.
    """

    def __init__(self) -> None:
        self._seen: dict[bytes, tuple[float, int, float]] = {}  # key: when looked at, length, last use before

    async def pages(self, node: Node, now: Callable[[], float]) -> AsyncIterator[list[StoredItem] | Fault]:
        """The units of one server, in pages; a `Fault` ends it early."""
        cursor = b"0"
        while True:
            step = await _scan(node, cursor, "MATCH", _PREFIX + b"*")
            if isinstance(step, Fault):
                yield step
                return
            cursor, keys = step
            page = await self._page(node, keys, now) if keys else []
            yield page
            if isinstance(page, Fault) or cursor == b"0":
                return

    async def _page(self, node: Node, keys: Sequence[bytes], now: Callable[[], float]) -> list[StoredItem] | Fault:
        idle = await node.call([Command("", (pack("OBJECT", "IDLETIME", key),)) for key in keys])
        looked_at = now()
        used_at = [looked_at - seconds if isinstance(seconds, int) else None for seconds in idle]
        items: dict[bytes, tuple[int, float | None]] = {}
        unknown = []
        for key, seconds, used in zip(keys, idle, used_at, strict=True):
            if seconds is None:
                continue  # gone since
            seen = self._seen.get(key)
            if seen is not None and used is not None and used <= seen[0] + 1:  # IDLETIME counts whole seconds
                items[key] = seen[1], seen[2]
            else:
                unknown.append((key, used))
        lengths = await node.call([Command("", (pack("STRLEN", key),)) for key, _ in unknown]) if unknown else []
        for (key, used), length in zip(unknown, lengths, strict=True):
            if isinstance(length, Fault) and length.code == "DOWN":
                return length
            if isinstance(length, int) and length >= 0:  # a Fault: not a string, or just moved away
                items[key] = length, used
                if used is not None:
                    self._remember(key, looked_at, length, used)
        return [StoredItem(key.decode("utf-8", "replace"), *_fields(items[key])) for key in keys if key in items]

    def _remember(self, key: bytes, looked_at: float, length: int, used: float) -> None:
        self._seen.pop(key, None)
        if len(self._seen) >= _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = looked_at, length, used


class Sizes:
    """Counts the units of all servers and their bytes: exactly while they are few, else estimated now and then."""

    def __init__(self) -> None:
        self._estimate: tuple[int, int] = (0, 0)
        self._estimated_at: float | None = None

    async def measure(self, nodes: Sequence[Node], each_node: EachNode) -> tuple[int, int, int]:
        """Units, their bytes with Redis's overhead, and how many servers failed to answer."""
        replies = await each_node(nodes, lambda _: [Command("", (pack("DBSIZE"),))])
        sizes = [(node, count) for node, (count,) in zip(nodes, replies, strict=True) if isinstance(count, int)]
        failures = len(nodes) - len(sizes)
        exact = sum(count for _, count in sizes) <= _EXACT_KEYS
        if exact:
            self._estimated_at = None
        elif self._estimated_at is not None and time.monotonic() - self._estimated_at < _ESTIMATE_EVERY_S:
            return *self._estimate, failures
        items = num_bytes = 0
        for node, count in sizes:
            seen, ours, held = await self._sample(node, _EXACT_KEYS if exact else _SAMPLED_KEYS)
            scale = 1.0 if exact or not seen else count / seen
            items += round(scale * ours)
            num_bytes += round(scale * held)
        if not exact:
            self._estimate, self._estimated_at = (items, num_bytes), time.monotonic()
        return items, num_bytes, failures

    @staticmethod
    async def _sample(node: Node, most: int) -> tuple[int, int, int]:
        """Keys seen, units among them, and bytes of these; at most so many keys, and a page."""
        cursor, seen = b"0", 0
        ours: dict[bytes, None] = {}
        while True:
            step = await _scan(node, cursor)
            if isinstance(step, Fault):
                break
            cursor, keys = step
            seen += len(keys)
            ours.update(dict.fromkeys(key for key in keys if key.startswith(_PREFIX)))
            if cursor == b"0" or seen > most:
                break
        held = await node.call([Command("", (pack("MEMORY", "USAGE", key),)) for key in ours]) if ours else []
        counts = [each for each in held if isinstance(each, int)]
        return seen, len(counts), sum(counts)


async def _scan(node: Node, cursor: bytes, *options: str | bytes) -> tuple[bytes, list[bytes]] | Fault:
    """The next cursor, b"0" at the end, and some keys."""
    (reply,) = await node.call([Command("", (pack("SCAN", cursor, *options, "COUNT", _PAGE),))])
    if isinstance(reply, Fault):
        return reply
    if isinstance(reply, list) and len(reply) == 2 and isinstance(reply[1], list):
        following, keys = reply
        if isinstance(following, bytes) and all(isinstance(key, bytes) for key in keys):
            return following, keys
    return Fault(f"{node.name} gave an answer to SCAN that can't be read", "DOWN")


def _fields(item: tuple[int, float | None]) -> tuple[int, None, float | None]:
    length, used = item
    return length, None, used
