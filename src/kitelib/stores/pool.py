"""`RUPool`: the tiers as one place that takes and gives verified recyclable units.

Process memory holds units as plain bytes. The outer tiers (disk, Redis, third parties, S3) hold their stored form,
compressed where that pays and authenticated where a key is set. Whatever a tier does, a request only misses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import anyio

from kitelib.config import PoolConfig
from kitelib.errors import InvalidRequestError
from kitelib.fingerprint import store_key
from kitelib.fingerprint.chain import model_key
from kitelib.native.library import native_note
from kitelib.runtime.limits import default_pool_bytes
from kitelib.runtime.supervisor import Supervisor
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.checking import Checked, UnitChecks
from kitelib.stores.forms import StoredForms
from kitelib.stores.hits import HitCounts, HitPublisher
from kitelib.stores.hot_set import warm_memory
from kitelib.stores.inspecting import units_by_cf
from kitelib.stores.keys import KeyRing
from kitelib.stores.lifecycle import Lifecycle
from kitelib.stores.memory import MemoryStore
from kitelib.stores.outer_writes import OuterWrites
from kitelib.stores.pinned import PINNED, Pinned, PinnedUnits
from kitelib.stores.promotion import Promotion
from kitelib.stores.registry import open_stores
from kitelib.stores.siblings import Siblings
from kitelib.stores.tier import ARCHIVE, Tier
from kitelib.stores.tiered import Span, Tiers
from kitelib.stores.wanted import Wanted, leading_pairs
from kitelib.upcycle.unit import MAX_DATA_BYTES, RecyclableUnit

__all__ = ["MEMORY", "RUPool"]

MEMORY: Final = "memory"
"""Name under which reports show process memory."""

T = TypeVar("T")

_LOG = logging.getLogger("kitelib.pool")
_CALL_MARGIN_S: Final = 0.2  # what a store needs to give up by itself after its own timeouts
_ARCHIVE_TIMEOUT_S: Final = 5.0  # an object store may take a second to its first byte
_LEAST_VALUE_LIMIT: Final = 4 * 2**20  # bytes; room for headers, and for other replies of a server
_EPOCH_WAIT_S: Final = 3.0


class RUPool:
    """All tiers. Used on the event loop, except `contains` and `encode`.

    Attributes:
        memory: the process-memory tier.
        tiers: the outer tiers, fastest first.
        epoch: freshness epoch; units written before the last `clear` carry a lower one and are never given out.
        refused: units in memory that failed a check on reading, and calls that the memory tier failed.
        siblings: which stored KV units go on from the same block.
        pinned: units of preloaded bundles.
        hits: what requests used.
        exporter: does what `export` says; set by the engine, since bundles are a layer above.
    """

    def __init__(self, config: PoolConfig, door: ThreadDoor, *, on_epoch: Callable[[], None] | None = None) -> None:
        limit = default_pool_bytes() if config.memory_bytes is None else config.memory_bytes
        self.memory = MemoryStore(limit, max_items=config.yoco_lite_cache_size, ttl_s=config.ttl_seconds)
        self._forms = StoredForms(config)
        self._keys = KeyRing(config.hmac_key, config.namespace_secret)
        self._checks = UnitChecks(config, self._keys, self._forms)
        self.pinned = PinnedUnits()
        self._writes = OuterWrites(
            lambda: self.memory, self._forms, self._keys.of, share_when_warm=config.share == "when_warm"
        )
        timeout_s = config.connect_timeout + config.socket_timeout + _CALL_MARGIN_S
        patient_s = max(timeout_s, _ARCHIVE_TIMEOUT_S)
        self.tiers = Tiers(
            [
                Tier(
                    name,
                    store,
                    door=door,
                    timeout_s=patient_s if name == ARCHIVE else timeout_s,
                    write_bytes=config.write_bytes,
                )
                for name, store in open_stores(config)
            ],
            thresholds=config.thresholds,
            share=config.share,
            resident=self._writes.resident,
        )
        self._writes.tiers = self.tiers
        self._enabled = limit > 0 or bool(self.tiers.tiers)
        self.siblings = Siblings()
        self.refused = 0
        self.epoch = 0
        self._config = config
        self._door = door
        self._on_epoch = on_epoch
        self.hits = HitCounts(private=config.namespace_secret is not None)
        self.exporter: Callable[..., Awaitable[Any]] | None = None
        self._lifecycle = Lifecycle(
            self.tiers,
            interval_s=config.freshness_check_interval,
            thresholds=config.thresholds,
            on_epoch=self._on_newer_epoch,
            hits=self.hits,
        )
        self._supervisor: Supervisor | None = None
        self._model: str | None = None
        self._epochs: dict[str, int] = {}  # of the models that were served
        self._epoch_known = True
        self._epoch_raised = False  # while it was not known
        self._behind: set[asyncio.Task[Any]] = set()
        self._promotion = Promotion(door, self.encode)

    # Opening and closing

    async def start(self, supervisor: Supervisor) -> None:
        """Starts what writes behind and what looks after the tiers."""
        self._supervisor = supervisor
        for name, job in self.tiers.jobs():
            supervisor.keep(name, job)
        if self.tiers.tiers:
            await self._door.run(native_note)  # loads the library from its file, which `notes` must not do on the loop
            supervisor.keep("lifecycle", self._lifecycle.run)

    async def use_model(
        self, model_state: bytes, *, bitwise: bool = True, max_data_bytes: int = MAX_DATA_BYTES
    ) -> None:
        """Takes the epoch of a model from the tiers; to be called whenever another model is served. `bitwise` says
        that its numerics are, `max_data_bytes` how many bytes of data its largest unit has."""
        for tier in self.tiers.tiers:
            tier.limit_values(max(_LEAST_VALUE_LIMIT, 2 * max_data_bytes))
        self._forms.bitwise = bitwise
        self._model = model_key(model_state)
        if not self.tiers.tiers:
            self.epoch = self._epochs.get(self._model, 0)
            return
        # Until the tiers have told the epoch, nothing is read from them: it might be void.
        self._epoch_known = False
        await self._for_a_while(self._learn_epoch(self._model))

    async def _for_a_while(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Starts work with the tiers and waits for it, but not for long: a tier that hangs must hold up nobody, and
        the work goes on behind. None if it has not ended by then."""
        task = asyncio.get_running_loop().create_task(work)
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)
        await asyncio.wait({task}, timeout=_EPOCH_WAIT_S)
        return task.result() if task.done() and not task.cancelled() else None

    async def _learn_epoch(self, model: str) -> None:
        epoch = await self._lifecycle.use_model(model)
        if model == self._model:
            self.epoch = max(self.epoch, epoch) if self._epoch_raised else epoch
            self._epoch_known, self._epoch_raised = True, False
            self.pinned.expire(self.epoch)

    @property
    def hit_publisher(self) -> HitPublisher | None:
        """What brings `hits` to the tiers."""
        return self._lifecycle.hits

    async def freshen(self) -> None:
        """Call it when a request comes: it may be that nobody looked at the tiers' epochs for longer than an interval."""
        if self._lifecycle.note_use():
            await self._for_a_while(self._lifecycle.look())

    async def warm(self, deadline_s: float = 5.0) -> dict[str, str]:
        """Opens the connections and indexes of all outer tiers: name -> "ready" or why not. Never raises."""
        return await self.tiers.warm(deadline_s)

    async def settle(self) -> None:
        """Waits until what is on the way to the outer tiers is written, at most `PoolConfig.drain_seconds`; what is
        not written by then stays on its way."""
        with anyio.move_on_after(self._config.drain_seconds):
            await self.tiers.settle()

    async def drain(self) -> None:
        """As `settle`, but what is not written by then is dropped and counted. Hits are told as well."""
        await asyncio.gather(self._publish_hits(), self.tiers.drain(self._config.drain_seconds))

    async def _publish_hits(self) -> None:
        with anyio.move_on_after(self._config.drain_seconds):
            await self._lifecycle.publish_hits()

    async def aclose(self) -> None:
        """Closes all tiers."""
        for task in self._behind:
            task.cancel()
        self.pinned.clear()
        await self.memory.aclose()
        await self.tiers.aclose()

    def add_namespace(self, root: bytes, namespace: str | None) -> None:
        """Tells whose units start at a root, so that they are authenticated with that namespace's own key."""
        self._keys.add(root, namespace)

    # Looking up

    @property
    def decode_s_per_byte(self) -> float:
        """Seconds that turning a stored byte of an outer tier into a checked unit takes."""
        return self._checks.decode_s_per_byte

    @property
    def enabled(self) -> bool:
        """Whether anything can be kept at all."""
        return self._enabled

    @property
    def searchable(self) -> bool:
        """Whether there can be anything to find."""
        return self._enabled or len(self.pinned) > 0

    def contains(self, wanted: Wanted) -> bool:
        """Whether the unit need not be stored again: memory or a bundle has it, or an outer tier had it a moment ago.
        Any thread; no I/O."""
        if self.memory.contains(wanted.key) or self.pinned.contains(wanted.key):
            return True
        return not self.memory.max_bytes and self._writes.is_known(wanted.key)

    async def leading_run(self, wanted: Sequence[Wanted]) -> int:
        """How many of the first units process memory and preloaded bundles have, unchecked."""
        keys = [each.key for each in wanted]
        if not keys:
            return 0
        try:
            count = await self.memory.leading_run(keys)
        except Exception:  # noqa: BLE001 - whatever a tier does, a request only misses
            self._note_failure("leading_run")
            return 0
        if len(self.pinned):
            there = lambda key: self.pinned.contains(key) or self.memory.contains(key)  # noqa: E731
            count += sum(1 for _ in itertools.takewhile(there, keys[count:]))
        return count

    async def fetch_run(self, wanted: Sequence[Wanted]) -> list[tuple[RecyclableUnit, str]]:
        """The verified units of the leading run in process memory and preloaded bundles, each with the name of where it
        came from: cut at the first miss or the first unit that fails a check."""
        if not wanted:
            return []
        keys = [each.key for each in wanted]
        # Memory is not asked for what only a bundle has: that would count as its miss.
        asked = [key for key in keys if not self.pinned.contains(key) or self.memory.contains(key)]
        try:
            found = dict(zip(asked, await self.memory.get_many(asked), strict=True))
        except Exception:  # noqa: BLE001 - as above
            self._note_failure("get_many")
            return []
        pairs = self._with_pinned(wanted, [found.get(key) for key in keys])
        if not pairs:
            return []
        checked = await self._door.run(lambda: self._checks.check(pairs, self.epoch, authenticate=False))
        self._note_run(pairs, checked)
        in_memory = [not isinstance(value, Pinned) for _, value in pairs]
        return [(unit, MEMORY if own else PINNED) for unit, own in zip(checked.units, in_memory, strict=False)]

    def _with_pinned(
        self, wanted: Sequence[Wanted], values: Sequence[bytes | None]
    ) -> list[tuple[Wanted, bytes | Pinned]]:
        """The leading run of what memory gave, with what bundles have in the holes."""
        if not len(self.pinned):
            return [*leading_pairs(wanted, values)]
        found: list[bytes | Pinned | None] = [
            self.pinned.get(each.key) if value is None else value for each, value in zip(wanted, values, strict=True)
        ]
        self.pinned.misses += found.count(None)
        return leading_pairs(wanted, found)

    def _note_run(self, pairs: Sequence[tuple[Wanted, bytes | Pinned]], checked: Checked) -> None:
        """Counts a run, and lets go of what was no good: a damaged unit is a miss for itself and all after it, and is
        not offered again."""
        own = [each for each, value in pairs if not isinstance(value, Pinned)]
        for each in own:
            self._writes.note_hit(each.key, each.root)
            self.tiers.note_hit(each.key)
        bad = {*checked.refused, *checked.old}
        for position, (each, value) in enumerate(pairs):
            if not isinstance(value, Pinned):
                if each.key in bad:
                    self.refused += each.key in checked.refused
                    self.memory.delete(each.key)
            elif each.key in bad:
                self.pinned.refuse(each.key, value)
            elif position < len(checked.units):
                self.pinned.note_hit(value, len(checked.units[position].data))
        units = {each.key: unit for (each, _), unit in zip(pairs, checked.units, strict=False)}
        self._repair([(each.key, units[each.key]) for each in own if each.key in units], pairs[0][0].root)

    def _repair(self, items: Sequence[tuple[str, RecyclableUnit]], root: bytes) -> None:
        if self.tiers.tiers and self._supervisor is not None and (missing := self._writes.missing(items)):
            epoch, writes = self.epoch, self._writes
            self._supervisor.spawn("repair", lambda: writes.repair(missing, root, lambda: epoch != self.epoch))

    async def locate(self, wanted: Sequence[Wanted], budget_s: float | None = None) -> list[Span]:
        """Which outer tiers have the leading run, unchecked; as far as they say so within `budget_s` seconds."""
        if not wanted or not self.tiers.tiers or not self._epoch_known:
            return []
        epoch, begun = self.epoch, time.monotonic()
        spans = await self.tiers.locate([each.key for each in wanted], budget_s=budget_s)
        if epoch != self.epoch:
            return []  # what was there is void by now
        for span in spans:
            self._writes.note_there(each.key for each in wanted[span.first : span.first + span.count])
        if budget_s is None or time.monotonic() - begun < budget_s:  # all have said what they have
            self._writes.note_gone([each.key for each in wanted[sum(span.count for span in spans) :]])
        return spans

    async def read(self, span: Span, wanted: Sequence[Wanted]) -> list[tuple[RecyclableUnit, str]]:
        """The verified units of a span that `locate` found, or of a part of it, with the tier's name: cut at the first
        that is not there or fails a check. `wanted` are those of the span."""
        values = await self.tiers.read(span, [each.key for each in wanted])
        return [(unit, span.tier.name) for unit in await self._take(span.tier, leading_pairs(wanted, values))]

    async def fetch_any(self, wanted: Sequence[Wanted]) -> list[tuple[RecyclableUnit, str] | None]:
        """Single units from any outer tier with its name, in order; None is a miss."""
        found: list[tuple[RecyclableUnit, str] | None] = [None] * len(wanted)
        if not wanted or not self.tiers.tiers or not self._epoch_known:
            return found
        values = await self.tiers.get_many([each.key for each in wanted])
        for index, (each, value) in enumerate(zip(wanted, values, strict=True)):
            if value is not None:
                tier, blob = value
                units = await self._take(tier, [(each, blob)])
                found[index] = (units[0], tier.name) if units else None
        return found

    async def _take(self, tier: Tier, pairs: Sequence[tuple[Wanted, bytes]]) -> list[RecyclableUnit]:
        """Checks values from an outer tier, and keeps the good ones in memory."""
        if not pairs:
            return []
        checked = await self._door.run(lambda: self._checks.check(pairs, self.epoch, authenticate=True))
        tier.refused += len(checked.refused)
        # Else they would be thought to be there, and nothing better be written in their place.
        self._writes.note_gone(checked.refused + checked.old)
        if checked.refused:
            await self.tiers.delete_many(checked.refused)
        units = list(itertools.takewhile(lambda unit: unit.epoch >= self.epoch, checked.units))
        self._promote(units)
        return units

    def _note_failure(self, operation: str) -> None:
        _LOG.exception("%s of the memory tier failed", operation)
        self.refused += 1

    def _promote(self, units: Sequence[RecyclableUnit]) -> None:
        """Keeps units from an outer tier in process memory."""
        self._note_siblings(units)
        if self._supervisor is not None and self.memory.max_bytes:
            epoch = self.epoch
            self._promotion.begin(units, lambda items: self.put_many(items, epoch), self._supervisor.spawn)

    # Storing

    def encode(self, unit: RecyclableUnit) -> tuple[str, bytes]:
        """Key and stored form of a unit in process memory. Any thread."""
        key = store_key(model_key(unit.model_state), unit.kind, unit.cf)
        return key, self._forms.in_memory(unit)

    async def put_units(self, units: Sequence[RecyclableUnit], epoch: int, root: bytes = b"") -> int:
        """Encodes and stores units, unless the pool was cleared since they were computed. Returns how many were taken:
        not those that come from a lossy form that was not asked for."""
        exact = [unit for unit in units if self._forms.accepts(unit)]
        if self.memory.max_bytes:
            await self.put_many(await self._door.run(lambda: [self.encode(unit) for unit in exact]), epoch)
        if epoch == self.epoch:
            self._note_siblings(exact)
            self._writes.offer(exact, root)
        return len(exact)

    async def put_many(self, items: Sequence[tuple[str, bytes]], epoch: int) -> None:
        """Stores encoded units in process memory, unless the pool was cleared meanwhile."""
        if epoch == self.epoch:
            await self.memory.put_many(items)

    def _note_siblings(self, units: Sequence[RecyclableUnit]) -> None:
        for unit in units:
            if unit.kind == "kv":
                self.siblings.add(unit.parent, unit.cf, unit.token_ids)

    # Managing

    async def get_rus_by_cf(self, cf: bytes | str) -> list[RecyclableUnit]:
        """All units whose fingerprint is `cf`, of any kind, in process memory of any model and in the outer tiers of
        the model in use; for people and tools, not for attaching.

        Raises:
            InvalidRequestError: `cf` is neither 32 bytes nor 64 hexadecimal digits.
        """
        units, refused = await units_by_cf(cf, self.memory, self.tiers, self._model, self.epoch)
        self.refused += refused
        return units

    def forget(self) -> int:
        """Forgets everything at once: from now on nothing old is given out, and what is on its way to a tier becomes
        void. Returns how many units process memory held. `spread_epoch` makes it last and true for other processes."""
        self._epoch_raised = not self._epoch_known
        return self._advance(self.epoch + 1)

    async def spread_epoch(self) -> dict[str, int]:
        """Tells every tier and, through them, every other process that older units are void, and deletes those.

        Returns:
            Per outer tier, how many units were deleted. A tier that can't be reached is told at the next checks.
        """
        if not self.tiers.tiers:
            return {}
        return await self._lifecycle.raise_epoch(self.epoch)

    async def clear(self) -> dict[str, int]:
        """`forget` and `spread_epoch`; returns how many units each tier held. Slow tiers are told behind the caller,
        and are not in the answer."""
        return {"memory": self.forget(), **(await self._for_a_while(self.spread_epoch()) or {})}

    def _advance(self, epoch: int) -> int:
        self.epoch = epoch
        if self._model is not None:
            self._epochs[self._model] = epoch
        self.pinned.clear()
        self.siblings.clear()
        self._writes.clear()
        self.tiers.void()
        return self.memory.clear()

    def _on_newer_epoch(self, epoch: int) -> None:
        """Another process invalidated this model's units."""
        if epoch > self.epoch:
            self._advance(epoch)
            if self._on_epoch is not None:
                self._on_epoch()

    async def export(self, path: str | os.PathLike[str], **options: Any) -> Any:
        """Writes the units that were used most to a bundle; options, result and errors are those of
        `kitelib.upcycle.bundle.exporting.export_pool`."""
        if self.exporter is None:
            raise InvalidRequestError(
                "only the pool of an engine can be exported; use engine.pool, or kite bundle export"
            )
        return await self.exporter(path, **options)

    def notes(self) -> list[str]:
        """Plain sentences about what keeps the outer tiers from doing all they could, for people."""
        note = native_note() if self.tiers.tiers else ""
        return [note, *self.tiers.notes()] if note else self.tiers.notes()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Per tier: hits, misses, bytes, items, evictions, dropped and more. No I/O."""
        counters = self.memory.counters()
        memory = {**dataclasses.asdict(counters), "limit_bytes": self.memory.max_bytes, "refused": self.refused}
        bundles = {PINNED: self.pinned.counters()} if len(self.pinned) else {}
        return {"memory": memory, **bundles, **self.tiers.stats()}

    async def warm_hot_set(self, max_bytes: int | None = None, deadline_s: float = 30.0) -> int:
        """Brings the most recently used units of the fastest shared tier into process memory, before requests need
        them.

        Args:
            max_bytes: most bytes to bring; None means half of what memory may hold, at most 256 MiB.
            deadline_s: seconds after which it ends with what is there.

        Returns:
            How many units came. Units of other models, and those another namespace's key authenticates, stay away.
        """
        tier = next((tier for tier in self.tiers.tiers if tier.shared is not None), None)
        if tier is None or tier.shared is None or self._model is None or not self.memory.max_bytes:
            return 0
        limit = min(self.memory.max_bytes // 2, 256 * 2**20) if max_bytes is None else max_bytes
        epoch = self.epoch
        return await warm_memory(
            tier,
            self._model,
            limit,
            deadline_s,
            door=self._door,
            form=self._memory_form,
            store=lambda items: self.put_many(items, epoch),
            hmac_key=self._keys.own,
        )

    def _memory_form(self, unit: RecyclableUnit) -> tuple[str, bytes] | None:
        """Key and value in memory of a unit from outside; None if it may not be there. In a thread."""
        return self.encode(unit) if self._forms.accepts(unit) and unit.epoch >= self.epoch else None
