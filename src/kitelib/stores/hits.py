"""How often units were used: counted in this process, and added up by the tiers that keep a ledger of it.

A request notes the deepest block that was known; a hit of a block is one of every block before it, which whoever reads
the counts adds up along the parents.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from kitelib.abc import ModelInfo
from kitelib.errors import StoreError
from kitelib.fingerprint import model_key
from kitelib.stores.tier import Tier

__all__ = [
    "DAY_S",
    "HIT_DAYS",
    "MAX_DESCRIPTION_BYTES",
    "MODEL_FIELD",
    "HitCounts",
    "HitPublisher",
    "check_hits",
    "check_model",
    "is_described",
    "is_member",
    "is_model",
    "last_days",
    "most_hit",
]

_LOG = logging.getLogger("kitelib.pool")
K = TypeVar("K", bound=Hashable)

DAY_S: Final = 86400.0
HIT_DAYS: Final = 8
"""Days that a ledger keeps, the present one included."""
MODEL_FIELD: Final = "model"
"""Name of the description of the model itself."""
MAX_DESCRIPTION_BYTES: Final = 8192
"""Longest description, characters (they are ASCII)."""
_MAX_ENTRIES: Final = 4096  # between two rounds; handing over more would hold the event loop up for milliseconds
_MAX_ROOTS: Final = 1024
_TELL_AGAIN_S: Final = 3600.0  # a ledger may have lost them
_MODEL: Final = re.compile(r"[0-9a-z_.-]{1,64}")
_MEMBER: Final = re.compile(r"[0-9a-f]{64}:[0-9a-f]{64}")
_ROOT: Final = re.compile(rf"[0-9a-f]{{64}}|{MODEL_FIELD}")
_MOST_HITS: Final = 2**53  # Redis adds in double precision


def check_model(model: str) -> None:
    """Raises StoreError unless a ledger can have a model of that name."""
    if not is_model(model):
        raise StoreError(f"hits can't be counted for {model[:80]!r}; use 1 to 64 of the characters [0-9a-z_.-]")


def last_days(count: int, now: float) -> range:
    """The last days, today included, at a time in seconds since 1970."""
    today = int(now // DAY_S)
    return range(today - count + 1, today + 1)


def is_model(name: str) -> bool:
    """Whether a ledger can have a model of that name."""
    return _MODEL.fullmatch(name) is not None


def check_hits(model: str, day: int, hits: Mapping[str, int], roots: Mapping[str, str]) -> None:
    """Raises StoreError unless a ledger can take these."""
    check_model(model)
    if not 0 <= day < 2**31:
        raise StoreError(f"hits can't be counted on day {day}; give whole days since 1970")
    bad = next((each for each, count in hits.items() if not is_member(each, count)), None)
    if bad is not None:
        raise StoreError(f"a hit of {bad[:140]!r} can't be counted {hits[bad]} times; give <root>:<cf> and at least 1")
    bad = next((each for each, text in roots.items() if not is_described(each, text)), None)
    if bad is not None:
        raise StoreError(f"{bad[:80]!r} can't have this description of {len(roots[bad])} characters")


def is_member(member: str, count: int) -> bool:
    """Whether a ledger may have this entry: ``<root>:<cf>`` and a positive count."""
    return _MEMBER.fullmatch(member) is not None and 0 < count < _MOST_HITS


def is_described(root: str, text: str) -> bool:
    """Whether a ledger may have this description of this root, or of the model."""
    printable = text.isascii() and text.isprintable()
    return _ROOT.fullmatch(root) is not None and printable and len(text) <= MAX_DESCRIPTION_BYTES


def most_hit(hits: Mapping[str, int], limit: int) -> dict[str, int]:
    """The `limit` entries with the most hits, most first; of equal ones always the same."""
    return dict(sorted(hits.items(), key=lambda item: (-item[1], item[0]))[:limit])


class _Counts(OrderedDict[K, int], Generic[K]):
    """Counts of a bounded number of things; the one that was counted longest ago goes first."""

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def add(self, key: K, count: int) -> None:
        self[key] = self.get(key, 0) + count
        self.move_to_end(key)
        if len(self) > self._max_entries:
            self.popitem(last=False)


class HitCounts:
    """What this process used since it was last asked. Used on the event loop only.

    Args:
        private: `PoolConfig.namespace_secret` is set, so that no name of a tenant may get into a shared tier.
        max_entries: most blocks; the one that was used longest ago goes first. Each takes about 400 bytes.

    Attributes:
        model: `model_key` of the model in use; "" before `use_model`.
    """

    def __init__(self, *, private: bool = False, max_entries: int = _MAX_ENTRIES) -> None:
        self.model = ""
        self._private = private
        self._counts: _Counts[tuple[str, bytes, bytes]] = _Counts(max_entries)
        self._texts: dict[tuple[str, str], str] = {}

    def use_model(self, info: ModelInfo) -> None:
        """What is noted and described from now on belongs to this model."""
        self.model = model_key(info.model_state)
        self._describe(
            MODEL_FIELD,
            {
                "name": info.name,
                "model_state": info.model_state.hex(),
                "state_parts": dict(info.state_parts),
                "layout": str(info.execution_path.get("layout", "none")),
                "block_tokens": info.block_tokens,
                "block_bytes": info.block_bytes,
                "vocab_size": info.vocab_size,
            },
        )

    def describe(self, root: bytes, description: Mapping[str, Any]) -> None:
        """Says what a root stands for, so that a reader without the model can compute it again. Cheap when it is known.

        Args:
            root: the root.
            description: ``execution_path``, ``namespace`` and ``adapter`` (digest and scale, or None), as of
                `root_fingerprint`.
        """
        if (self.model, root.hex()) in self._texts:
            return
        adapter, namespace = description["adapter"], description["namespace"]
        tenant = {"private": True} if self._private and namespace is not None else {"namespace": namespace}
        self._describe(
            root.hex(),
            {
                "execution_path": dict(description["execution_path"]),
                "adapter": None if adapter is None else {"digest": adapter[0].hex(), "scale": float(adapter[1])},
                **tenant,
            },
        )

    def _describe(self, name: str, fields: Mapping[str, Any]) -> None:
        text = json.dumps(fields, separators=(",", ":"), sort_keys=True)
        # Those that come first stay: the engine's own namespace is among them.
        if len(text) <= MAX_DESCRIPTION_BYTES and (len(self._texts) < _MAX_ROOTS or name == MODEL_FIELD):
            self._texts[self.model, name] = text

    def note(self, root: bytes, cf: bytes) -> None:
        """A request found this block, and all before it, computed already."""
        if self.model:
            self._counts.add((self.model, root, cf), 1)

    def peek(self, model: str) -> dict[str, int]:
        """The counts of a model, by ``<root>:<cf>``."""
        return {f"{root.hex()}:{cf.hex()}": count for (of, root, cf), count in self._counts.items() if of == model}

    def take(self) -> dict[tuple[str, str], int]:
        """The counts by model and ``<root>:<cf>``; they begin anew."""
        taken = {(model, f"{root.hex()}:{cf.hex()}"): count for (model, root, cf), count in self._counts.items()}
        self._counts.clear()
        return taken

    def descriptions(self, model: str, members: Iterable[str]) -> dict[str, str]:
        """What is known of the model and of the roots of these members."""
        names = dict.fromkeys([MODEL_FIELD, *(member.partition(":")[0] for member in members)])
        return {name: text for name in names if (text := self._texts.get((model, name))) is not None}


class HitPublisher:
    """Brings counts to every tier that keeps a ledger. What a tier did not take waits for the next time, bounded.

    Args:
        counts: where they come from.
        now: seconds since 1970.
    """

    def __init__(self, counts: HitCounts, now: Callable[[], float]) -> None:
        self._counts = counts
        self._now = now
        self._waiting: dict[Tier, _Counts[tuple[str, str]]] = {}
        self._told: dict[Tier, tuple[int, set[tuple[str, str]]]] = {}

    async def publish(self, tiers: Sequence[Tier]) -> None:
        """Adds what was counted to the ledgers of these tiers; no tier that fails stops it. Without a ledger, counts
        stay where they are."""
        keepers = [tier for tier in tiers if tier.ledger is not None]
        if not keepers:
            return
        taken = self._counts.take()
        for tier in keepers:
            self._put_back(tier, taken)
        await asyncio.gather(*[self._send(tier) for tier in keepers])

    def waiting(self, tier: Tier, model: str) -> dict[str, int]:
        """What a tier has not taken yet, by ``<root>:<cf>``."""
        waiting = self._waiting.get(tier)
        return {} if waiting is None else {member: count for (of, member), count in waiting.items() if of == model}

    def _put_back(self, tier: Tier, counts: Mapping[tuple[str, str], int]) -> None:
        waiting = self._waiting.setdefault(tier, _Counts(_MAX_ENTRIES))
        for key, count in counts.items():
            waiting.add(key, count)

    async def _send(self, tier: Tier) -> None:
        for model in {model for model, _ in self._waiting[tier]}:
            hits = self.waiting(tier, model)
            for member in hits:
                del self._waiting[tier][model, member]
            try:
                await self._add(tier, model, hits)
            except BaseException as error:
                # Also when it was cancelled: it is not known whether the tier took them.
                self._put_back(tier, {(model, member): count for member, count in hits.items()})
                if not isinstance(error, StoreError):
                    raise
                _LOG.debug("hits stay here for now: %s", error)

    async def _add(self, tier: Tier, model: str, hits: Mapping[str, int]) -> None:
        assert tier.ledger is not None
        period, told = self._told.get(tier, (-1, set()))
        now = self._now()
        if period != int(now // _TELL_AGAIN_S):
            period, told = int(now // _TELL_AGAIN_S), set()
            self._told[tier] = period, told
        texts = self._counts.descriptions(model, hits)
        new = {name: text for name, text in texts.items() if (model, name) not in told}
        await tier.ledger.add_hits(model, int(now // DAY_S), hits, new)
        told.update((model, name) for name in new)
