"""`RUPool`: the tiers as one place that takes and gives verified recyclable units."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kitelib.abc import Codec
from kitelib.config import PoolConfig
from kitelib.errors import FormatError, InvalidRequestError, UnsupportedOptionError
from kitelib.fingerprint import FINGERPRINT_BYTES, store_key
from kitelib.fingerprint.chain import model_key
from kitelib.runtime.limits import default_pool_bytes
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.memory import MemoryStore
from kitelib.stores.siblings import Siblings
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.unit import Expectation, RecyclableUnit, inspect, pack, unpack

__all__ = ["RUPool", "Wanted"]

_LOG = logging.getLogger("kitelib.pool")


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """One unit to look for: its key and what it must be."""

    key: str
    expected: Expectation

    @classmethod
    def of(cls, expected: Expectation) -> Wanted:
        """The request for a unit, keyed by its own identity."""
        return cls(store_key(model_key(expected.model_state), expected.kind, expected.cf), expected)


class RUPool:
    """All tiers. This release has the process-memory tier.

    Attributes:
        epoch: freshness epoch; units written before the last `clear` carry a lower one and are never given out.
        refused: units that failed a check on reading, and reads that a tier failed.
        siblings: which stored KV units go on from the same block.
    """

    def __init__(self, config: PoolConfig, door: ThreadDoor) -> None:
        for name in ("disk", "redis", "s3"):
            if getattr(config, name) is not None:
                raise UnsupportedOptionError(
                    f"PoolConfig.{name} is {getattr(config, name)!r}, but this release only has the memory tier; leave it None"
                )
        limit = default_pool_bytes() if config.memory_bytes is None else config.memory_bytes
        self.memory = MemoryStore(limit, ttl_s=config.ttl_seconds)
        self.siblings = Siblings()
        self.epoch = 0
        self.refused = 0
        self._enabled = limit > 0
        self._hmac_key = config.hmac_key
        self._door = door
        # Half-precision KV of natural text only shrinks by a tenth, so compressing for memory costs more than it gains.
        self._codecs: Mapping[str, Codec] = {
            "kv": get_codec("paged_kvcache_v2", "none"),
            "logits": get_codec("raw", "none"),
        }

    @property
    def enabled(self) -> bool:
        """Whether anything can be kept at all."""
        return self._enabled

    def contains(self, wanted: Wanted) -> bool:
        """Whether the process-memory tier holds the unit, unchecked. Any thread; no I/O."""
        return self.memory.contains(wanted.key)

    async def leading_run(self, wanted: Sequence[Wanted]) -> int:
        """How many of the first units exist in some tier, unchecked."""
        if not wanted:
            return 0
        try:
            return await self.memory.leading_run([each.key for each in wanted])
        except Exception:  # noqa: BLE001 - whatever a tier does, a request only misses
            self._note_failure("leading_run")
            return 0

    async def fetch_run(self, wanted: Sequence[Wanted]) -> list[RecyclableUnit]:
        """The verified units of the leading run: cut at the first miss or the first unit that fails a check."""
        if not wanted:
            return []
        try:
            values = await self.memory.get_many([each.key for each in wanted])
        except Exception:  # noqa: BLE001 - as above
            self._note_failure("get_many")
            return []
        pairs = []
        for each, value in zip(wanted, values, strict=True):
            if value is None:
                break
            pairs.append((each, value))
        return await self._door.run(lambda: self._check_all(pairs)) if pairs else []

    def _check_all(self, pairs: Sequence[tuple[Wanted, bytes]]) -> list[RecyclableUnit]:
        units = []
        for wanted, value in pairs:
            try:
                unit = unpack(value, expected=wanted.expected, hmac_key=self._hmac_key)
            except Exception as error:  # noqa: BLE001 - bytes from a store may break anything that reads them
                # A damaged unit is a miss for itself and all after it, and is not offered again.
                _LOG.warning("dropped a unit: %s", error)
                self.refused += 1
                self.memory.delete(wanted.key)
                break
            if unit.epoch < self.epoch:
                break  # read just before the pool was cleared
            units.append(unit)
        return units

    def _note_failure(self, operation: str) -> None:
        _LOG.exception("%s of the memory tier failed", operation)
        self.refused += 1

    def encode(self, unit: RecyclableUnit) -> tuple[str, bytes]:
        """Key and stored form of a unit. Any thread."""
        wanted = store_key(model_key(unit.model_state), unit.kind, unit.cf)
        return wanted, pack(unit, self._codecs[unit.kind], hmac_key=self._hmac_key)

    async def put_units(self, units: Sequence[RecyclableUnit], epoch: int) -> None:
        """Encodes and stores units, unless the pool was cleared since they were computed."""
        await self.put_many(await self._door.run(lambda: [self.encode(unit) for unit in units]), epoch)
        if epoch == self.epoch:
            for unit in units:
                if unit.kind == "kv":
                    self.siblings.add(unit.parent, unit.cf, unit.token_ids)

    async def put_many(self, items: Sequence[tuple[str, bytes]], epoch: int) -> None:
        """Stores encoded units, unless the pool was cleared since they were made."""
        if epoch == self.epoch:
            await self.memory.put_many(items)

    async def get_rus_by_cf(self, cf: bytes | str) -> list[RecyclableUnit]:
        """All units whose fingerprint is `cf`, of any kind and model; for people and tools, not for attaching.

        Raises:
            InvalidRequestError: `cf` is neither 32 bytes nor 64 hexadecimal digits.
        """
        digits = cf.lower() if isinstance(cf, str) else cf.hex()
        if len(digits) != 2 * FINGERPRINT_BYTES:
            raise InvalidRequestError(f"the fingerprint {digits!r} has {len(digits)} digits; give 64, or 32 bytes")
        found = []
        for key in self.memory.keys():  # noqa: SIM118 - a method of the store, not a mapping
            if key.endswith(digits):
                value = (await self.memory.get_many([key]))[0]
                if value is not None:
                    try:
                        found.append(inspect(value, hmac_key=self._hmac_key))
                    except FormatError:
                        self.refused += 1
        return found

    async def clear(self) -> dict[str, int]:
        """Drops everything in every tier; returns how many units each held. Pending writes become void."""
        self.epoch += 1
        self.siblings.clear()
        return {"memory": self.memory.clear()}

    def stats(self) -> dict[str, dict[str, Any]]:
        """Per tier: hits, misses, bytes, items, evictions, dropped, limit. No I/O."""
        counters = self.memory.counters()
        return {
            "memory": {**dataclasses.asdict(counters), "limit_bytes": self.memory.max_bytes, "refused": self.refused}
        }

    async def aclose(self) -> None:
        """Closes all tiers."""
        await self.memory.aclose()
