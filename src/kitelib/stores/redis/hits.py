"""Counts of hits in Redis: a sorted set per model and day, and beside it a hash of what the roots stand for.

Both keys and the set of models (``kite-hits...``) are outside ``kite:``, so nothing that lists, counts or deletes units
sees them. All expire, so a ``volatile-...`` policy may evict them before their time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from kitelib.stores.hits import (
    HIT_DAYS,
    MODEL_FIELD,
    check_hits,
    check_model,
    is_described,
    is_member,
    is_model,
    most_hit,
)
from kitelib.stores.redis.nodes import Command, Reply
from kitelib.stores.redis.wire import pack

__all__ = ["RedisLedger"]

_MODELS_KEY: Final = "kite-hits-models"
_TTL_S: Final = HIT_DAYS * 86400
_MOST_MEMBERS: Final = 50_000  # per model and day, and a quarter more until they are cut: about 15 MB
_MOST_ROOTS: Final = 1024
_MOST_MODELS: Final = 256
_AT_ONCE: Final = 256  # members of one script, which holds the server up for as long
_PAGE: Final = 1000
# One script per part, so that a part is counted as a whole or not at all.
_ADD: Final = """
local most, most_roots, num_hits = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
for at = 5, 4 + 2 * num_hits, 2 do
  redis.call('ZINCRBY', KEYS[1], ARGV[at + 1], ARGV[at])
end
if redis.call('ZCARD', KEYS[1]) > most + most / 4 then
  redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -most - 1)
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
for at = 5 + 2 * num_hits, #ARGV, 2 do
  if redis.call('HLEN', KEYS[2]) < most_roots or redis.call('HEXISTS', KEYS[2], ARGV[at]) == 1 then
    redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1])
  end
end
redis.call('EXPIRE', KEYS[2], ARGV[1])
return num_hits
"""


class RedisLedger:
    """A `HitLedger` in Redis.

    Args:
        ask: sends commands to the servers of their keys and gives the replies, a `Fault` for each that failed; raises
            StoreError if all did. The second argument says what is done.
    """

    def __init__(self, ask: Callable[[Sequence[Command], str], Awaitable[list[Reply]]]) -> None:
        self._ask = ask

    async def add_hits(self, model: str, day: int, hits: Mapping[str, int], roots: Mapping[str, str]) -> None:
        """As of `HitLedger`. Of several parts, one that fails is lost and counts as an error."""
        check_hits(model, day, hits, roots)
        members, texts = list(hits.items()), list(roots.items())
        counts, names = _keys(model, day)
        commands = []
        for start in range(0, max(len(members), len(texts), 1), _AT_ONCE):
            some, about = members[start : start + _AT_ONCE], texts[start : start + _AT_ONCE]
            words: list[str | int] = [_TTL_S, _MOST_MEMBERS, _MOST_ROOTS, len(some)]
            words += [word for member in some for word in member] + [word for text in about for word in text]
            commands.append(Command(counts, (pack("EVAL", _ADD, 2, counts, names, *words),)))
        commands += [
            Command(_MODELS_KEY, (pack(*each),))
            for each in (
                ("ZADD", _MODELS_KEY, day, model),
                ("ZREMRANGEBYSCORE", _MODELS_KEY, "-inf", day - HIT_DAYS),
                ("ZREMRANGEBYRANK", _MODELS_KEY, 0, -_MOST_MODELS - 1),
                ("EXPIRE", _MODELS_KEY, _TTL_S),
            )
        ]
        await self._ask(commands, "add_hits")

    async def read_hits(self, model: str, days: Sequence[int], limit: int) -> tuple[dict[str, int], dict[str, str]]:
        """As of `HitLedger`. The best of each day are added up, so what is just below the limit on every day may be
        missing."""
        check_model(model)
        found: dict[str, int] = {}
        left = dict.fromkeys(days, 0) if limit > 0 else {}
        while left:  # page by page, since a long reply would hold up the event loop
            pages = [
                Command(key, (pack("ZREVRANGE", key, start, min(start + _PAGE, limit) - 1, "WITHSCORES"),))
                for day, start in left.items()
                for key in [_keys(model, day)[0]]
            ]
            replies = await self._ask(pages, "read_hits")
            for (day, start), reply in zip(list(left.items()), replies, strict=True):
                if not isinstance(reply, list) or len(reply) < 2 * _PAGE or start + _PAGE >= limit:
                    del left[day]
                else:
                    left[day] = start + _PAGE
                for member, count in _members(reply):
                    found[member] = found.get(member, 0) + count
        best = most_hit(found, limit)
        return best, await self._descriptions(model, days, best)

    async def _descriptions(self, model: str, days: Sequence[int], members: Iterable[str]) -> dict[str, str]:
        fields = list(dict.fromkeys([MODEL_FIELD, *(member.partition(":")[0] for member in members)]))
        parts = [fields[start : start + _AT_ONCE] for start in range(0, len(fields), _AT_ONCE)]
        asked = [(_keys(model, day)[1], part) for day in sorted(days) for part in parts]
        commands = [Command(key, (pack("HMGET", key, *part),)) for key, part in asked]
        replies = await self._ask(commands, "read_hits") if commands else []
        texts: dict[str, str] = {}
        for (_, part), reply in zip(asked, replies, strict=True):
            if not isinstance(reply, list):
                continue
            for name, raw in zip(part, reply, strict=True):
                text = raw.decode("ascii", "replace") if isinstance(raw, bytes) else ""
                if text and is_described(name, text):
                    texts[name] = text
        return texts

    async def hit_models(self) -> list[str]:
        """As of `HitLedger`."""
        command = Command(_MODELS_KEY, (pack("ZRANGE", _MODELS_KEY, 0, _MOST_MODELS - 1),))
        (reply,) = await self._ask([command], "hit_models")
        names = reply if isinstance(reply, list) else []
        texts = [name.decode("ascii", "replace") for name in names if isinstance(name, bytes)]
        return sorted(text for text in texts if is_model(text))


def _keys(model: str, day: int) -> tuple[str, str]:
    """Those of counts and descriptions, on one server of a cluster: a script must find both there."""
    tag = f"{{{model}.{day}}}"
    return f"kite-hits:{tag}:counts", f"kite-hits:{tag}:roots"


def _members(reply: Reply) -> Iterator[tuple[str, int]]:
    """Members and counts of a ZREVRANGE; what is none is left out."""
    if not isinstance(reply, list):
        return
    for member, score in zip(reply[::2], reply[1::2], strict=False):
        try:
            name, count = member.decode("ascii"), int(float(score))
        except (AttributeError, ValueError, TypeError, OverflowError):
            continue
        if is_member(name, count):
            yield name, count
