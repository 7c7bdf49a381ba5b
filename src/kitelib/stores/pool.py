"""`RUPool`: the tiers as one place that takes and gives verified recyclable units.

Process memory holds units as plain bytes. The outer tiers (disk, Redis, third parties, S3) hold their stored form,
compressed where that pays and authenticated where a key is set. Whatever a tier does, a request only misses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import anyio

from kitelib.config import PoolConfig
from kitelib.errors import FormatError, InvalidRequestError
from kitelib.fingerprint import FINGERPRINT_BYTES, store_key
from kitelib.fingerprint.chain import model_key
from kitelib.native.library import native_note
from kitelib.runtime.limits import default_pool_bytes
from kitelib.runtime.supervisor import Supervisor
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.forms import StoredForms
from kitelib.stores.hot_set import warm_memory
from kitelib.stores.keys import KeyRing
from kitelib.stores.lifecycle import Lifecycle
from kitelib.stores.memory import MemoryStore
from kitelib.stores.outer_writes import OuterWrites
from kitelib.stores.registry import open_stores
from kitelib.stores.siblings import Siblings
from kitelib.stores.tier import ARCHIVE, Tier
from kitelib.stores.tiered import Span, Tiers
from kitelib.stores.wanted import Wanted, leading_pairs
from kitelib.upcycle.unit import HEAD_BYTES, MAX_DATA_BYTES, RecyclableUnit, inspect, peek, unpack

__all__ = ["RUPool"]

T = TypeVar("T")

_LOG = logging.getLogger("kitelib.pool")
_OUTER_KINDS: Final = ("kv", "logits", "completion", "lora")
_MAX_PROMOTING_BYTES: Final = 64 * 2**20
_CALL_MARGIN_S: Final = 0.2  # what a store needs to give up by itself after its own timeouts
_ARCHIVE_TIMEOUT_S: Final = 5.0  # an object store may take a second to its first byte
_LEAST_VALUE_LIMIT: Final = 4 * 2**20  # bytes; room for headers, and for other replies of a server
_EPOCH_WAIT_S: Final = 3.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Checked:
    """Values after their checks: the leading good units, and keys of what failed a check, and of what is older than the
    last `clear`, or than the configuration allows."""

    units: list[RecyclableUnit]
    refused: list[str]
    old: list[str]


class RUPool:
    """All tiers. Used on the event loop, except `contains` and `encode`.

    Attributes:
        memory: the process-memory tier.
        tiers: the outer tiers, fastest first.
        epoch: freshness epoch; units written before the last `clear` carry a lower one and are never given out.
        refused: units in memory that failed a check on reading, and calls that the memory tier failed.
        siblings: which stored KV units go on from the same block.
    """

    def __init__(self, config: PoolConfig, door: ThreadDoor, *, on_epoch: Callable[[], None] | None = None) -> None:
        limit = default_pool_bytes() if config.memory_bytes is None else config.memory_bytes
        self.memory = MemoryStore(limit, ttl_s=config.ttl_seconds)
        self._forms = StoredForms(config)
        self._keys = KeyRing(config.hmac_key, config.namespace_secret)
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
        self._lifecycle = Lifecycle(
            self.tiers,
            interval_s=config.freshness_check_interval,
            thresholds=config.thresholds,
            on_epoch=self._on_newer_epoch,
        )
        self._supervisor: Supervisor | None = None
        self._model: str | None = None
        self._epoch_known = True
        self._epoch_raised = False  # while it was not known
        self._behind: set[asyncio.Task[Any]] = set()
        self._promoting_bytes = 0
        self.decode_s_per_byte = 1e-9  # of stored bytes into checked units; measured as units are read

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

    async def warm(self, deadline_s: float = 5.0) -> dict[str, str]:
        """Opens the connections and indexes of all outer tiers: name -> "ready" or why not. Never raises."""
        return await self.tiers.warm(deadline_s)

    async def settle(self) -> None:
        """Waits until what is on the way to the outer tiers is written, at most `PoolConfig.drain_seconds`; what is
        not written by then stays on its way."""
        with anyio.move_on_after(self._config.drain_seconds):
            await self.tiers.settle()

    async def drain(self) -> None:
        """As `settle`, but what is not written by then is dropped and counted."""
        await self.tiers.drain(self._config.drain_seconds)

    async def aclose(self) -> None:
        """Closes all tiers."""
        for task in self._behind:
            task.cancel()
        await self.memory.aclose()
        await self.tiers.aclose()

    def add_namespace(self, root: bytes, namespace: str | None) -> None:
        """Tells whose units start at a root, so that they are authenticated with that namespace's own key."""
        self._keys.add(root, namespace)

    # Looking up

    @property
    def enabled(self) -> bool:
        """Whether anything can be kept at all."""
        return self._enabled

    def contains(self, wanted: Wanted) -> bool:
        """Whether the unit need not be stored again: memory has it, or an outer tier had it a moment ago. Any thread;
        no I/O."""
        return self.memory.contains(wanted.key) or (not self.memory.max_bytes and self._writes.is_known(wanted.key))

    async def leading_run(self, wanted: Sequence[Wanted]) -> int:
        """How many of the first units process memory has, unchecked."""
        if not wanted:
            return 0
        try:
            return await self.memory.leading_run([each.key for each in wanted])
        except Exception:  # noqa: BLE001 - whatever a tier does, a request only misses
            self._note_failure("leading_run")
            return 0

    async def fetch_run(self, wanted: Sequence[Wanted]) -> list[RecyclableUnit]:
        """The verified units of the leading run in process memory: cut at the first miss or the first unit that fails
        a check."""
        if not wanted:
            return []
        try:
            values = await self.memory.get_many([each.key for each in wanted])
        except Exception:  # noqa: BLE001 - as above
            self._note_failure("get_many")
            return []
        pairs = leading_pairs(wanted, values)
        if not pairs:
            return []
        for each, _ in pairs:
            self._writes.note_hit(each.key, each.root)
            self.tiers.note_hit(each.key)
        checked = await self._door.run(lambda: self._check_all(pairs, authenticate=False))
        # A damaged unit is a miss for itself and all after it, and is not offered again.
        self.refused += len(checked.refused)
        for key in checked.refused + checked.old:
            self.memory.delete(key)
        self._repair([each.key for each, _ in pairs], checked.units, wanted[0].root)
        return checked.units

    def _repair(self, keys: Sequence[str], units: Sequence[RecyclableUnit], root: bytes) -> None:
        if self.tiers.tiers and self._supervisor is not None:
            missing = self._writes.missing(list(zip(keys, units, strict=False)))
            if missing:
                epoch = self.epoch
                is_void = lambda: epoch != self.epoch  # noqa: E731
                self._supervisor.spawn("repair", lambda: self._writes.repair(missing, root, is_void))

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

    async def read(self, span: Span, wanted: Sequence[Wanted]) -> list[RecyclableUnit]:
        """The verified units of a span that `locate` found, or of a part of it: cut at the first that is not there or
        fails a check. `wanted` are those of the span."""
        values = await self.tiers.read(span, [each.key for each in wanted])
        return await self._take(span.tier, leading_pairs(wanted, values))

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
        checked = await self._door.run(lambda: self._check_all(pairs, authenticate=True))
        tier.refused += len(checked.refused)
        # Else they would be thought to be there, and nothing better be written in their place.
        self._writes.note_gone(checked.refused + checked.old)
        if checked.refused:
            await self.tiers.delete_many(checked.refused)
        units = list(itertools.takewhile(lambda unit: unit.epoch >= self.epoch, checked.units))
        self._promote(units)
        return units

    def _check_all(self, pairs: Sequence[tuple[Wanted, bytes]], *, authenticate: bool) -> _Checked:
        """The leading good units, and what is to be deleted. In a thread."""
        units: list[RecyclableUnit] = []
        refused: list[str] = []
        old: list[str] = []
        begun, num_bytes = time.perf_counter(), 0
        ttl_s = self._config.ttl_seconds
        oldest = -math.inf if ttl_s is None else time.time() - ttl_s  # tiers only know how long they have had a unit
        for wanted, value in pairs:
            key = self._keys.of(wanted.root) if authenticate else None
            try:
                unit = unpack(value, expected=wanted.expected, hmac_key=key)
            except Exception as error:  # noqa: BLE001 - bytes from a store may break anything that reads them
                _LOG.warning("dropped a unit: %s", str(error))  # the error would keep what was read until now alive
                refused.append(wanted.key)
                break
            if _is_old(unit, self.epoch, oldest):  # and most of what follows probably as well
                old = [each.key for each, blob in pairs[len(units) :] if _is_old(blob, self.epoch, oldest)]
                break
            if not self._forms.accepts(unit):
                _LOG.warning("dropped a unit: its codec %r is lossy, and lossy units were not asked for", unit.codec)
                refused.append(wanted.key)
                break
            units.append(unit)
            num_bytes += len(value)
        if authenticate and num_bytes > 2**16:
            rate = (time.perf_counter() - begun) / num_bytes
            self.decode_s_per_byte += (rate - self.decode_s_per_byte) / 8
        return _Checked(units, refused, old)

    def _note_failure(self, operation: str) -> None:
        _LOG.exception("%s of the memory tier failed", operation)
        self.refused += 1

    def _promote(self, units: Sequence[RecyclableUnit]) -> None:
        """Keeps units from an outer tier in process memory, behind the request."""
        self._note_siblings(units)
        num_bytes = sum(len(unit.data) for unit in units)
        if self._supervisor is None or not self.memory.max_bytes or not units:
            return
        if self._promoting_bytes + num_bytes > _MAX_PROMOTING_BYTES:
            return
        self._promoting_bytes += num_bytes
        epoch = self.epoch

        async def keep() -> None:
            try:
                items = await self._door.run(lambda: [self.encode(unit) for unit in units])
                if epoch == self.epoch:
                    await self.memory.put_many(items)
            finally:
                self._promoting_bytes -= num_bytes

        self._supervisor.spawn("promote", keep)

    # Storing

    def encode(self, unit: RecyclableUnit) -> tuple[str, bytes]:
        """Key and stored form of a unit in process memory. Any thread."""
        key = store_key(model_key(unit.model_state), unit.kind, unit.cf)
        return key, self._forms.in_memory(unit)

    async def put_units(self, units: Sequence[RecyclableUnit], epoch: int, root: bytes = b"") -> None:
        """Encodes and stores units, unless the pool was cleared since they were computed."""
        if self.memory.max_bytes:
            await self.put_many(await self._door.run(lambda: [self.encode(unit) for unit in units]), epoch)
        if epoch == self.epoch:
            self._note_siblings(units)
            self._writes.offer(units, root)

    async def put_many(self, items: Sequence[tuple[str, bytes]], epoch: int) -> None:
        """Stores encoded units in process memory, unless the pool was cleared since they were made."""
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
        digits = cf.lower() if isinstance(cf, str) else cf.hex()
        if len(digits) != 2 * FINGERPRINT_BYTES or not set(digits) <= set("0123456789abcdef"):
            raise InvalidRequestError(f"the fingerprint {digits!r} has {len(digits)} digits; give 64, or 32 bytes")
        found: dict[str, RecyclableUnit] = {}
        for key in self.memory.keys():  # noqa: SIM118 - a method of the store, not a mapping
            if key.endswith(digits):
                self._inspect_into(found, key, (await self.memory.get_many([key]))[0])
        if self._model is not None and self.tiers.tiers:
            keys = [store_key(self._model, kind, bytes.fromhex(digits)) for kind in _OUTER_KINDS]
            keys = [key for key in keys if key not in found]
            for key, value in zip(keys, await self.tiers.get_many(keys), strict=True):
                self._inspect_into(found, key, None if value is None else value[1])
        return list(found.values())

    def _inspect_into(self, found: dict[str, RecyclableUnit], key: str, value: bytes | None) -> None:
        if value is None:
            return
        try:
            unit = inspect(value)
        except FormatError:
            self.refused += 1
            return
        if unit.epoch >= self.epoch:
            found[key] = unit

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

    def notes(self) -> list[str]:
        """Plain sentences about what makes the outer tiers slower than they could be, for people."""
        note = native_note() if self.tiers.tiers else ""
        return [note] if note else []

    def stats(self) -> dict[str, dict[str, Any]]:
        """Per tier: hits, misses, bytes, items, evictions, dropped and more. No I/O."""
        counters = self.memory.counters()
        memory = {**dataclasses.asdict(counters), "limit_bytes": self.memory.max_bytes, "refused": self.refused}
        return {"memory": memory, **self.tiers.stats()}

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


def _is_old(unit: RecyclableUnit | bytes, epoch: int, oldest: float) -> bool:
    """Whether it was computed before the pool was cleared, or too long ago."""
    try:
        head = peek(unit[:HEAD_BYTES]) if isinstance(unit, bytes) else unit
    except FormatError:
        return False
    return head.epoch < epoch or head.created_at < oldest
